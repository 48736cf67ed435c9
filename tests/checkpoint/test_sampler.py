"""The order of samples, over worlds and batches of every kind."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from goodrun.checkpoint import CheckpointMismatch, ElasticSampler


def ranks(length: int, batch: int, world: int, **options: bool) -> list[ElasticSampler]:
    """The samplers of all ranks of a world."""
    return [ElasticSampler(length, global_batch=batch, rank=r, world_size=world, **options) for r in range(world)]


@pytest.mark.parametrize(("length", "batch", "world"), list(itertools.product([1, 7, 24, 25], [5, 8], [1, 2, 3, 5])))
def test_epoch_is_used_once(length: int, batch: int, world: int) -> None:
    """Whatever the world: equal numbers of steps, every sample once, weights that add up to the world size."""
    samplers = ranks(length, batch, world)
    used: Counter[int] = Counter()
    whole = []
    for parts in zip(*samplers, strict=True):
        weights = [s.weight for s in samplers]
        assert sum(weights) == pytest.approx(world)
        step = [i for part, weight in zip(parts, weights, strict=True) if weight for i in part]
        whole.append(step)
        used.update(step)
        for s in samplers:
            s.consumed()
    assert used == Counter(range(length))
    assert whole == [step for (step,) in zip(ElasticSampler(length, global_batch=batch, rank=0, world_size=1), strict=True)]
    assert all(s.epoch == 1 and s.position == 0 for s in samplers)


def test_any_series_of_worlds() -> None:
    """Interrupted anywhere, at any size and batch, again and again: every epoch is one of each sample."""
    chance = random.Random(3)
    for _ in range(30):
        length = chance.randint(1, 40)
        state = ElasticSampler(length, global_batch=9, rank=0, world_size=1).state_dict()
        used: dict[int, Counter[int]] = {}
        while state["epoch"] < 3:
            world = chance.randint(1, 6)
            samplers = ranks(length, chance.randint(world, 9), world)
            for s in samplers:
                s.load_state_dict(state)
            for _, parts in zip(range(chance.randint(0, 4)), zip(*samplers, strict=True), strict=False):
                for s, part in zip(samplers, parts, strict=True):
                    used.setdefault(s.epoch, Counter()).update(part if s.weight else [])
                for s in samplers:
                    s.consumed()
            state = samplers[0].state_dict()
        assert all(used[epoch] == Counter(range(length)) for epoch in range(3))


def test_weights_keep_the_mean_exact() -> None:
    """The mean over ranks of weight × local mean is the mean over the global batch, uneven and short batches included."""
    values = torch.randn(23, dtype=torch.float64)
    samplers = ranks(23, 10, 4)
    for parts, one in zip(zip(*samplers, strict=True), ElasticSampler(23, global_batch=10, rank=0, world_size=1), strict=True):
        mean = sum(s.weight * values[part].mean() for s, part in zip(samplers, parts, strict=True)) / 4
        assert mean == pytest.approx(values[one].mean())
        for s in samplers:
            s.consumed()


def test_fetching_ahead_does_not_move_it() -> None:
    """Batches fetched but not trained on are fetched again after a resume."""
    sampler = ElasticSampler(20, global_batch=4, rank=0, world_size=1)
    fetched = list(sampler)
    sampler.consumed()
    again = ElasticSampler(20, global_batch=4, rank=0, world_size=1)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == fetched[1:]
    assert len(again) == 4


def test_end_of_an_epoch() -> None:
    """A state taken after an epoch's last batch resumes at the next one's first, and epochs differ in order."""
    sampler = ElasticSampler(8, global_batch=4, rank=0, world_size=1)
    first = list(sampler)
    sampler.consumed()
    sampler.consumed()
    again = ElasticSampler(8, global_batch=4, rank=0, world_size=1)
    again.load_state_dict(sampler.state_dict())
    again.set_epoch(1)
    assert (again.epoch, again.position, len(again)) == (1, 0, 2)
    assert list(again) != first
    assert sorted(i for batch in again for i in batch) == list(range(8))
    with pytest.raises(ValueError, match=r"sampler\.epoch"):
        again.set_epoch(0)


def test_drop_last() -> None:
    """A short last batch is left out, and the epoch ends before it."""
    (sampler,) = ranks(10, 4, 1, drop_last=True)
    assert [len(b) for b in sampler] == [4, 4]
    sampler.consumed()
    sampler.consumed()
    assert sampler.epoch == 1


def test_another_order_is_refused() -> None:
    """A position in another dataset's or seed's order is no position in this one."""
    state = ElasticSampler(10, global_batch=2, rank=0, world_size=1).state_dict()
    with pytest.raises(CheckpointMismatch, match="length=10, this one has length=11"):
        ElasticSampler(11, global_batch=2, rank=0, world_size=1).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="seed=0"):
        ElasticSampler(10, global_batch=2, seed=1, rank=0, world_size=1).load_state_dict(state)
    with pytest.raises(ValueError, match="at least 3"):
        ElasticSampler(10, global_batch=2, rank=0, world_size=3)
