"""Which checkpoints are kept: a table of values in, a plan out, and no rule removes what a run may need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.checkpoints.retain import ALWAYS, Better, Candidate, Retention, length_without, plan


def one(step: int, verified: bool | None = True, **more: object) -> Candidate:
    return Candidate(f"step-{step}", step, 1000.0 + step, 10, verified, **more)  # type: ignore[arg-type]


def removed(candidates: list[Candidate], policy: Retention) -> list[int | None]:
    return [gone.step for gone in plan(candidates, policy).remove]


STEPS = [one(step) for step in range(100, 1100, 100)]


def test_the_last_ones_are_kept() -> None:
    assert removed(STEPS, Retention(last=3)) == [100, 200, 300, 400, 500, 600, 700]


def test_the_first_of_each_stretch_of_steps_is_kept_whatever_comes_later() -> None:
    odd = [one(step) for step in (130, 260, 390, 520, 650, 780, 910, 1040)]
    assert removed(odd, Retention(every=300)) == [260, 520, 780]  # kept: 130, 390, 650 and the newest two


def test_the_best_by_a_metric_are_kept() -> None:
    measured = [
        one(step, metrics={"loss": loss}) for step, loss in ((1, 3.0), (2, 0.5), (3, 2.0), (4, 1.0), (5, 9.0), (6, 8.0))
    ]
    assert removed(measured, Retention(best=2, metric="loss")) == [1, 3]
    assert removed(measured, Retention(best=1, metric="loss", better=Better.HIGH)) == [1, 2, 3, 4]


def test_with_fewer_than_two_verified_ones_nothing_goes() -> None:
    only = [one(step, verified=step == 100 or None) for step in range(100, 900, 100)]
    found = plan(only, Retention(last=2))
    assert found.remove == () and "nothing is removed before 2 are" in found.refused
    assert all(found.keep.values())


def test_the_two_newest_verified_ones_stay_however_many_unverified_are_newer() -> None:
    mixed = [one(100), one(200), one(300), *(one(step, None) for step in range(400, 900, 100))]
    assert removed(mixed, Retention(last=2)) == [100]


def test_what_has_no_manifest_is_no_checkpoint_of_ours_to_remove() -> None:
    others = [Candidate(name, None, 1.0, 10, None) for name in ("tensorboard", "logs", "base-model.pt")]
    assert removed([*STEPS, *others], Retention(last=8)) == [100, 200]


def test_one_whose_step_is_not_known_stays_beside_those_whose_steps_are() -> None:
    last = Candidate("last.ckpt", None, 99_999.0, 10, True)
    assert removed([*STEPS, last], Retention(last=8)) == [100, 200]
    nameless = [Candidate(name, None, at, 10, True) for name, at in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    assert [gone.name for gone in plan(nameless, Retention()).remove] == ["b"]


def test_a_damaged_one_is_counted_by_no_rule_and_stays() -> None:
    damaged = [one(100), one(200), one(300), one(400, False), one(500, False)]
    assert removed(damaged, Retention(last=2)) == [100]


def test_one_in_use_stays_and_so_does_one_without_a_copy_where_copies_are_asked_for() -> None:
    used = [
        one(100, used_by="attempt 7 began from it"),
        *(one(step, copied=step < 400) for step in (200, 300, 400, 500, 600)),
    ]
    assert removed(used, Retention(copied=True)) == [200, 300]
    assert plan(used, Retention(copied=True)).keep["step-100"] == ("attempt 7 began from it",)
    assert plan(used, Retention(copied=True)).frees == 20


candidates = st.builds(
    lambda step, verified, copied, used, loss: one(step, verified, copied=copied, used_by=used, metrics=loss),
    st.integers(0, 2000),
    st.sampled_from([True, True, True, False, None]),
    st.booleans(),
    st.sampled_from(["", "", "", "in use"]),
    st.one_of(st.just({}), st.builds(lambda value: {"loss": value}, st.floats(-10, 10))),
)
policies = st.builds(
    Retention,
    last=st.integers(0, 5),
    every=st.one_of(st.none(), st.integers(1, 700)),
    best=st.integers(0, 3),
    metric=st.just("loss"),
    better=st.sampled_from(Better),
    copied=st.booleans(),
)


@given(st.lists(candidates, unique_by=lambda c: c.name, max_size=30), policies)
def test_no_policy_removes_what_a_run_may_need(found: list[Candidate], policy: Retention) -> None:
    gone = plan(found, policy)
    newest = sorted((c for c in found if c.verified), key=lambda c: c.step or 0)[-ALWAYS:]
    for candidate in gone.remove:
        assert candidate not in newest
        assert len(newest) == ALWAYS
        assert candidate.verified and not candidate.used_by
        assert (candidate.step or 0) < (newest[-1].step or 0)
        assert candidate.copied or not policy.copied
    assert {c.name for c in gone.remove} | set(gone.keep) == {c.name for c in found}
    assert not {c.name for c in gone.remove} & set(gone.keep)


@given(st.lists(candidates, unique_by=lambda c: c.name, max_size=30), policies)
def test_what_is_left_after_a_removal_is_kept_by_the_same_policy(found: list[Candidate], policy: Retention) -> None:
    gone = plan(found, policy)
    left = [c for c in found if c not in gone.remove]
    assert plan(left, policy).remove == ()


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda one: (one[0], sum(one))), max_size=6)


@given(RANGES, RANGES)
def test_blocks_in_common_are_counted_once_and_not_where_one_stays(
    going: list[tuple[int, int]], staying: list[tuple[int, int]]
) -> None:
    free = {block for begin, end in going for block in range(begin, end)}
    free -= {block for begin, end in staying for block in range(begin, end)}
    assert length_without(going, staying) == len(free)
