"""Labelled histories at default settings: no healthy run is called hung, no hung run is missed."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from ftsupervise.probe import Probe
from ftsupervise.truth import Health

from .run_history import TELLINGS, History, Player, generate


@pytest.mark.parametrize("histories", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_no_history_gives_a_false_hang_and_none_a_missed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], histories: int
) -> None:
    false, missed, delays = [], [], []
    with Probe(notes=tmp_path / "notes" / "probe", bound=60) as probe:
        for seed in range(histories):
            history = generate(seed)
            folder = tmp_path / str(seed)
            folder.mkdir()
            told = None
            for t, finding in Player(history, folder, probe).ticks():
                if finding.health is Health.BAD:
                    if history.hung_at is None or t < history.hung_at:
                        segment = history.at(t)
                        false.append(f"seed {seed} {history.telling}: {finding.summary} in {segment}")
                        break
                    told = t
                    break
            if history.hung_at is not None:
                if told is None:
                    missed.append(f"seed {seed} {history.telling} hung in {history.hung_in}")
                else:
                    delays.append((history, told - history.hung_at))
    with capsys.disabled():
        print(_report(delays))
    assert not false, "\n".join(false)
    assert not missed, "\n".join(missed)
    assert len(delays) > 0.35 * histories
    assert {h.telling for h, _ in delays} == set(TELLINGS)
    assert {h.hung_in for h, _ in delays} == {"train", "save", "eval", "start"}


def _report(delays: list[tuple[History, float]]) -> str:
    lines = ["", f"detection delay of {len(delays)} hangs (ticks every 5 min), median and worst:"]
    for telling in TELLINGS:
        for where in ("train", "save", "eval", "start"):
            mine = [(h, d) for h, d in delays if h.telling == telling and h.hung_in == where]
            if mine:
                minutes = [d / 60 for _, d in mine]
                steps = [d / h.step_time for h, d in mine if h.step_time >= 30]
                in_steps = f", {median(steps):.0f} and {max(steps):.0f} steps of 30-240 s" if steps else ""
                lines.append(
                    f"  {telling:7} in {where:5} {len(mine):3}: {median(minutes):5.0f} and {max(minutes):4.0f} min{in_steps}"
                )
    return "\n".join(lines)
