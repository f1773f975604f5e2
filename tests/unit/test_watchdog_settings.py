"""The watch: section: what is said about a setting that cannot be meant."""

from __future__ import annotations

from textwrap import dedent

import pytest

from ftsupervise.config.load import dump, loads
from ftsupervise.config.schema import Run
from ftsupervise.errors import ConfigError
from ftsupervise.watch.watchdogs import WATCHDOGS, load_watchdog


def run(watch: str) -> Run:
    return loads(f"name: r\nlaunch: {{command: a}}\nwatch:\n  {watch}\n")


def test_an_empty_section_watches_the_run_its_progress_and_its_disk() -> None:
    watch = loads("name: r\nlaunch: {command: a}\n").watch
    assert watch.hang is not None and watch.disk is not None
    assert (watch.memory, watch.gpu, watch.exec) == (None, None, None)
    assert watch.loss is not None and watch.loss.only_guard  # what the loop itself calls no number


def test_every_watchdog_has_a_section_and_loads() -> None:
    watch = loads("name: r\nlaunch: {command: a}\n").watch
    for name in WATCHDOGS:
        assert hasattr(watch, name.replace("-", "_")), name
        assert callable(load_watchdog(name))


def test_what_is_written_is_read_again() -> None:
    text = """
      disk: [{path: /s, free: 5TB, usable: 80%, checkpoint: 2300GB, cadence: 3h, critical: {free: 3TB},
              quota: {command: [lfs, quota], format: lfs}}]
      memory: {used: 90%}
      gpu: {}
      checkpoints: {late: 2.5}
      throughput: {window: 30m}
      loss: {spike: null}
      exec: [{name: a, command: [check_nodes, -w, "5"], every: 10m}]
      hang: {phases: {eval: 2h}, pattern: 'it (\\d+)', signals: [step, beat]}"""
    settings = run(dedent(text).strip().replace("\n", "\n  "))
    assert loads(dump(settings)) == settings
    assert settings.watch.disk is not None
    assert settings.watch.disk[0].critical.checkpoints == 2  # the other critical limits keep their defaults


@pytest.mark.parametrize(
    ("watch", "said"),
    [
        ("memory: {used: 95}", 'write the share with a percent sign: "95%"'),
        ("memory: {used: 0.95}", 'write the share with a percent sign: "95%"'),
        ("memory: {used: 98%}", "the critical share is smaller"),
        ("disk: [{fre: 1TB}]", "did you mean 'free'?"),
        ("disk: [{free: 5TB, critical: {free: 6TB}}]", "the critical limit is reached before"),
        ("disk: [{used: 90%, critical: {used: 80%}}]", "the critical limit is reached before"),
        ("disk: [{quota: {command: [a]}}]", "needs a pattern"),
        ("disk: [{quota: {command: [a], pattern: 'x'}}]", "name the number"),
        ("hang: {pattern: 'step'}", "exactly one group"),
        ("hang: {pattern: '(step'}", "not a regular expression"),
        ("hang: {quiet: 30}", "expected a duration"),
        ("hang: {signals: [heartbeat]}", "expected 'step', 'beat'"),
        ("exec: [{name: a, command: [x]}, {name: a, command: [y]}]", "two plug-ins are called 'a'"),
        ("exec: [{name: a, command: []}]", "expected at least 1"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_told_in_words(watch: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^ftsupervise\.yaml:\d+:\d+: watch\.") as error:
        run(watch)
    assert said in str(error.value)
