"""The hang detector over hours of drawn histories: no false alarm, and every hang in them is found."""

from __future__ import annotations

import random

import pytest

from tests.unit.hang_world import World


def hour(draw: random.Random, endless_tail: bool = False) -> tuple[World, float]:
    """An hour of steps with saves, evaluations and heavy-tailed jitter; the world, and the mean step.

    The tails (Pareto, 2.5) end at 6 s or one and a half steps, for saves at 7 s: who pauses out of the blue for longer than
    the bound, asleep and unannounced, cannot be told from one that hangs. ``endless_tail`` leaves them as they are.
    """
    base = draw.choice([0.2, 0.5, 1.0, 3.0, 8.0])
    world = World(ranks=2)
    world.wait(draw.uniform(5, 900))
    world.phase("train")
    save_every, eval_every = draw.randint(10, 200), draw.randint(50, 500)
    end, step = world.now + 3600, 0
    while world.now < end:
        step += 1
        jitter = 0.1 * base * (draw.paretovariate(2.5) - 1)
        world.wait(base + (jitter if endless_tail else min(jitter, max(6.0, 1.5 * base))))
        world.step(step)
        if step % save_every == 0:
            announced_save(world, draw, endless_tail)
        if step % eval_every == 0:
            evaluation(world, draw)
    return world, base


def announced_save(world: World, draw: random.Random, endless_tail: bool) -> None:
    took = draw.paretovariate(2.5)
    world.phase("save", 0)
    world.wait(2 + (took if endless_tail else min(took, 7.0)))
    world.phase("train", 0)


def evaluation(world: World, draw: random.Random) -> None:
    if draw.random() < 0.5:
        world.phase("eval")
        world.wait(draw.uniform(20, 50))
        world.phase("train")
    else:  # unannounced: it uses CPU
        world.cpu = dict.fromkeys(world.cpu, 0.8)
        world.wait(draw.uniform(5, 50))
        world.cpu = dict.fromkeys(world.cpu, 0.0)


def test_hours_of_drawn_histories_raise_no_false_alarm_and_every_hang_in_them_is_found() -> None:
    play(range(3))


@pytest.mark.slow
def test_hundreds_of_drawn_hours_raise_no_false_alarm_and_every_hang_in_them_is_found() -> None:
    play(range(1000, 1200))
    worlds = [hour(random.Random(seed), endless_tail=True)[0] for seed in range(2000, 2100)]
    print(f"without an end to the tail: {sum(w.alarm is not None for w in worlds)} false alarms in {len(worlds)} hours")


def play(seeds: range) -> None:
    delays = []
    for seed in seeds:
        draw = random.Random(seed)
        world, base = hour(draw)
        assert world.alarm is None, (seed, base, world.alarm, world.past)
        struck = world.now
        world.change(draw.randrange(2), state=draw.choice(["T", "S", "D"]))
        alarm = world.wait(1200.0)
        assert alarm is not None, (seed, base, world.past)
        known = world.past.phases["train"]  # with the gap that ended as it struck
        bound = max(10.0, (3 if known.sure else 6) * known.largest)
        delay = alarm.since + alarm.waited - struck
        assert delay <= bound, (seed, delay, bound)
        delays.append(delay / bound)
    print(
        f"{len(seeds)} hours: 0 false alarms, {len(delays)} of {len(seeds)} hangs found, {max(delays):.2f} of the bound at most"
    )
