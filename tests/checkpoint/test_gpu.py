"""Copies that a GPU makes in its own time: the loop goes on, the snapshot counts when it is whole, and a death before that loses only it.

Without a GPU its place is taken by threads that copy when they are let: all but the few lines that speak to CUDA is the real thing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from goodrun.checkpoint import DictCheckpoints
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.gpu import GpuCopies

from .test_keeper import load, same, state_of


class Held:
    """Copies that are queued, with what was in their sources then, and done when `let` is set."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.pinned: set[int] = set()

    def pin(self, address: int, size: int) -> bool:
        self.pinned.add(address)
        return True

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def copy(self, pairs: Any) -> Any:
        queued = [(target, source.clone()) for target, source in pairs]  # in stream order, whatever the script changes afterwards

        def wait() -> None:
            assert self.let.wait(30)
            for target, source in queued:
                target.copy_(source)

        return wait


DIES = """
import os, signal, sys, torch
from goodrun.checkpoint import DictCheckpoints, planning, slots
planning.on_gpu = slots.on_gpu = lambda tensor: tensor.numel() > 1000
class Never:
    def pin(self, address, size): return True
    def copy(self, pairs): return lambda: signal.pause()
planning.GpuCopies = Never
DictCheckpoints(sys.argv[1]).save({"w": torch.ones(5000), "b": torch.ones(3)}, 2)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A rank that is killed while its GPU copies."""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Large tensors are taken for a GPU's."""
    made = Held()
    for module in ("slots", "planning"):
        monkeypatch.setattr(f"goodrun.checkpoint.{module}.on_gpu", lambda tensor: tensor.numel() > 1000)
    monkeypatch.setattr("goodrun.checkpoint.planning.GpuCopies", lambda: made)
    return made


def test_a_save_does_not_wait_for_the_gpu(keepers: Any, tmp_path: Path, held: Held) -> None:
    """It returns while the copy is queued; what the script does to its tensors then does not matter; it is durable when all was copied."""
    keepers.start()
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    state = state_of(1)
    pending = checkpoints.save(state, 1)
    state["w"].zero_()
    assert not pending.done
    assert found_in(tmp_path / "ckpt") == [] or found_in(tmp_path / "ckpt")[0].manifest is None
    held.let.set()
    pending.result(30)
    step, restored = load(tmp_path / "ckpt")
    assert step == 1 and same(restored, 1)
    checkpoints.close()
    assert held.pinned == set()


def test_a_rank_that_dies_while_the_gpu_copies_loses_that_snapshot_alone(
    keepers: Any, tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a copy is never taken for a checkpoint: the one before is what the next start finds, in memory and on storage."""
    keepers.start()
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    held.let.set()
    checkpoints.save(state_of(1), 1).result(30)
    held.let.clear()
    command = [sys.executable, "-c", DIES, str(tmp_path / "ckpt")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "GOODRUN_GENERATION": "1"}
    assert subprocess.run(command, env=env, timeout=60).returncode == -signal.SIGKILL
    monkeypatch.setenv("GOODRUN_GENERATION", "2")
    step, restored = load(tmp_path / "ckpt")
    assert step == 1 and same(restored, 1)
    held.let.set()
    checkpoints.close()


def test_a_keeper_that_dies_while_the_gpu_copies_is_told_when_it_is_done(keepers: Any, tmp_path: Path, held: Held) -> None:
    """The keeper that takes its place makes the snapshot durable, whole, once."""
    first = keepers.start()
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    pending = checkpoints.save(state_of(1), 1)
    first.kill()
    first.wait(10)
    keepers.start()
    checkpoints._store.check()
    held.let.set()
    pending.result(30)
    step, restored = load(tmp_path / "ckpt")
    assert step == 1 and same(restored, 1)
    checkpoints.close()


def test_a_new_plan_waits_for_copies_into_the_old_slots(keepers: Any, tmp_path: Path, held: Held) -> None:
    """A state of another shape gives the slots up: not while something is on its way into them."""
    keepers.start()
    checkpoints = DictCheckpoints(tmp_path / "ckpt", keep=5)
    first = checkpoints.save(state_of(1), 1)
    threading.Timer(0.2, held.let.set).start()
    second = checkpoints.save({**state_of(2), "more": torch.ones(5000)}, 2)
    first.result(30)
    second.result(30)
    assert sorted(f.step for f in found_in(tmp_path / "ckpt") if f.manifest) == [1, 2]
    checkpoints.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_real_gpu(keepers: Any, tmp_path: Path) -> None:
    """What is on the GPU at the moment of the save is what is restored, though it is changed right afterwards; pages are pinned."""
    keepers.start()
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    state = {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in state_of(1).items()}
    big = torch.rand(1 << 26, device="cuda")
    kept = big.clone()
    pending = checkpoints.save({**state, "big": big}, 1)
    assert all(slot._pinned for slot in checkpoints._store._saver._planned.slots)
    big.zero_()
    pending.result(60)
    restored = {**{n: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for n, v in state.items()}, "big": torch.zeros_like(big)}
    assert DictCheckpoints(tmp_path / "ckpt").load(restored) == 1
    assert torch.equal(restored["big"], kept) and torch.equal(restored["w"].cpu(), state_of(1)["w"])
    copies = GpuCopies()
    into = torch.empty(1 << 26)
    assert copies.pin(into.data_ptr(), into.nbytes)
    copies.copy([(into, kept)])()
    copies.unpin(into.data_ptr())
    assert torch.equal(into, kept.cpu())
