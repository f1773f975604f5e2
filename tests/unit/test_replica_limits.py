"""Before torchft begins its rank checks what it was told, and says what to set."""

from __future__ import annotations

import pytest

from ftsupervise.errors import ConfigError
from ftsupervise.integrations.torchft_group import GroupLimits

TOLD = {"TORCHFT_LIGHTHOUSE": "http://head:29510", "REPLICA_GROUP_ID": "g002", "NUM_REPLICA_GROUPS": "4"}


def test_a_rank_that_is_told_nothing_but_its_group_gets_safe_timeouts() -> None:
    found = GroupLimits.from_environment(TOLD)
    assert (found.group, found.number, found.groups, found.minimum) == ("g002", 2, 4, 3)
    assert found.timeouts.join + found.timeouts.process_group + found.timeouts.manager < found.timeouts.quorum


def test_without_a_lighthouse_it_says_how_to_start() -> None:
    with pytest.raises(ConfigError, match=r"TORCHFT_LIGHTHOUSE is not set.*ftsupervise launch"):
        GroupLimits.from_environment({})


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FTSUPERVISE_PROCESS_GROUP_TIMEOUT", "5", "no step would ever be committed; set process_group to 14s"),
        ("TORCHFT_QUORUM_TIMEOUT_SEC", "60", "all groups would end; set quorum to"),
        ("TORCHFT_QUORUM_RETRIES", "0", "when it is restarted; set retries to"),
        ("FTSUPERVISE_SLOWEST_STEP", "slow", "is no number"),
        ("NUM_REPLICA_GROUPS", "nan", "is no number"),
        ("TORCHFT_QUORUM_RETRIES", "inf", "is no number"),
    ],
)
def test_timeouts_that_do_not_fit_are_refused_with_the_value_to_set(variable: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GroupLimits.from_environment({**TOLD, "FTSUPERVISE_SLOWEST_STEP": "7", variable: value})
