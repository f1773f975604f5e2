"""What a step costs in which nothing is due."""

from __future__ import annotations

import pytest

from benchmarks.guard import guarded, no_system_call, run_directory


@pytest.mark.parametrize("given", [{}, {"agree": int, "agree_every": 1 << 30}], ids=["alone", "agreeing"])
def test_a_step_in_which_nothing_is_due_makes_no_system_call(
    given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FTSUPERVISE_RUN_DIR", "FTSUPERVISE_ATTEMPT_DIR", "FTSUPERVISE_ATTEMPT", "FTSUPERVISE_PAGES"):
        monkeypatch.setenv(name, "")  # given back after the test
    with run_directory(), guarded(poll=3600, **given) as guard:
        guard.step(1)
        quiet = no_system_call(lambda: guard.step(2), 10_000)
    if quiet is None:
        pytest.skip("the clock of this machine is a system call")
    assert quiet
