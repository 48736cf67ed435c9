"""The keeper: what it makes durable, what it survives, and what it says when it cannot."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from goodrun.checkpoint import CheckpointError, DictCheckpoints, Keep
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.drain import Abandoned, Drain, Limiter, Part, Work
from goodrun.checkpoint.fence import Fence, Token
from goodrun.checkpoint.keeper import Keeper
from goodrun.checkpoint.link import Link
from goodrun.checkpoint.storage import Disk
from goodrun.checkpoint.url import Url
from goodrun.checkpoint.vouching import Word
from goodrun.checkpoint.wire import Line, connect

from .conftest import Keepers

SIZE = 1 << 16


def state_of(step: int) -> dict[str, Any]:
    """A state whose every bit follows from the step; several tensors, so that there is something between them."""
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.rand(SIZE, generator=generator),
        "b": torch.rand(3, 5, generator=generator, dtype=torch.float64).to(torch.bfloat16),
        "n": torch.tensor(step),
        "step": step,
    }


def load(root: Path | Url) -> tuple[int | None, dict[str, Any]]:
    """What a new process of the job would get."""
    state: dict[str, Any] = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for name, v in state_of(0).items()}
    return DictCheckpoints(str(root)).load(state), state


def same(state: dict[str, Any], step: int) -> bool:
    """Whether a state is, bit for bit, that of `step`."""
    wanted = state_of(step)
    return all(torch.equal(state[n], v) if isinstance(v, torch.Tensor) else state[n] == v for n, v in wanted.items())


def test_a_dying_keeper_still_has_the_name(keepers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that reaches it once more, and is hung up on, tries again until the next keeper is there."""
    keepers.start()
    dying = [socket.socketpair() for _ in range(5)]

    def reach(address: str) -> Line | None:
        if not dying:
            return connect(address)
        ours, theirs = dying.pop()
        theirs.close()
        return Line(ours)

    monkeypatch.setattr("goodrun.checkpoint.link.connect", reach)
    DictCheckpoints(tmp_path / "ckpt").save(state_of(1), 1).result(60)
    assert load(tmp_path / "ckpt")[0] == 1


def test_what_a_keeper_that_died_has_committed_is_not_written_again(keepers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died between the commit and its word to the rank: the next one finds the checkpoint, leaves it as it is, and says so."""
    keepers.start()
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    checkpoints.save(state_of(1), 1).result(60)
    hear, unheard = Link._take, []
    monkeypatch.setattr(Link, "_take", lambda link, m, *more: unheard.append(m) if m["op"] == "durable" else hear(link, m, *more))
    pending = checkpoints.save(state_of(2), 2)
    while not unheard:
        checkpoints._store.check()
    newest = found_in(tmp_path / "ckpt")[0]
    assert newest.step == 2
    before = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in newest.path.iterdir()}
    os.kill(keepers.process.pid, signal.SIGKILL)
    keepers.process.wait()
    monkeypatch.setattr(Link, "_take", hear)
    keepers.start()
    pending.result(60)
    assert {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in newest.path.iterdir()} == before
    checkpoints._store.close()


def test_memory_is_read_first(keepers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that no storage has yet is restored from the keeper's memory by the next attempt, and becomes durable all the same."""
    keepers.start("EIO", 1, "on")  # storage that takes nothing from the start
    (tmp_path / "armed").touch()
    DictCheckpoints(tmp_path / "ckpt").save(state_of(4), 4)
    monkeypatch.setenv("GOODRUN_GENERATION", "1")
    monkeypatch.setattr("goodrun.checkpoint.restoring._PATIENCE_S", 5.0)
    step, state = load(tmp_path / "ckpt")
    assert step == 4
    assert same(state, 4)
    assert found_in(tmp_path / "ckpt") == []
    (tmp_path / "armed").unlink()  # the storage is well again
    assert keepers.end() == 0
    assert [f.step for f in found_in(tmp_path / "ckpt") if f.manifest] == [4]


def test_restored_state_is_nobody_elses(keepers: Any, tmp_path: Path) -> None:
    """What was restored from memory does not change when the next saves use that memory again."""
    keepers.start()
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    checkpoints.save(state_of(1), 1).result()
    step, state = load(tmp_path / "ckpt")
    for later in (2, 3, 4):
        checkpoints.save(state_of(later), later).result()
    assert step == 1
    assert same(state, 1)


def test_killed_keeper_loses_nothing(keepers: Any, tmp_path: Path) -> None:
    """A keeper that dies with a snapshot in its memory is replaced, gets the snapshot again from the rank, and writes it."""
    keepers.start("KILL", 3, "before")
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    checkpoints.save(state_of(1), 1).result()
    (tmp_path / "armed").touch()
    pending = checkpoints.save(state_of(2), 2)
    assert keepers.process.wait(20) == -signal.SIGKILL
    keepers.start()
    pending.result(30)
    checkpoints.save(state_of(3), 3).result(30)
    assert [f.step for f in found_in(tmp_path / "ckpt") if f.manifest] == [3, 2, 1]
    assert same(load(tmp_path / "ckpt")[1], 3)


def test_every_rank_killed_after_a_snapshot(keepers: Any, job: Any, tmp_path: Path) -> None:
    """All ranks die one instruction after the snapshot was taken: it becomes durable."""
    keepers.start()
    assert [code for code, _ in job.run(2, "dies", "9")] == [-9, -9]
    assert keepers.end() == 0
    (found,) = found_in(tmp_path / "ckpt")
    assert (found.step, found.fault) == (9, None)


def test_half_a_snapshot_is_none(keepers: Any, job: Any, tmp_path: Path) -> None:
    """A rank that dies before it has copied its part takes the snapshot with it: the others are told, and nothing is committed."""
    keepers.start()
    (code, err), (killed, _) = job.run(2, "dies", "9", "1")
    assert killed == -9
    assert code == 1
    assert "step 9 was not saved: rank 1 left before it had copied its part" in err
    assert keepers.end() == 0
    assert found_in(tmp_path / "ckpt") == []


def test_a_second_checkpointer(keepers: Any, job: Any, tmp_path: Path) -> None:
    """A script may make a checkpointer of a directory anew, in the same attempt: the saves of both count, and the first one may go."""
    keepers.start()
    job.good(2, "twice")
    assert keepers.end() == 0
    assert [f.step for f in found_in(tmp_path / "ckpt") if f.manifest] == [4, 3, 2]


def test_keepers_of_several_nodes(keepers: Any, job: Any, tmp_path: Path) -> None:
    """Keepers of different nodes write one checkpoint together, through nothing but the directory they share."""
    keepers.start()
    other = Keepers(tmp_path)
    other.start()
    try:
        job.good(2, "nodes", keepers.name, other.name)
    finally:
        assert other.end() == 0
    assert [job.told("nodes", rank) for rank in (0, 1)] == [[sum(range(1 << 16)), rank] for rank in (0, 1)]
    found = found_in(tmp_path / "ckpt")
    assert [(f.step, f.fault) for f in found] == [(2, None), (1, None)]
    assert found[0].manifest is not None and found[0].manifest.world_size == 2


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "EROFS"])
def test_training_goes_on_without_storage(keepers: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str) -> None:
    """Storage that refuses everything is reported and tried again; saves go on; the newest one is durable once storage is well again."""
    keepers.start(fault, 1, "on")
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    checkpoints.save(state_of(1), 1).result()
    (tmp_path / "armed").touch()
    for step in (2, 3, 4):
        last = checkpoints.save(state_of(step), step)
    assert not last.done
    (tmp_path / "armed").unlink()
    last.result(30)
    assert same(load(tmp_path / "ckpt")[1], 4)
    said = capfd.readouterr().err
    assert "step 2 was not saved to" in said
    assert os.strerror(getattr(__import__("errno"), fault)) in said


@pytest.mark.parametrize("how", ["skip", "replace"])
def test_storage_that_cannot_keep_up(keepers: Any, tmp_path: Path, how: str) -> None:
    """With both slots busy a save is left out, or takes the place of the one that waits, as the script has asked; the handle says which."""
    keepers.start(options=("--bandwidth", "1"))
    checkpoints = DictCheckpoints(tmp_path / "ckpt", when_busy=how)
    big = {"w": torch.zeros(1 << 19)}  # 2 MiB take 2 s
    pending = [checkpoints.save(big, step) for step in (1, 2, 3)]
    assert [p.skipped for p in pending] == [False, False, how == "skip"]
    if how == "replace":
        with pytest.raises(CheckpointError, match="step 2 was not saved: a newer snapshot took its place"):
            pending[1].result(30)
    checkpoints.wait()
    assert [f.step for f in found_in(tmp_path / "ckpt")] == ([2, 1] if how == "skip" else [3, 1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("saves", [200, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_what_a_save_leaves_behind_is_flat(keepers: Any, tmp_path: Path, saves: int) -> None:
    """After hundreds of saves: no descriptor, no mapping and no shared memory more than after ten, here and in the keeper."""
    keeper = keepers.start()
    checkpoints = DictCheckpoints(tmp_path / "ckpt", keep=1)

    def held() -> list[int]:
        gc.collect()  # what earlier tests of this process have left to be collected
        pids = (os.getpid(), keeper.pid)
        maps = [Path(f"/proc/{pid}/maps").read_text().count("goodrun-snapshot") for pid in pids]
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids] + maps

    def resident() -> int:
        return int(Path(f"/proc/{keeper.pid}/statm").read_text().split()[1]) * 4096

    for step in range(1, 11):
        checkpoints.save(state_of(step), step).result()
    before, size = held(), resident()
    for step in range(11, saves + 1):
        checkpoints.save(state_of(step), step)
    checkpoints.wait()
    assert held() == before
    assert resident() < size + (4 << 20)
    assert [f.step for f in found_in(tmp_path / "ckpt")] == [saves]


def test_rules_of_keeping(keepers: Any, tmp_path: Path) -> None:
    """The last two stay, and every one whose step five divides."""
    keepers.start()
    checkpoints = DictCheckpoints(tmp_path / "ckpt", keep=Keep(last=2, every_steps=5))
    for step in range(1, 13):
        checkpoints.save(state_of(step), step).result()
    assert [f.step for f in found_in(tmp_path / "ckpt")] == [12, 11, 10, 5]


def test_a_part_that_never_comes_is_given_up(tmp_path: Path) -> None:
    """A keeper whose launcher and ranks are gone does not wait for ever for a lost node; while anything comes, it waits."""
    directory, still = tmp_path / "ckpt", []
    fence = Fence(directory, Token(1, 0))
    part = Part(0, memoryview(mmap.mmap(-1, 4096)), (), b"{}", Word())
    work = Work(
        directory=directory,
        name="step-0000000001.g0-abcdef",
        step=1,
        world_size=2,
        parts={0: part},
        first=True,
        fence=fence,
        keep=Keep(),
        torch="2",
        entries=(),
        index=b"{}",
        metadata=b"",
        fsize=-1,
    )

    def given_up(seconds: float) -> str | None:
        if len(still) == 5:
            (work.path / "shard_00001").touch()
        still.append(seconds)
        return "nothing comes" if seconds > 0.3 else None

    with pytest.raises(Abandoned, match="nothing comes"):
        Drain(Disk(), Limiter()).write(work, given_up)
    assert still[6] < still[5], "what another node has begun to write is a sign of life"
    keeper = Keeper(socket.socket(), others_s=10.0)
    assert keeper.writer.in_vain(None, 9.0) is None  # type: ignore[arg-type]
    assert "nothing has come from the other nodes for 10 s" in str(keeper.writer.in_vain(None, 11.0))  # type: ignore[arg-type]
    keeper.listener.close()
