"""The crontab file, line by line."""

from __future__ import annotations

import pytest

from ftsupervise.crontab.entries import parse_crontab


def test_fields_nicknames_and_variables() -> None:
    table = parse_crontab('# note\nA=1\n*/5 * * * * do it\nB = "x y"\n@daily\tother --all\n@tick third\n')
    assert [(line.when, line.command, line.env) for line in table.lines] == [
        ("*/5 * * * *", "do it", {"A": "1"}),
        ("@daily", "other --all", {"A": "1", "B": "x y"}),
        ("@tick", "third", {"A": "1", "B": "x y"}),
    ]
    assert not table.problems


def test_a_percent_sign_begins_the_standard_input() -> None:
    line = parse_crontab("@daily mail me%Dear me,%%it is \\%5.%").lines[0]
    assert line.command == "mail me"
    assert line.stdin == "Dear me,\n\nit is %5.\n\n"


def test_cron_tz_holds_for_the_lines_below_it() -> None:
    first, second = parse_crontab("0 9 * * * a\nCRON_TZ=Asia/Tokyo\n0 9 * * * b\n").lines
    assert (first.zone, second.zone) == ("", "Asia/Tokyo")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("* * * * run", "five fields|bad"),
        ("61 * * * * run", "bad minute"),
        ("* * * * *", "no command"),
        ("@reboot run", "@reboot"),
        ("@sometimes run", "nickname"),
        ("CRON_TZ=Mars/Base", "time zone"),
        ("* * * * * a\x07b", "control"),
    ],
)
def test_a_wrong_line_is_told_and_the_others_run(text: str, says: str) -> None:
    table = parse_crontab(f"@daily before\n{text}\n@daily after\n")
    assert [line.command for line in table.lines] == ["before", "after"]
    ((number, why),) = table.problems
    assert number == 2
    assert any(word in why for word in says.split("|")), why


def test_a_line_keeps_its_name_when_others_come_and_go() -> None:
    one = parse_crontab("@daily /usr/bin/python3 a.py\n").lines[0]
    two = parse_crontab("@hourly x\n\n# note\n@daily /usr/bin/python3 a.py\n").lines[1]
    assert one.name == two.name
    assert one.name.startswith("python3-")


def test_the_same_line_twice_is_two_entries() -> None:
    names = [line.name for line in parse_crontab("@daily x\n@daily x\n").lines]
    assert len(set(names)) == 2
