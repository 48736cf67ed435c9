"""What a checkpoint is, which one is chosen, and what is refused, in one process."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from goodrun import progress
from goodrun.checkpoint import (
    CheckpointDamaged,
    Checkpointer,
    CheckpointError,
    CheckpointFenced,
    CheckpointMismatch,
    DictCheckpoints,
    NotACheckpointDirectory,
)
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.distrust import mark
from goodrun.checkpoint.stock import read_metadata


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint directory that is not there yet, under a parent that is not there either."""
    return tmp_path / "deep" / "ckpt"


def saved(root: Path, *steps: int, keep: int = 3) -> None:
    """One checkpoint for each step, its weights full of the step's number."""
    checkpoints = DictCheckpoints(root, keep=keep)
    for step in steps:
        checkpoints.save({"w": torch.full((1 << 15,), float(step)), "step": step}, step).result()


def loaded(root: Path) -> tuple[int | None, float]:
    """The step that is restored, and the value that its weights have."""
    state: dict[str, Any] = {"w": torch.zeros(1 << 15), "step": 0}
    step = DictCheckpoints(root).load(state)
    assert step == (state["step"] or None)
    return step, float(state["w"].unique())


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit flipped": (lambda c: flip(c / "__0_0.distcp"), "__0_0.distcp does not match its checksum"),
    "cut short": (lambda c: os.truncate(c / "__0_0.distcp", 1000), "__0_0.distcp has 1000 bytes instead of"),
    "a file gone": (lambda c: (c / ".metadata").unlink(), ".metadata is missing"),
    "values changed": (lambda c: flip(c / "values-0.json"), "values-0.json does not match its checksum"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "it was never committed"),
    "manifest changed": (lambda c: flip(c / "manifest.json"), "manifest.json"),
    "manifest empty": (lambda c: (c / "manifest.json").write_bytes(b""), "manifest.json cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_one_is_skipped(root: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """The newest checkpoint that is whole is used, and one line says which was not and why."""
    saved(root, 5, 10)
    damage, why = DAMAGE[kind]
    newest = found_in(root)[0].path
    damage(newest)
    assert loaded(root) == (5, 5.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"goodrun: checkpoint {newest.name} is skipped: ")
    assert why in line


def test_nothing_whole_is_no_fresh_start(root: Path) -> None:
    """Where checkpoints are but none is whole, training does not silently begin from step 0."""
    saved(root, 5)
    flip(found_in(root)[0].path / "__0_0.distcp")
    with pytest.raises(CheckpointDamaged, match="none of the 1 checkpoints"):
        loaded(root)


def test_newest_is_by_number(root: Path) -> None:
    """Step 100 is newer than 99 and 9, whatever the files' times say; `keep` of them stay."""
    saved(root, 9, 100, keep=5)
    saved(root, 99, keep=2)
    assert loaded(root) == (100, 100.0)
    assert [f.step for f in found_in(root)] == [100, 99]


def test_began_anew_below_old_steps(root: Path) -> None:
    """A checkpoint just written is not the one that is pruned, even where older runs left higher steps."""
    saved(root, 50, 60, keep=2)
    saved(root, 1, keep=2)
    assert [f.step for f in found_in(root)] == [60, 50, 1]


def test_one_that_is_not_trusted_takes_no_good_ones_place(root: Path) -> None:
    """Two are to be kept: of the good ones, though newer ones that are not to be restored from lie between them."""
    saved(root, 1, 2, 3)
    for found in found_in(root)[:2]:
        mark(found.path, "numbers")
    saved(root, 4, keep=2)
    assert [f.step for f in found_in(root) if f.manifest] == [4, 1]
    saved(root, 5, keep=2)
    assert [f.step for f in found_in(root)] == [5, 4]


def test_leftovers_go(root: Path) -> None:
    """What was never committed is gone after the next commit."""
    saved(root, 5)
    leftover = root / "step-0000000007.g0-abcdef"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert loaded(root) == (5, 5.0)
    saved(root, 6)
    assert not leftover.exists()


def test_folders_decide(root: Path) -> None:
    """No pointer file leads to the newest: with the fence gone and stray folders about, whole checkpoints are found by number."""
    saved(root, 900, 950, 1000)
    (root / ".fence.json").unlink()
    (root / "step-0000002000.tmp").mkdir()
    (root / "step-2500").mkdir()
    os.utime(found_in(root)[2].path)
    assert loaded(root) == (1000, 1000.0)


def test_stock_torch_reads_it(root: Path) -> None:
    """torch's own dcp.load finds every tensor under its name."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with Checkpointer(root, model=model) as checkpointer:
        checkpointer.save(1)
    state = {"model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}}
    load(state, checkpoint_id=found_in(root)[0].path)
    assert torch.equal(state["model"]["weight"], model.weight)
    assert torch.equal(state["model"]["bias"], model.bias)


def test_later_changes_do_not_reach_a_save(root: Path) -> None:
    """What is written is the state at the call, 0-dim tensors and mutable values included."""
    state: dict[str, Any] = {"w": torch.zeros(1 << 20), "t": torch.tensor(1.0), "l": [1]}
    pending = DictCheckpoints(root).save(state, 1)
    state["w"].fill_(9)
    state["t"].fill_(9)
    state["l"].append(9)
    pending.result()
    assert DictCheckpoints(root).load(state) == 1
    assert (float(state["w"].sum()), float(state["t"]), state["l"]) == (0.0, 1.0, [1])


def test_values_come_back_as_they_were(root: Path) -> None:
    """Types survive: tuples, bytes, sets, numbers that JSON lacks, keys that are no strings, arrays, counters."""
    value = {
        "tuple": (1, "a", None, True), "bytes": b"\0\xff", "set": {1, 2}, "inf": float("inf"), 3: {"$": [1.5]}, "np": np.float64(0.1),
        "counter": Counter({4: 2}), "dtype": torch.bfloat16, "big": 1 << 80, "empty": torch.empty(0, 3),
    }  # fmt: skip
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    DictCheckpoints(root).save({"v": value, "a": array}, 1).result()
    state: dict[str, Any] = {"v": None, "a": None}
    DictCheckpoints(root).load(state)
    assert state["a"].dtype == np.uint32
    assert np.array_equal(state["a"], array)
    assert state["v"].pop("empty").shape == (0, 3)
    value.pop("empty")
    assert state["v"] == value
    assert type(state["v"]["counter"]) is Counter
    with pytest.raises(CheckpointError, match=r"v\.x is a builtins\.object"):
        DictCheckpoints(root).save({"v": {"x": object()}}, 2).result()


def test_replaced_attempt_cannot_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a newer attempt has looked at the directory, a save of the older one fails and leaves nothing."""
    monkeypatch.setenv("GOODRUN_RUN_STARTED", "1000")
    monkeypatch.setenv("GOODRUN_GENERATION", "0")
    old = DictCheckpoints(root)
    old.save({"w": torch.zeros(3)}, 1).result()
    monkeypatch.setenv("GOODRUN_GENERATION", "1")
    new = DictCheckpoints(root)
    state = {"w": torch.ones(3)}
    assert new.load(state) == 1
    with pytest.raises(CheckpointFenced, match="attempt 1, this is 0"):
        old.save(state, 2).result()
    assert [f.step for f in found_in(root)] == [1]
    new.save(state, 3).result()
    assert [f.step for f in found_in(root)] == [3, 1]


@pytest.mark.parametrize("name", ["notes.txt", "step-5", "model"])
def test_foreign_directory_is_refused(tmp_path: Path, name: str) -> None:
    """A directory with someone else's files is refused in one sentence, and nothing is written."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(NotACheckpointDirectory, match=rf"{tmp_path} holds files that are not goodrun's \({name}\)"):
        Checkpointer(tmp_path, model=nn.Linear(1, 1))
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_file_is_no_directory(tmp_path: Path) -> None:
    """A path under a file is refused before anything is trained."""
    (tmp_path / "file").write_text("")
    with pytest.raises(NotACheckpointDirectory, match="file is not a directory"):
        Checkpointer(tmp_path / "file" / "ckpt", model=nn.Linear(1, 1))


def test_a_look_writes_nothing(root: Path) -> None:
    """Restoring from a directory that is not there gives step 0 and does not make it."""
    assert Checkpointer(root, model=nn.Linear(1, 1)).restore() == 0
    assert not root.parent.exists()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        """The file."""
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle would run."""
        return (open, (self.path, "w"))


def test_no_code_is_run(tmp_path: Path) -> None:
    """A crafted .metadata is refused, not run."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(str(tmp_path / "ran"))))
    with pytest.raises(CheckpointDamaged, match="will not be run"):
        read_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_other_model_is_refused(root: Path) -> None:
    """A checkpoint that does not fit the script's model stops it with the names, instead of loading half or casting."""
    with Checkpointer(root, model=nn.Linear(3, 2)) as checkpointer:
        checkpointer.save(1)
    for other in (nn.Linear(3, 4), nn.Linear(3, 2, dtype=torch.float64), nn.Sequential(nn.Linear(3, 2)), nn.Linear(3, 2, bias=False)):
        with pytest.raises(CheckpointMismatch, match="model"):
            Checkpointer(root, model=other).restore()
    with pytest.raises(CheckpointMismatch, match="does not hold 'extra'"):
        Checkpointer(root, extra=nn.Linear(1, 1)).restore()


def test_state_is_checked_at_the_start() -> None:
    """Objects that cannot be kept, and an optimizer without its model, are named at construction."""
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="what: a int has no state_dict"):
        Checkpointer("ckpt", what=3)
    with pytest.raises(TypeError, match="optimizer: no model given"):
        Checkpointer("ckpt", optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="per_rank names 'cursor'"):
        Checkpointer("ckpt", model=model, per_rank=("cursor",))


def test_fresh_optimizer_stays_fresh(root: Path) -> None:
    """Neither looking for a checkpoint nor saving before the first step moves the optimizer; and that is how it comes back."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = parts()
    with Checkpointer(root, model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.restore() == 0
        checkpointer.save(0)
    assert not optimizer.state
    again, fresh = parts()
    with torch.no_grad():
        again.weight.zero_()  # type: ignore[operator]
    fresh.param_groups[0]["lr"] = 0.7
    assert Checkpointer(root, model=again, optimizer=fresh).restore() == 0
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.1
    assert torch.equal(again.weight, model.weight)  # type: ignore[arg-type]


def test_cadence_and_page(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is saved every `every` steps; the supervisor's page tells what was saved, made durable and restored."""
    page, fd = progress.Page.create()
    os.close(fd)
    monkeypatch.setattr(progress, "_page", page)
    model = nn.Linear(1, 1)
    with Checkpointer(root, every=3, model=model) as checkpointer:
        for n in range(1, 8):
            checkpointer.step(n)
    assert [f.step for f in found_in(root)] == [6, 3]
    read = page.read()
    assert (read.step, read.saved_step, read.durable_step, read.restored_step) == (7, 6, 6, -1)
    assert read.save_stall_s > 0
    assert Checkpointer(root, model=model).restore() == 6
    assert page.read().restored_step == 6
    assert page.read().restored_from == str(found_in(root)[0].path)
    monkeypatch.undo()
    page.close()


def test_manifest_says_what_it_holds(root: Path) -> None:
    """The commit mark names step, world size and every file with its size and checksum."""
    saved(root, 5)
    checkpoint = found_in(root)[0].path
    body = json.loads((checkpoint / "manifest.json").read_text())["body"]
    assert (body["step"], body["world_size"], body["entries"]) == (5, 1, ["w", "step"])
    assert {name: size for name, (size, _) in body["files"].items()} == {
        p.name: p.stat().st_size for p in checkpoint.iterdir() if p.name != "manifest.json"
    }
