"""The page of a run in a tracker: what the environment names, and what of it may be shown to people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.rundir.tracker import from_environment, safe_url

WANDB = {"WANDB_ENTITY": "lab", "WANDB_PROJECT": "train 10b", "WANDB_RUN_ID": "ab12"}
MLFLOW = {"MLFLOW_TRACKING_URI": "https://mlflow.example.org/", "MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_RUN_ID": "f00"}


@pytest.mark.parametrize(
    ("env", "url"),
    [
        (WANDB, "https://wandb.ai/lab/train%2010b/runs/ab12"),
        ({**WANDB, "WANDB_RUN_ID": ""}, "https://wandb.ai/lab/train%2010b"),
        ({**WANDB, "WANDB_BASE_URL": "https://api.wandb.ai"}, "https://wandb.ai/lab/train%2010b/runs/ab12"),
        ({**WANDB, "WANDB_BASE_URL": "http://wandb.lab:8080"}, "http://wandb.lab:8080/lab/train%2010b/runs/ab12"),
        (MLFLOW, "https://mlflow.example.org/#/experiments/7/runs/f00"),
        ({"MLFLOW_TRACKING_URI": "http://m:5000", "MLFLOW_RUN_ID": "f00"}, "http://m:5000"),
        ({**WANDB, "FTSUPERVISE_TRACKER_URL": "http://login1:6006/#scalars"}, "http://login1:6006/#scalars"),
    ],
)
def test_the_environment_names_the_page_as_precisely_as_it_can(env: dict[str, str], url: str) -> None:
    found = from_environment({**env, "HOME": "/home/ada"})
    assert found is not None and found.url == url


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WANDB_API_KEY": "k" * 40},
        {**WANDB, "WANDB_ENTITY": ""},
        {**WANDB, "WANDB_MODE": "offline"},
        {**WANDB, "WANDB_DISABLED": "true"},
        {"MLFLOW_TRACKING_URI": "sqlite:////scratch/mlflow.db", "MLFLOW_RUN_ID": "f00"},
        {"MLFLOW_TRACKING_URI": "databricks"},
        {"FTSUPERVISE_TRACKER_URL": "javascript:alert(1)"},
    ],
)
def test_without_a_page_there_is_none(env: dict[str, str]) -> None:
    assert from_environment(env) is None


@pytest.mark.threat(
    "The environment of a training names an address of a tracker that is none, or has a password in it.",
    "Only a plain http or https address is shown, without user, password and query.",
)
def test_passwords_and_keys_in_an_address_are_left_out() -> None:
    env = {"MLFLOW_TRACKING_URI": "https://ada:s3cret@mlflow.example.org/x?token=s3cret", "MLFLOW_RUN_ID": "1"}
    found = from_environment(env)
    assert found is not None and found.url == "https://mlflow.example.org/x"
    assert safe_url("https://example.org\\@evil.org/") == "https://evil.org/", "it is shown where it leads to"
    assert safe_url("https://a@b@example.org/r?accessToken=k#f?token=k") == "https://example.org/r#f"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://example.org/",
        "javascript://example.org/%0aalert(1)",
        "https://",
        "https:///path",
        "https://exam ple.org/",
        "https://example.org/\x1b[2J",
        "https://example.org/\u202egnp.exe",
        "https://example.org/<script>",
        'https://example.org/"onclick=',
        "https://example.org/a|b",
        "https://example.org/`rm`",
        "https://example.org:port/",
        "https://" + "a" * 600,
        "https://example.org/" + "a" * 5000,
    ],
)
def test_what_is_no_plain_address_is_not_shown(text: str) -> None:
    assert safe_url(text) == ""


@given(st.text(max_size=300), st.sampled_from(["", "http://", "https://", "https://h/", "https://h/#"]))
def test_whatever_the_text_an_address_stays_one_plain_word(text: str, begin: str) -> None:
    found = safe_url(begin + text)
    assert not found or (found.startswith(("http://", "https://")) and found.isascii() and len(found) <= 500)
    assert not set(found) & set(' "<>`|\\{}^?\n\t\x1b')
    assert safe_url(found) == found
