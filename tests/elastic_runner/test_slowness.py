"""A rank that works longer than its peers is told from one that waits for them; what its device says stands beside it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from goodrun.elastic_runner.events import DeviceVerdict, RankSlow
from goodrun.elastic_runner.slowness import SlowWatch
from goodrun.progress import Page, Progress


def read(steps: int, own_s: float) -> Progress:
    """A page after so many steps with so many seconds of own work in all."""
    page, fd = Page.create()
    told = replace(page.read(), steps_done=steps, own_s=own_s)
    page.close()
    os.close(fd)
    return told


def looked(own, steps=40, seconds=12.0):
    """What is made of ranks that have worked `own` seconds a step, in one window."""
    watch = SlowWatch()
    watch.look(100.0, {r: read(1, 0.0) for r in range(len(own))})
    return watch.look(100.0 + seconds, {r: read(1 + steps, s * steps) for r, s in enumerate(own)})


@pytest.mark.parametrize(
    ("own", "rank"),
    [
        ((0.1, 0.1, 0.2, 0.1), 2),
        ((0.1, 0.3), 1),
        ((0.1, 0.1, 0.12, 0.1), None),  # hardly longer
        ((0.001, 0.001, 0.003, 0.001), None),  # three times as long, and nobody notices
        ((0.2, 0.2, 0.2, 0.2), None),
        ((0.2,), None),
    ],
)
def test_who_is_slow(own, rank):
    """The one that works a tenth of the time longer than the middle one of its peers, and a third longer than that."""
    seen = looked(own)
    assert (seen.rank if seen else None) == rank


def test_too_little_says_nothing():
    """A few steps, or a short while."""
    assert looked((0.1, 0.3), steps=10) is None
    assert looked((0.1, 0.3), seconds=5.0) is None


@pytest.mark.exhaustive
def test_a_slow_rank_on_a_hot_gpu_is_told_and_the_gpu_has_a_strike(job):
    """The record has the rank, its work beside its peers', and the GPU's clock; the policy's rule for it is on record; nothing is shed."""
    chaos = "throttle:slot=1@step=3"
    j = job("--nproc-per-node", 2, "--simulate-gpus", 2, "--chaos", chaos, "slow.py", 500, "compute=0.08").ok()
    slow = j.events(RankSlow)
    assert {(s.rank, s.slot) for s in slow} == {(1, 1)}
    assert "clock 1980 MHz" in slow[0].device and "slowed by its hardware (0x40)" in slow[0].device
    assert "rank 1 is slow" in j.err and "GPU 1" in j.err
    assert {(v.condition, v.verdict, v.slot) for v in j.events(DeviceVerdict)} >= {("hw-slowdown", "LOG", 1), ("slow", "LOG", 1)}
