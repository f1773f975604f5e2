"""Secrets of the account that types: in no job script, no job environment, no settings as launched, and in no sentence."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from ftsupervise.alerts.receivers import Broken, read_secret, redact
from ftsupervise.config.alerting import Slack
from ftsupervise.config.load import loads
from ftsupervise.errors import ConfigError
from ftsupervise.scheduler.local import Local
from tests.neighbours.typed import typed

CANARY = "cAnary7x"
FOUR = {
    "SLACK_HOOK": f"https://hooks.slack.com/services/T0/B0/{CANARY}",
    "SMTP_PASS": CANARY,
    "APPRISE_URLS": f"mailto://ada:{CANARY}@example.org",
    "PAGERDUTY_KEY": f"{CANARY}0000000000000000",
    "https_proxy": f"http://ada:{CANARY}@proxy:3128",
    "INNOCENT": f"xoxb-{CANARY}",
}
MAIL = "alerts: {receivers: [email: {host: m, from: a@b.c, to: [d@e.f], user: u, %s}]}"


def type_in(folder: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return typed(*words, folder=folder, **more)


@pytest.mark.threat(
    "SLACK_HOOK, SMTP_PASS, APPRISE_URLS, PAGERDUTY_KEY or a proxy's password is in the environment at launch.",
    "The job gets none of them. `launch` names them, and `launch.take_along` lists exceptions.",
)
def test_no_secret_of_the_account_reaches_the_job_but_what_is_to_be_taken_along(
    tmp_path: Path, own_home: Path, until: Callable[..., Any]
) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: quiet\nscheduler: local\n"
        "launch: {command: 'env > it; mv it seen', jobs: 1, time: 1m, take_along: [HF_TOKEN]}\n"
    )
    done = type_in(
        tmp_path, "launch", **FOUR, HF_TOKEN="for-the-training", GOOGLE_APPLICATION_CREDENTIALS="/home/ada/x.json"
    )
    assert done.returncode == 0, done.stderr
    until((tmp_path / "seen").exists, "the job")
    until(lambda: not Local().queue(), "the end of the chain, which writes its pages")
    seen = (tmp_path / "seen").read_text()
    assert "HF_TOKEN=for-the-training" in seen
    assert "GOOGLE_APPLICATION_CREDENTIALS=/home/ada/x.json" in seen, "a path is no secret"
    for path in (tmp_path / "seen", *own_home.rglob("*"), *(tmp_path / "runs").rglob("*")):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in done.stdout + done.stderr
    for name in FOUR:
        assert name in done.stderr, "it is said what the jobs do not get"
    assert "launch.take_along" in done.stderr


@pytest.mark.threat(
    "A setting, a command, `launch.env`, `setup` or a template contains a secret.",
    "ftsupervise refuses the settings and does not print the secret.",
)
@pytest.mark.parametrize(
    "settings",
    [
        *(f"launch: {{command: 'true', env: {{{name}: '{value}'}}}}" for name, value in FOUR.items()),
        f"launch: {{command: 'python train.py --token xoxb-{CANARY}'}}",
        f"launch: {{command: [python, train.py, 'https://ada:{CANARY}@example.org/x']}}",
        f"launch: {{command: 'SMTP_PASS={CANARY} python train.py'}}",
        f"launch: {{command: 'true', setup: 'export PAGERDUTY_KEY={CANARY}'}}",
        f"launch: {{command: 'true', sbatch: ['--comment=xoxb-{CANARY}']}}",
        "launch: {command: 'true', template: mine.j2}",
        f"launch: {{command: 'true'}}\nwatch: {{exec: [{{name: x, command: [curl, '{FOUR['SLACK_HOOK']}']}}]}}",
        f"launch: {{command: 'true'}}\nalerts: {{receivers: [command: {{argv: [curl, '{FOUR['SLACK_HOOK']}']}}]}}",
    ],
)
def test_a_secret_in_the_settings_is_refused_and_not_printed(tmp_path: Path, settings: str) -> None:
    (tmp_path / "mine.j2").write_text(f"#!/bin/sh\nexport SMTP_PASS='{CANARY}'\ntrue\n")
    (tmp_path / "ftsupervise.yaml").write_text(f"name: quiet\nscheduler: local\n{settings}\n")
    for words in (["launch", "--dry-run"], ["launch"]):
        done = type_in(tmp_path, *words)
        assert done.returncode == 78, done.stdout + done.stderr
        assert CANARY not in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.threat(
    "Somebody types a secret where the name of a file or a variable belongs.",
    "ftsupervise refuses the settings and does not print the secret.",
)
@pytest.mark.parametrize(
    "wrong",
    [
        f"password_env: {CANARY}",
        f"password_env: {CANARY}…",
        "password_env: hunter2…",
        f"password_env: '{FOUR['SLACK_HOOK']}'",
        "password_env: AKIAIOSFODNN7EXAMPLE",
        "password_env: R0123456789ABCDEF0123456789ABCDE",
        f"password_file: xoxb-{CANARY}",
        f"password_file: {CANARY}",
        f"password_file: T0000/B0000/{CANARY}",
        f"password_file: '{FOUR['SLACK_HOOK']}'",
        f"password_file: '{FOUR['https_proxy']}'",
        f"password_file: 'correct {CANARY} battery'",
    ],
)
def test_a_secret_typed_where_a_file_or_a_variable_is_named_is_refused_without_being_printed(wrong: str) -> None:
    value = wrong.partition(": ")[2].strip("'")
    with pytest.raises(ConfigError) as refused:
        loads(f"name: x\nlaunch: {{command: 'true'}}\n{MAIL % wrong}\n")
    assert value not in str(refused.value) and CANARY not in str(refused.value)
    assert "password_" in str(refused.value)


@pytest.mark.parametrize(
    "right",
    ["password_file: ~/.mail", "password_file: ./m7", "password_file: mail-password", "password_file: k/m7.txt",
     "password_file: /run/secrets/7f3a", "password_env: SMTP_PASSWORD", "password_env: P"],
)  # fmt: skip
def test_the_names_of_files_and_variables_are_taken(right: str) -> None:
    loads(f"name: x\nlaunch: {{command: 'true'}}\n{MAIL % right}\n")


@pytest.mark.threat(
    "Somebody types the address of a webhook, which is a secret, where a file name belongs.",
    "ftsupervise refuses the settings and does not print the address.",
)
@pytest.mark.parametrize(
    "typed",
    [
        "/services/T00/B00/Xx12",
        "/services/T0CAN4RY0/B0CAN4RY0/canarycanarycanarycanary",
        "./services/T00/B00/Xx12",
        "/api/webhooks/1234/canary-canary",
        "/v1/spaces/AAAA/messages?key=canary",
        "/2f6c4f0e-7a53-4b8e-9d4e-0123456789ab",
    ],
)
@pytest.mark.parametrize("where", ["slack: {webhook_file: '%s'}", "webhook: {url_file: '%s'}"])
def test_the_path_of_a_hook_in_the_place_of_a_file_is_refused_without_being_printed(where: str, typed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loads(f"name: x\nlaunch: {{command: 'true'}}\nalerts: {{receivers: [{where % typed}]}}\n")
    assert typed not in str(refused.value) and "canary" not in str(refused.value) and "Xx12" not in str(refused.value)
    assert "_file" in str(refused.value) and "it may be the secret itself" in str(refused.value)


@pytest.mark.parametrize("right", ["/services/token", "/services/slack/hook", "/srv/services/T7/hook", "~/services/T7"])
def test_a_folder_called_services_is_none_of_these(right: str) -> None:
    loads(f"name: x\nlaunch: {{command: 'true'}}\nalerts: {{receivers: [slack: {{webhook_file: '{right}'}}]}}\n")


@pytest.mark.threat(
    "The file of a secret does not exist, and the name given may be the secret itself.",
    "The message prints the name only if it clearly is a file name.",
)
def test_a_file_that_is_not_there_is_named_only_where_that_cannot_be_the_secret(tmp_path: Path) -> None:
    with pytest.raises(Broken) as unseen:
        read_secret(Slack(token_file=tmp_path / CANARY, channel="C"), "token")
    assert CANARY not in str(unseen.value) and str(tmp_path) in str(unseen.value)
    with pytest.raises(Broken, match="slack-token: no such file"):
        read_secret(Slack(token_file=tmp_path / "slack-token", channel="C"), "token")


@pytest.mark.parametrize(
    "said",
    [
        f"535 authentication failed for {base64.b64encode(b'ada:' + CANARY.encode()).decode()}",
        "535 " + base64.b64encode(b"\0ada\0" + CANARY.encode()).decode() + " refused",
        "bad request: /login?password=" + quote(CANARY + "+/", safe=""),
        "bad request: " + "".join(f"%{byte:02X}" for byte in CANARY.encode()),
    ],
)  # fmt: skip
def test_an_errors_text_has_no_secret_in_any_encoding(said: str) -> None:
    told = redact(said, [CANARY])
    assert "<secret>" in told
    assert CANARY not in told
    for piece in (told, told + "="):
        for word in piece.split():
            try:
                assert CANARY.encode() not in base64.b64decode(word + "=" * (-len(word) % 4))
            except ValueError:
                continue
