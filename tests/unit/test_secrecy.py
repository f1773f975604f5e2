"""What counts as a secret, by name and by value, and where it is found again."""

from __future__ import annotations

import base64
import re
import time
from urllib.parse import quote, quote_plus

import pytest

from ftsupervise import secrecy

TOKEN = "xoxb-2345678901-Canary+/ä secret"


@pytest.mark.parametrize(
    "name",
    [
        "SLACK_HOOK",
        "SMTP_PASS",
        "APPRISE_URLS",
        "PAGERDUTY_KEY",
        "OUR_PING_URL",
        "HC_PING_URL",
        "SENTRY_DSN",
        "PGPASSWORD",
        "SSHPASS",
        "apiKey",
        "GITHUB_PAT",
        "DB_PASSWORD_2",
        "MYSQL_PWD",
        "SECRET_KEY_BASE",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "smtp_password",
        "SLACK_TOKEN_PROD",
        "webhook_url",
        "BASIC_AUTH",
        "AUTH_TOKENS",
        "HUBTOKEN",
    ],
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert secrecy.is_secret(name, "tr0ub4dor")


@pytest.mark.parametrize(
    "name",
    [
        "PWD",
        "OLDPWD",
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "passenger",
        "password_file",
        "partition",
        "SSH_AUTH_SOCK",
        "KEY",
        "CACHE_KEY",
        "FORWARD_PASS",
        "PATH",
        "BYPASS",
        "COMPASS",
        "HOOK",
        "PASS_THROUGH",
        "KEYS_PER_NODE",
        "SLURM_JOB_ID",
        "NCCL_DEBUG",
        "MASTER_ADDR",
        "SLACK_CHANNEL",
        "TOKENIZER_PATH",
    ],
)
def test_what_is_only_called_alike_is_none(name: str) -> None:
    assert not secrecy.is_secret(name, "tr0ub4dor")


@pytest.mark.parametrize(
    "value",
    [
        "xoxb-2345678901-canary",
        "https://hooks.slack.com/services/T000/B000/canary",
        "https://discord.com/api/webhooks/12345/canary",
        "https://hc-ping.com/8c1e7a52-0000-4000-8000-canary",
        "ghp_" + "a1" * 18,
        "hf_" + "a1" * 17,
        "AKIAIOSFODNN7EXAMPLE",
        "sk-ant-api03-" + "a1" * 20,
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "http://ada:canary@proxy.example.org:3128",
        "postgresql://ada:canary@db/runs",
        "https://0123456789abcdef0123456789abcdef@sentry.example.org/7",
        "https://example.org/blob?sv=1&sig=canarycanary",
        "slack://TokenA/TokenB/TokenCCC",
        "-----BEGIN OPENSSH PRIVATE KEY-----\ncanary",
        "Authorization: Bearer canarycanary",
    ],
)
def test_a_secret_is_known_by_its_value_under_any_name(value: str) -> None:
    assert secrecy.is_secret("INNOCENT", value)
    assert secrecy.kind(f"python train.py --with '{value}' --steps 5")
    assert "canary" not in secrecy.masked(f"cannot reach {value}!".replace("KEY-----\ncanary", "KEY-----"))


@pytest.mark.parametrize(
    "value",
    [
        "python train.py --batch 8 --lr 1e-4",
        "https://example.org/path?page=2",
        "ssh://git@github.com/ada/x.git",
        "tcp://node-1:29500",
        "0123456789abcdef0123456789abcdef01234567",
        "/home/ada/sk-learn-examples-of-the-last-year/x",
        'export https_proxy="http://$USER:$PASS@proxy"',
        "s3://bucket/checkpoints/step-100",
        "docker://nvcr.io/nvidia/pytorch:24.01-py3",
        "npm_config_user_agent_for_all_of_us",
        "node-[1-4,7]",
        "ada@example.org",
    ],
)
def test_ordinary_values_are_none(value: str) -> None:
    assert secrecy.kind(value) == ""
    assert secrecy.masked(value) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("USE_AUTH", "1"),
        ("HF_TOKEN", ""),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/ada/key.json"),
        ("SSH_KEY", "~/.ssh/id"),
    ],
)
def test_a_switch_and_the_path_of_a_key_file_are_none(name: str, value: str) -> None:
    assert not secrecy.is_secret(name, value)


def test_an_environment_is_parted_from_its_secrets() -> None:
    env = {"HOME": "/home/ada", "SLACK_HOOK": "x", "OURS": "y", "HF_TOKEN": "z", "https_proxy": "http://a:b@c:1"}
    left, out = secrecy.without(env, named=["OURS"], kept=["HF_TOKEN"])
    assert left == {"HOME": "/home/ada", "HF_TOKEN": "z"}
    assert out == ("OURS", "SLACK_HOOK", "https_proxy")


@pytest.mark.threat(
    "A server repeats a secret in its error message, encoded as base64 or with `%`.",
    "ftsupervise removes the secret from the message.",
)
@pytest.mark.parametrize(
    "encoded",
    [
        TOKEN,
        quote(TOKEN),
        quote(TOKEN, safe=""),
        quote_plus(TOKEN),
        quote(quote(TOKEN, safe=""), safe=""),
        re.sub("%..", lambda found: found[0].lower(), quote(TOKEN, safe="")),
        "".join(f"%{byte:02x}" for byte in TOKEN.encode()),
        TOKEN.encode("unicode_escape").decode(),
        ascii(TOKEN.encode())[2:-1],
        TOKEN.replace("/", "\\/"),
        base64.b64encode(TOKEN.encode()).decode(),
        base64.urlsafe_b64encode(TOKEN.encode()).decode(),
        quote(base64.b64encode(TOKEN.encode()).decode(), safe=""),
        *(
            base64.b64encode(f"{before}{TOKEN}{after}".encode()).decode()
            for before in ("", "a", "ada:", "\0\0")
            for after in ("", "!", "??")
        ),
    ],
)
def test_a_secret_is_found_however_it_is_encoded(encoded: str) -> None:
    hidden = secrecy.masked(f"before {encoded} after", ["hunter2", TOKEN])
    assert secrecy.HIDDEN in hidden
    left = hidden.removeprefix("before ").removesuffix(" after").replace(secrecy.HIDDEN, "")
    assert len(left) <= 12, f"only what stands around it is left: {left}"


def test_a_short_password_is_found_in_basic_authentication() -> None:
    header = base64.b64encode(b"ada:hunter2").decode()
    assert secrecy.masked(f"sent {header}", ["hunter2"]) == f"sent {header[:5]}{secrecy.HIDDEN}"


def test_shell_lines_that_set_a_secret_are_seen() -> None:
    assert secrecy.assigned("module load x\nexport SMTP_PASS=hunter2\n") == "SMTP_PASS"
    assert secrecy.assigned("SLACK_HOOK='abc def' python train.py") == "SLACK_HOOK"
    assert secrecy.assigned('export HF_TOKEN="$(cat ~/.hf_token)"\nX_KEY=$1\nKEYS=3\nHF_TOKEN=') == ""


@pytest.mark.threat("A text is made to slow down the search for secrets.", "The search takes milliseconds.")
def test_hostile_text_costs_no_time() -> None:
    began = time.monotonic()
    for hostile in (
        "\\" * 100_000,
        "a.b+c-" * 20_000,
        "http://" * 15_000,
        "a:" * 50_000,
        "%25" * 30_000,
        "=" * 100_000,
    ):
        secrecy.masked(hostile, [TOKEN, "aaaaaaaa"])
        secrecy.assigned(hostile)
    assert time.monotonic() - began < 10
