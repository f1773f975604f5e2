"""What launch takes along into the job: the person's environment, but nothing that the alerts keep secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.scheduler.local import Local
from tests.neighbours.typed import typed

SETTINGS = """\
name: quiet
scheduler: local
launch: {command: "env > environment; mv environment seen", jobs: 1, time: 1m}
alerts:
  receivers:
    - slack: {token_env: OUR_SLACK_TOKEN, channel: C1}
    - name: pager
      webhook: {shape: pagerduty, key_env: OUR_PAGER_KEY}
  dead_man: {url_env: OUR_PING_URL}
"""


@pytest.mark.threat(
    "The environment at launch holds the secrets of the alerts.",
    "`launch` does not pass these variables to the job.",
)
def test_the_variables_that_hold_the_alerts_secrets_do_not_reach_the_job(
    tmp_path: Path, own_home: Path, until: Callable[..., Any]
) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    secret: dict[str, Any] = dict.fromkeys(
        ("OUR_SLACK_TOKEN", "OUR_PAGER_KEY", "OUR_PING_URL"), "https://canary.example.org/CANARY"
    )
    typed("launch", folder=tmp_path, code=0, MINE="taken along", **secret)
    until((tmp_path / "seen").exists, "the job")
    seen = (tmp_path / "seen").read_text()
    assert "MINE=taken along" in seen
    assert "CANARY" not in seen
    until(lambda: not Local().queue(), "the end of the chain, which writes its pages")
    for path in (*own_home.rglob("*"), *(tmp_path / "runs").rglob("*")):
        assert not path.is_file() or b"CANARY" not in path.read_bytes(), path
