"""torch's own readers read ours, ours reads torch's, and nobody runs code."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from goodrun.checkpoint import CheckpointDamaged, Checkpointer, CheckpointMismatch, DictCheckpoints
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.stock import read_metadata

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def trained(seed: int, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model with a few Adam steps behind it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """All of it, to compare."""
    moments = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    return [t.detach().numpy().tobytes() for t in (*model.state_dict().values(), *moments)]


def test_every_type_survives(tmp_path: Path) -> None:
    """All types, 0-dim, empty, non-contiguous and tied tensors come back bit for bit, from files; and torch reads them."""
    base = torch.randint(0, 2, (6, 4, 3))
    state: dict[str, Any] = {str(d).removeprefix("torch."): base.to(torch.float32).to(d) for d in DTYPES}
    state |= {"zero": torch.tensor(2.5), "empty": torch.empty(0, 3), "none": torch.empty(3, 0), "big": torch.rand(300_000)}
    state |= {"strided": torch.rand(9, 8).t()[::2], "tied": state["big"], "expanded": torch.rand(1, 4).expand(5, 4)}
    with torch.no_grad():
        checkpoints = DictCheckpoints(tmp_path / "ckpt")
        checkpoints.save(state, 1).result()
        checkpoints.close()
    empty = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
    assert DictCheckpoints(tmp_path / "ckpt").load(empty) == 1
    stocks = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
    dcp.load(stocks, checkpoint_id=found_in(tmp_path / "ckpt")[0].path)
    for name, tensor in state.items():
        wanted = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
        for found in (empty[name], stocks[name]):
            assert torch.equal(found.reshape(-1).view(torch.uint8) if tensor.numel() else found, wanted), name


def test_torch_converts_ours(tmp_path: Path) -> None:
    """torch's converter makes one torch.save file of ours, with the nesting that the state had; every zip in it has its checksum."""
    model, optimizer = trained(1)
    with Checkpointer(tmp_path / "ckpt", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(3)
    path = found_in(tmp_path / "ckpt")[0].path
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(whole["model"]["0.weight"], model.state_dict()["0.weight"])
    raw = (path / "__0_0.distcp").read_bytes()
    for item in (read_metadata(path).storage_data or {}).values():
        zipped = io.BytesIO(raw[item.offset : item.offset + item.length])
        assert zipfile.ZipFile(zipped).testzip() is None


def test_ours_reads_torchs(tmp_path: Path) -> None:
    """A checkpoint of dcp.save is restored by its path: weights, moments and the optimizer's groups."""
    model, optimizer = trained(1)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "stock-40")
    other, fresh = trained(2)
    checkpointer = Checkpointer(tmp_path / "ckpt", model=other, optimizer=fresh)
    assert checkpointer.restore(tmp_path / "stock-40") == 40
    assert bits(other, fresh) == bits(model, optimizer)
    assert fresh.param_groups[0]["lr"] == 0.01


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        """The file."""
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle would run."""
        return (open, (self.path, "w"))


@pytest.mark.filterwarnings("ignore")
def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    """Neither .metadata nor a value of a stock checkpoint gets to run anything."""
    dcp.save({"model": {"w": torch.zeros(2)}, "extra": Bomb(str(tmp_path / "ran"))}, checkpoint_id=tmp_path / "stock")
    (tmp_path / "ran").unlink(missing_ok=True)  # dcp.save itself may have copied it
    model = nn.Module()
    model.register_buffer("w", torch.ones(2))
    with pytest.raises((CheckpointMismatch, CheckpointDamaged)):
        Checkpointer(tmp_path / "ckpt", model=model).restore(tmp_path / "stock")
    (tmp_path / "stock" / ".metadata").write_bytes(pickle.dumps(Bomb(str(tmp_path / "ran"))))
    with pytest.raises((CheckpointMismatch, CheckpointDamaged)):
        Checkpointer(tmp_path / "ckpt", model=model).restore(tmp_path / "stock")
    assert not (tmp_path / "ran").exists()


def test_names_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that only one side has are listed and an error; strict=False takes what there is and says what it skipped."""
    with Checkpointer(tmp_path / "ckpt", a=nn.Linear(2, 2), b=nn.Linear(2, 2)) as checkpointer:
        checkpointer.save(5)
    a, c = nn.Linear(2, 2), nn.Linear(2, 2)
    before = c.weight.clone()
    with pytest.raises(CheckpointMismatch, match=r"does not hold 'c', which this script has; it holds 'b', which this script has not"):
        Checkpointer(tmp_path / "ckpt", a=a, c=c).restore()
    assert Checkpointer(tmp_path / "ckpt", a=a, c=c).restore(strict=False) == 5
    assert torch.equal(c.weight, before)
    err = capsys.readouterr().err
    assert "c is not in the checkpoint and stays as it is; b is in the checkpoint and is left out" in err


def test_another_type_only_if_asked(tmp_path: Path) -> None:
    """A dtype that differs is an error; cast=True converts."""
    model = nn.Linear(3, 2)
    with Checkpointer(tmp_path / "ckpt", model=model) as checkpointer:
        checkpointer.save(5)
    other = nn.Linear(3, 2, dtype=torch.float64)
    with pytest.raises(CheckpointMismatch, match="cast=True"):
        Checkpointer(tmp_path / "ckpt", model=other).restore()
    assert Checkpointer(tmp_path / "ckpt", model=other).restore(cast=True) == 5
    assert torch.equal(other.weight.float(), model.weight)


def test_restore_from_a_named_one(tmp_path: Path) -> None:
    """An older checkpoint is restored by step or path; one that is not there is an error, not a fresh start."""
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    for step in (1, 2, 3):
        checkpoints.save({"w": torch.full((4,), float(step))}, step).result()
    state = {"w": torch.zeros(4)}
    assert checkpoints.load(state, source=2) == 2
    assert state["w"].eq(2).all()
    assert checkpoints.load(state, source=str(found_in(tmp_path / "ckpt")[2].path)) == 1
    with pytest.raises(CheckpointMismatch, match="no whole checkpoint 9"):
        checkpoints.load(state, source=9)
