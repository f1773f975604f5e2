"""What ``dump`` writes loads again as the same settings, whatever stands in them; and no text surprises ``loads``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftsupervise.config.load import dump, loads
from ftsupervise.config.schema import GuardSettings, Launch, Run
from ftsupervise.config.strict_yaml import control_character
from ftsupervise.errors import ConfigError

_fine = st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]).filter(lambda c: not control_character(c))
_words = """yes no ~ null 0123 20:00:00 1e3 2026-01-01 ${HOME} $${HOME} <<  = #x ' " % @ | >- !!x *a &a {} [] \\ é"""
_traps = st.sampled_from(
    [*_words.split(), "${A b}", "$HOME", "x$$HOME/${HOME}/$", "- a", "a: b", "a #b", " a", "a ", "", "\u00a0"]
)
line = st.text(_fine, max_size=20) | _traps
lines = st.lists(line | st.just("\tx") | st.just("  y"), max_size=5).map("\n".join) | st.sampled_from(
    ["\n", "a\n\n", "\n a"]
)
command = lines.filter(str.strip) | st.tuples(lines.filter(str.strip), lines)
duration = st.integers(1, 10**9).map(lambda ms: timedelta(milliseconds=ms))
path = (
    st.text(_fine, max_size=10)
    .map(lambda name: Path("/") / name.replace("$", ""))
    .filter(lambda p: ".." not in p.parts)
)
launches = st.builds(
    Launch,
    command=command,
    srun=st.booleans(),
    jobs=st.integers(1, 1000),
    time=st.none() | duration.map(lambda d: d * 100_000),
    warn=st.none() | duration.filter(lambda d: d < timedelta(milliseconds=100_000)),
    gpus_per_node=st.none() | st.just("h100:8") | st.integers(1, 16),
    mem=st.none() | st.sampled_from(["0", "500G"]),
    exclude=st.lists(st.sampled_from(["n1", "n[1-4,7]"]), max_size=2).map(tuple),
    output=st.none() | line.map(lambda text: f"/{text}"),
    setup=st.none() | lines,
    container=st.none() | command,
    env=st.dictionaries(st.sampled_from(["A", "NO", "null", "y", "B_2"]), line, max_size=3),
    template=st.none() | path,
)
runs = st.builds(
    Run,
    name=st.sampled_from(["x", "0", "1.5", "20", "1e3", "null", "no", "a-b_c.d"]),
    launch=launches,
    run_dir=path,
    guard=st.builds(GuardSettings, poll=duration, memory=st.none() | st.floats(0.001, 1), run_for=st.none() | duration),
)


@settings(deadline=None, max_examples=150)
@given(runs)
def test_settings_that_are_written_load_as_equal_settings(run: Run) -> None:
    assert loads(dump(run), Path("/elsewhere/run.yaml"), environ={"HOME": "/wrong", "A": "wrong"}) == run


@settings(deadline=None, max_examples=50)
@given(runs)
def test_an_ordinary_reader_of_yaml_sees_the_same_text_and_no_surprises(run: Run) -> None:
    seen = yaml.safe_load(dump(run))
    assert seen["name"] == run.name
    assert list(seen["launch"]["env"]) == list(run.launch.env)
    assert seen["launch"]["time"] is None or isinstance(seen["launch"]["time"], str)


_good = """\
name: x
launch:
  command: [python, train.py]
  time: "20:00:00"
  env: {A: "1"}
  gpus_per_node: h100:8
  exclude:
  - n[1-4]
guard:
  memory: 95%
watch:
  every: 5m
alerts: {}
"""
_words = (
    """: [ ] { } ' " # &a *a !x | ~ ${A} ${ 0x 1:30 null yes é 1e999 -1 name launch ? @ ` , \\ \\u0000 "\\ud800" [[[["""
)
_pieces = [*_words.split(), "\n", " ", "  ", "- ", "\t", "\x00", "\u2028", "\ufeff", "9" * 400, "password: x", "<<: "]
_pieces += ["\n---\n", "%YAML 1.1\n", "a: " * 5]
edits = st.lists(st.tuples(st.integers(0, len(_good)), st.integers(0, 30), st.sampled_from(_pieces)), max_size=6)


@settings(deadline=None, max_examples=400)
@given(edits)
@example([(0, 400, "")])
def test_no_mangled_file_makes_load_raise_anything_but_a_config_error(changes: list[tuple[int, int, str]]) -> None:
    text = _good
    for start, length, piece in changes:
        text = text[:start] + piece + text[start + length :]
    _loads_or_says_why(text)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_no_text_and_no_bytes_make_load_raise_anything_but_a_config_error(text: str | bytes) -> None:
    _loads_or_says_why(text)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | _traps,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | _traps, inner, max_size=3),
    max_leaves=8,
)
_keys = ["name", "launch", "run_dir", "scheduler", "guard", "watch", "alerts"]
_launch_keys = [*Launch.model_fields, "zzz", "password"]


@settings(deadline=None, max_examples=80)
@given(st.dictionaries(st.sampled_from(_keys), _values), st.dictionaries(st.sampled_from(_launch_keys), _values))
def test_no_value_of_any_kind_at_any_key_makes_load_raise_anything_but_a_config_error(
    top: dict[str, object], launch: dict[str, object]
) -> None:
    _loads_or_says_why(yaml.safe_dump({"launch": launch, **top}))


def _loads_or_says_why(text: str | bytes) -> None:
    try:
        loads(text, environ={"A": "1"})
    except ConfigError as error:
        for sentence in error.message.splitlines():
            assert sentence.startswith(("ftsupervise.yaml:", "... and "))
            assert "Input should" not in sentence
            assert "Value error" not in sentence
