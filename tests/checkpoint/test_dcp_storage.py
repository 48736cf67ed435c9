"""torch's own dcp.save, dcp.async_save and dcp.load with goodrun's writers and readers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from goodrun import ObjectStoreReader, ObjectStoreWriter, UCVolumeReader, UCVolumeWriter
from goodrun.checkpoint import CheckpointDamaged, CheckpointError
from goodrun.checkpoint.places import storage_at

from .stores import Store


def state_of(step: int) -> dict[str, Any]:
    """Tensors of several kinds, one of them large, and values."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"w": torch.rand(300, 200, generator=generator), "none": torch.zeros(0, 3)},
        "half": torch.rand(7, generator=generator).bfloat16(),
        "big": torch.rand(5 << 20, generator=generator),
        "view": torch.arange(12).reshape(3, 4).t()[1:] + step,
        "scalar": torch.tensor(step),
        "values": {"step": step, "text": "é"},
    }


def blank() -> dict[str, Any]:
    """The same shapes without the values."""
    state = state_of(0)
    for tensor in (*state["model"].values(), state["half"], state["big"], state["view"], state["scalar"]):
        tensor.zero_()
    return {**state, "values": {"step": -1, "text": ""}}


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, dict):
        return all(same(one[name], other[name]) for name in other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_save_async_save_load(store: Store, tmp_path: Path) -> None:
    """What stock calls save comes back through stock calls; a second save replaces the first as a whole and leaves nothing of it."""
    kinds = (UCVolumeWriter, UCVolumeReader) if store.kind == "volume" else (ObjectStoreWriter, ObjectStoreReader)
    writer, reader = kinds
    dcp.save(state_of(1), storage_writer=writer(store.url))
    first = storage_at(store.place).entries(store.place)
    dcp.async_save(state_of(2), storage_writer=writer(store.url)).result()  # type: ignore[union-attr]
    second = storage_at(store.place).entries(store.place)
    assert len(first) == len(second) == 2
    assert len(set(first) & set(second)) == 1, "only .metadata has the same name"
    state = blank()
    dcp.load(state, storage_reader=reader(store.url))
    assert same(state, state_of(2))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in second:
        (copy / name).write_bytes(storage_at(store.place).read(store.place / name))
    stock = blank()
    dcp.load(stock, checkpoint_id=copy)
    assert same(stock, state_of(2)), "torch's own reader takes a copy"
    if store.server is not None:
        put = [path.split("?")[0].rpartition("/")[2] for path in store.server.asked("PUT") if "/signed/" not in path]
        assert put[-1] == ".metadata"
    pickle.loads(pickle.dumps(writer(store.url)))  # async_save by a process sends it there


def test_what_is_not_there(store: Store) -> None:
    """Where there is no .metadata there is no checkpoint, whatever else lies there."""
    storage_at(store.place).make_directory(store.place)
    storage_at(store.place).write(store.place / "__0_0.distcp", [b"half"])
    with pytest.raises((CheckpointDamaged, dcp.api.CheckpointException), match="never committed"):
        dcp.load(blank(), storage_reader=ObjectStoreReader(store.url))


def test_memory() -> None:
    """Any address that fsspec knows will do."""
    pytest.importorskip("fsspec")
    dcp.save(state_of(1), storage_writer=ObjectStoreWriter("memory://goodrun/one"))
    state = blank()
    dcp.load(state, storage_reader=ObjectStoreReader("memory://goodrun/one"))
    assert same(state, state_of(1))


def test_volumes_have_a_shape() -> None:
    """A path that is in no volume is refused at once."""
    for path in ("/Volumes/a/b", "/tmp/x", "s3://bucket/x"):
        with pytest.raises(CheckpointError, match="no path in a volume"):
            UCVolumeWriter(path)
