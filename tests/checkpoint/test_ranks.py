"""Checkpoints written and read by several real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from goodrun.checkpoint.catalogue import found_in


def test_resumed_run_is_bit_equal(job_in: Callable[[Path], Any], tmp_path: Path) -> None:
    """At the same world size a run that was killed ends with the bits of one that was not: weights, moments, random states.

    And so goes the learning rate: AdamW on a cosine schedule, dropout, SIGKILL of all ranks at the very end of an epoch.
    """
    quiet, broken = job_in(tmp_path / "quiet"), job_in(tmp_path / "broken")
    quiet.good(2, "train", "end", "5", "0.5")
    assert [code for code, _ in broken.run(2, "train", "half", "3", "0.5", "killed")] == [-9, -9]  # 3 steps are exactly one epoch
    err = broken.good(2, "train", "end", "5", "0.5")
    assert err.count("goodrun: restored step 3 from ") == 1
    for rank in (0, 1):
        assert broken.told("half", rank)["start"] == 0
        assert broken.told("end", rank)["state"] == quiet.told("end", rank)["state"]
        assert broken.told("half", rank)["rates"] + broken.told("end", rank)["rates"] == quiet.told("end", rank)["rates"]
        assert broken.told("half", rank)["used"] + broken.told("end", rank)["used"] == quiet.told("end", rank)["used"]


def test_any_world_size_reads_any(job_in: Callable[[Path], Any], tmp_path: Path) -> None:
    """Over 2, 1 and 2 ranks every sample of an epoch is used once, and the weights are those of an unbroken run but for rounding."""
    quiet, job = job_in(tmp_path / "quiet"), job_in(tmp_path / "changing")
    quiet.good(1, "train", "end", "6", "0")
    used: Counter[int] = Counter()
    for world, until in ((2, 1), (1, 4), (2, 6)):
        err = job.good(world, "train", "end", str(until), "0")
        for rank in range(world):
            used.update(job.told("end", rank)["used"])
    assert "saved at world size 1, now 2" in err
    assert used == Counter({i: 2 for i in range(20)})
    assert job.told("end")["weights"] == pytest.approx(quiet.told("end")["weights"], abs=1e-5)


def test_values_belong_to_a_rank(job: Any) -> None:
    """Each rank gets its own cursor and random states back; a rank that did not exist at the save gets rank 0's."""
    job.good(2, "own", "save")
    job.good(3, "own", "load")
    told = job.told
    assert [told("load", r) for r in range(3)] == [told("save", 0), told("save", 1), told("save", 0)]
    assert told("save", 0) != told("save", 1)


def test_sharded_to_whole(job: Any) -> None:
    """What FSDP2 saved on two ranks one bare process reads, moments included."""
    job.good(2, "sharded", "save")
    job.good(1, "sharded", "load")
    assert job.told("load") == job.told("save")


LONG = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("how", "after", "world"),
    [
        ("hsdp", "tp", 4),
        ("tp", "bare", 1),
        pytest.param("tp", "fsdp", 2, marks=LONG),
        pytest.param("tp", "hsdp", 4, marks=LONG),
        pytest.param("hsdp", "bare", 1, marks=LONG),
        pytest.param("hsdp", "fsdp", 3, marks=LONG),
        pytest.param("hsdp", "hsdp", 2, marks=LONG),
    ],
)
def test_meshes(job: Any, how: str, after: str, world: int) -> None:
    """Replicated shards (HSDP) and shards of tensor-parallel parts, saved on four ranks, come back on any mesh and number of ranks."""
    job.good(4, "meshed", "save", how)
    job.good(world, "meshed", "load", after)
    assert {job.told("load", rank) for rank in range(world)} == {job.told("save")}


@pytest.mark.parametrize("world", [1, 2])
def test_failed_save_nobody_waits_for(job: Any, world: int, tmp_path: Path) -> None:
    """A save that fails after the script's last line ends the process with status 1 and one sentence that names step, rank and path."""
    for code, err in job.run(world, "full", "no"):
        assert code == 1
        line = next(text for text in err.splitlines() if text.startswith("goodrun: "))
        assert "step 7 was not saved to" in line
        assert str(tmp_path / "ckpt") in line
        assert "rank" in line
        assert "File too large" in line
    assert found_in(tmp_path / "ckpt") == []


def test_failed_save_is_raised(job: Any) -> None:
    """Who waits for a save gets its failure as CheckpointError, and the exit status is the script's own."""
    job.good(1, "full", "yes")
    assert "File too large" in job.told("full")


def test_killed_while_saving(job: Any) -> None:
    """After a SIGKILL in the middle of a save every rank restores the same whole checkpoint."""
    ended = job.run(2, "killed", "save")
    assert ended[1][0] == -9
    job.good(2, "killed", "load")
    step, inner, values = job.told("killed", 0)
    assert job.told("killed", 1) == [step, inner, values]
    assert step in (1, 2)
    assert inner == step
    assert values == [step]


def test_group_destroyed_under_a_save(job: Any, tmp_path: Path) -> None:
    """A script may destroy the process group before its save is written: what was copied becomes durable without it."""
    job.good(2, "hasty")
    assert [(found.step, found.fault) for found in found_in(tmp_path / "ckpt")] == [(7, None)]
