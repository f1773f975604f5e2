"""The traps of YAML, one row each: what is written, and the sentence it earns."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftsupervise.config.strict_yaml import MAX_BYTES, Place, Problem, dotted, parse, secret_at


def problems(text: str | bytes) -> list[str]:
    raw = text if isinstance(text, bytes) else text.encode()
    return [str(problem) for problem in parse(raw, "f.yaml").problems]


@pytest.mark.parametrize(
    ("written", "typed_instead"),
    [
        ("time: 20:00:00", 'type time: "20:00:00"'),
        ("time: 100:00:00", 'type time: "100:00:00"'),
        ("time: 1:30", 'type time: "1:30"'),
        ("time: 2026-11-21", 'type time: "2026-11-21"'),
        ("time: 2026-11-21 20:00:00", 'type time: "2026-11-21 20:00:00"'),
        ("account: 0123", 'type account: "0123"'),
        ("account: 0o17", 'type account: "0o17"'),
        ("account: 0x1F", 'type account: "0x1F"'),
        ("account: 0b11", 'type account: "0b11"'),
        ("account: 1_000", 'type account: "1_000"'),
        ("account: 1e3", 'write 1000, or, where text is meant, type account: "1e3"'),
        ("account: +5", 'type account: "+5"'),
        ("account: .5", 'type account: ".5"'),
        ("account: 5.", 'type account: "5."'),
        ("account: -.inf", 'type account: "-.inf"'),
        ("account: .NaN", 'type account: ".NaN"'),
        ("account: 12345678901234567890", 'type account: "12345678901234567890"'),
        ("account: yes", 'write true, or, where text is meant, type account: "yes"'),
        ("account: No", 'write false, or, where text is meant, type account: "No"'),
        ("account: on", 'write true, or, where text is meant, type account: "on"'),
        ("account: OFF", 'write false, or, where text is meant, type account: "OFF"'),
        ("account: True", 'write true, or, where text is meant, type account: "True"'),
        ("run_dir: ~", 'write null, or, where text is meant, type run_dir: "~"'),
        ("account: NULL", 'write null, or, where text is meant, type account: "NULL"'),
    ],
)
def test_a_word_that_yaml_dialects_read_differently_is_refused_with_what_to_type(
    written: str, typed_instead: str
) -> None:
    (said,) = problems(written)
    column = written.index(":") + 3
    assert said.startswith(f"f.yaml:1:{column}: {written.split(':')[0]}: ")
    assert said.endswith(typed_instead)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1-12:00:00", "1-12:00:00"),
        ("20h", "20h"),
        ("95%", "95%"),
        ("v1.2.3", "v1.2.3"),
        ("node-[1-4]", "node-[1-4]"),
        ("y", "y"),
        ("-", None),
        ("true", True),
        ("false", False),
        ("null", None),
        ("", None),
        ("0", 0),
        ("-17", -17),
        ("1.50", 1.5),
        ("'yes'", "yes"),
        ('"0123"', "0123"),
        ("|-\n  20:00:00", "20:00:00"),
    ],
)
def test_what_every_reader_of_yaml_agrees_on_is_taken_as_it_stands(written: str, meant: object) -> None:
    document = parse(f"key: {written}\n".encode(), "f.yaml")
    if written == "-":
        assert document.problems
    else:
        assert (document.value, document.problems) == ({"key": meant}, [])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3:1: a: given twice; the first one is in line 1"),
        ("x: {a: 1, a: 1}", "f.yaml:1:11: x.a: given twice; the first one is in line 1"),
        ("a\n\tb: 1", "f.yaml:2:1: a tab here"),
        ("a: 1\n\tb: 1", "f.yaml:2:1: a tab here"),
        ("a: b: c", "f.yaml:1:5: a second ': ' in one line"),
        ("a: 1\n  b: 2", "f.yaml:2:4: a second ': ' in one line"),
        ("a:\n    b: 1\n  c: 2", "f.yaml:3:3: the indentation does not fit"),
        ("a: 1\nb\nc: 2", "f.yaml:3:1: a key without ':'"),
        ("---\na: 1\n---\nb: 1", "f.yaml:3:1: a second document"),
        ("a: !!str 1", "f.yaml:1:4: YAML tags"),
        ("a: !secret x", "f.yaml:1:4: YAML tags"),
        ("!!python/object/apply:os.system [id]", "f.yaml:1:1: YAML tags"),
        ("%YAML 1.1\n---\na: 1", "f.yaml:1:1: '%' directives"),
        ("a: *x", "f.yaml:1:4: '*' starts an alias"),
        ("a: *.log", "f.yaml:1:5: '*' and '&'"),
        ("a: @x", "f.yaml:1:4: this character cannot start a value"),
        ("a: 'x", "f.yaml:1:6: a quote or bracket is opened and never closed"),
        ("a: [1, 2", "f.yaml:1:9: "),
        ("b: &b {c: 1}\na:\n  <<: *b", "f.yaml:3:3: a: merge keys ('<<') are not used here"),
        ("? [a]\n: b", "f.yaml:1:3: a key must be one word"),
        ('a: "x\\u0007"', "f.yaml:1:4: a: control character U+0007"),
        ('a: "x\\uD800"', "f.yaml:1:4: a: control character U+D800"),
        ('a: "x\\u202E"', "f.yaml:1:4: a: control character U+202E"),
        ('"a\\x1b": 1', "f.yaml:1:1: a key holds a control character"),
        ('a: "\\U00ffffff"', "f.yaml:1:7: not valid YAML"),
        (b"a: 1\nb: \x00", "f.yaml:2:4: control character U+0000"),
        (b"\x7fELF\x02\x01\x00", "f.yaml:1:1: control character U+007F"),
        (b"a: caf\xe9", "f.yaml:1:7: not UTF-8 text"),
        (b"\xff\xfea\x00:\x00", "f.yaml:1:1: not UTF-8 text"),
        ("[" * 5000, "f.yaml:1:31: nested more than 30 levels deep"),
        ("a: " + "{a: " * 40 + "}" * 40, "nested more than 30 levels deep"),
        ("a: &x [*x]", "f.yaml:1:1: the file is too large when its aliases"),
        (b"#" * (MAX_BYTES + 1), "f.yaml: the file is larger than 256 KiB"),
    ],
)
def test_a_file_that_is_wrong_gets_its_line_column_and_a_sentence(written: str | bytes, said: str) -> None:
    first = problems(written)[0]
    assert said in first
    assert "\n" not in first


def test_everything_wrong_with_a_file_is_said_at_once() -> None:
    said = problems("a: yes\nb: 1:30\nc:\n  - 0123\n  - x: no\n")
    assert [line.split(" ")[0] for line in said] == ["f.yaml:1:4:", "f.yaml:2:4:", "f.yaml:4:5:", "f.yaml:5:8:"]
    assert "c[1].x: no without quotes" in said[3]


def test_a_billion_laughs_cost_no_time_and_no_memory() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 20)]
    began = time.perf_counter()
    (said,) = problems("\n".join(lines))
    assert "too large when its aliases" in said
    assert time.perf_counter() - began < 20


def test_one_large_text_used_often_counts_each_time() -> None:
    text = "a: &a " + "x" * 100_000 + "\nb: [" + ", ".join(["*a"] * 1000) + "]"
    assert "too large when its aliases" in problems(text)[0]


def test_aliases_in_moderation_are_welcome() -> None:
    document = parse(b"a: &a {every: 5m}\nb: *a\n", "f.yaml")
    assert document.value == {"a": {"every": "5m"}, "b": {"every": "5m"}}
    assert not document.problems


def test_each_value_knows_where_it_and_its_key_stand() -> None:
    places = parse(b"a:\n  b: [x,\n    'y']\n", "f.yaml").places
    assert places[("a", "b")] == Place("f.yaml", 2, 6, 2, 3)
    assert places[("a", "b", 0)][1:3] == (2, 7)
    assert places[("a", "b", 1)][1:3] == (3, 5)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_and_a_byte_order_mark_are_no_trouble(ending: str) -> None:
    document = parse(("\ufeffa: 1" + ending + "b: 2" + ending).encode(), "f.yaml")
    assert document.value == {"a": 1, "b": 2}
    assert document.places[("b",)].line == 2


def test_a_secret_is_never_repeated_even_by_the_yaml_reader() -> None:
    said = problems("password: 0123\ntoken: 1:30\nsmtp:\n  api_key: 0x1F\n")
    assert len(said) == 3
    for secret in ("0123", "1:30", "0x1F"):
        assert not any(secret in line for line in said)


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("password", True),
        ("smtp_password", True),
        ("password_file", True),
        ("token_env", True),
        ("webhook_url", True),
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("MAX_TOKENS", False),
        ("partition", False),
        ("passenger", False),
    ],
)
def test_the_name_of_a_key_tells_whether_its_value_is_a_secret(key: str, secret: bool) -> None:
    assert secret_at(("alerts", key)) is secret


def test_a_path_is_written_the_way_people_write_it() -> None:
    assert dotted(("watch", "disk", 1, "free")) == "watch.disk[1].free"
    assert dotted(("env", "A B\n")) == "env.'A B\\n'"
    assert str(Problem("f", 0, 0, (), "x")) == "f: x"


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.text(alphabet=" \n\t:-[]{}#&*!|>'\"%@`?,ab01yesno~<=.\\xu", max_size=80).map(str.encode)
)
def test_no_bytes_make_the_reader_raise(raw: bytes) -> None:
    document = parse(raw, "f.yaml")
    assert all("\n" not in str(problem) for problem in document.problems)


@pytest.mark.parametrize(
    ("written", "number"), [("010", "10"), ("1_000", "1000"), ("0x10", "16"), ("-07", "-7"), ("0o17", "15")]
)
def test_an_unusual_number_is_refused_with_the_number_to_type(written: str, number: str) -> None:
    (problem,) = parse(f"nodes: {written}\n".encode(), "f").problems
    assert f'write {number}, or, where text is meant, type nodes: "{written}"' in problem.text


@pytest.mark.threat(
    "The settings of a run of somebody else hold a number of 200,000 digits, which took half an hour to read.",
    "The time to read settings grows with their length alone, which is limited.",
)
@pytest.mark.parametrize(
    "text", ["9" * 200_000 + "h", "1_" * 100_000 + "x", "9:" * 100_000, "1." * 100_000, "1e" * 100_000]
)
def test_no_number_of_a_stranger_is_slow_to_read(text: str) -> None:
    """The form of a number was looked for in a time that grew with the square of the digits: half an hour for this file."""
    began = time.process_time()
    assert len(problems(f"name: {text}\n")) <= 1
    assert time.process_time() - began < 5
