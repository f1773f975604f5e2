"""What groups agree on with each commit: to save, or the step at which all stop."""

from __future__ import annotations

from ftsupervise.guard.stop_reasons import CAUSES, Decision, as_vote, from_vote
from ftsupervise.integrations.torchft_group import Agreed, GroupLimits, differ, has_to_copy, propose
from ftsupervise.rundir.paths import ENV_GROUP_JOB
from ftsupervise.truth import HOST_MEMORY, SUPERSEDED

OWN = (HOST_MEMORY, SUPERSEDED)
STOP = as_vote(Decision(2, "kill switch"))
SAVE = as_vote(Decision(1, "save switch"))


def test_a_stop_is_set_two_steps_ahead_and_holds_until_then() -> None:
    number, own = propose(STOP, 10, 0, OWN)
    agreed = Agreed(number, own)
    assert agreed.stop_at == 12
    assert [agreed.vote(step) for step in (10, 11)] == [0, 0]
    assert from_vote(agreed.vote(12)).cause == "kill switch"
    assert propose(0, 11, agreed.to_come(), OWN) == (number, 0), "it is repeated"
    assert propose(STOP, 11, agreed.to_come(), OWN) == (number, 0), "and not put off"


def test_a_request_to_save_is_answered_at_the_step_in_which_it_is_made_and_not_kept() -> None:
    agreed = Agreed(*propose(SAVE, 10, 0, OWN))
    assert from_vote(agreed.vote(11)).save
    assert not from_vote(agreed.vote(11)).stop
    assert agreed.to_come() == 0


def test_a_stop_outweighs_a_request_to_save_of_another_group() -> None:
    number = max(propose(SAVE, 10, 0, OWN)[0], propose(STOP, 10, 0, OWN)[0])
    assert Agreed(number).stop_at == 12


def test_a_group_that_runs_out_of_memory_asks_for_a_checkpoint_and_leaves_alone() -> None:
    vote = as_vote(Decision(2, HOST_MEMORY))
    number, own = propose(vote, 10, 0, OWN)
    assert from_vote(Agreed(number).vote(11)).save, "the others save"
    assert not from_vote(Agreed(number).vote(11)).stop, "and train on"
    assert Agreed(number, own).vote(11) == vote, "this one leaves"
    assert Agreed(0, own).vote(11) == 0, "but not before they have heard of it"


def test_the_end_of_a_job_that_one_group_has_for_itself_stops_no_other_group() -> None:
    given = {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1", "REPLICA_GROUP_ID": "g001", "NUM_REPLICA_GROUPS": "4"}
    together, apart = (GroupLimits.from_environment({**given, **more}) for more in ({}, {ENV_GROUP_JOB: "1"}))
    for cause in ("time limit", "warning signal", "asked to stop (SIGTERM)", "run time reached"):
        vote = as_vote(Decision(2, cause))
        assert Agreed(*propose(vote, 10, 0, together.own_causes)).stop_at == 12, "one job holds them all"
        number, own = propose(vote, 10, 0, apart.own_causes)
        assert Agreed(number, own).vote(11) == vote, "this one leaves, after a checkpoint"
        assert Agreed(number).stop_at == 0 and not from_vote(Agreed(number).vote(11)).stop
    assert Agreed(*propose(STOP, 10, 0, apart.own_causes)).stop_at == 12, "the kill switch is for all of them"


def test_a_group_whose_place_a_newer_attempt_has_taken_leaves_at_once_and_asks_for_nothing() -> None:
    vote = as_vote(Decision(2, SUPERSEDED))
    number, own = propose(vote, 10, 0, OWN)
    assert number == 0
    assert Agreed(number, own).vote(11) == vote


def test_no_vote_is_as_large_as_a_step() -> None:
    assert max(as_vote(Decision(2, cause)) for cause in CAUSES.values()) < 1 << 8


def test_groups_that_made_their_last_step_in_different_meetings_see_it_and_the_fewer_copy_from_the_more() -> None:
    assert not differ([]) and not differ([0, 0]) and not differ([7, 0, 7, 7]), "one that joins cannot tell"
    commits = [5, 7, 7, 0]
    assert differ(commits)
    assert [has_to_copy(commits, own) for own in commits] == [True, False, False, False]
    assert [has_to_copy([5, 7], own) for own in (5, 7)] == [False, True], "one of two has to, and all know which"
