"""For scripts that call torch's own `dcp.save` and `dcp.load`: writers and readers for Unity Catalog volumes and object stores.

    dcp.save(state, storage_writer=UCVolumeWriter("/Volumes/main/default/ckpt/step-100"))
    dcp.load(state, storage_reader=UCVolumeReader("/Volumes/main/default/ckpt/step-100"))

What they write is what torch's FileSystemWriter would have written into a directory, one file a rank. `.metadata` is put last of all and
is the commit mark; a save over an older one does not touch its files until the new `.metadata` is there.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import uuid
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .errors import CheckpointDamaged, CheckpointError
from .fetch import bytes_of
from .places import Where, absolute, located, storage_at
from .remote.ranges import Ahead, Span
from .stock import read_metadata
from .storage import Bytes, Storage
from .zipped import wrapping

_METADATA = ".metadata"
_SUFFIX = ".distcp"
_VERSION = "1.0.0"


class _Place:
    """Where a writer or reader works; nothing is opened before it is needed, so that both can be sent to another process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """A place of the kind that the class is for."""
        self.path: Where = absolute(self._checked(path))

    @classmethod
    def _checked(cls, path: str | os.PathLike[str]) -> Where:
        return located(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, at another place if one is given."""
        if checkpoint_id:
            self.path = absolute(self._checked(checkpoint_id))

    @property
    def checkpoint_id(self) -> str:
        """The place."""
        return str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a place of this kind."""
        try:
            cls._checked(checkpoint_id)
        except CheckpointError:
            return False
        return True

    @property
    def _storage(self) -> Storage[Any]:
        return storage_at(self.path)


class ObjectStoreWriter(_Place, StorageWriter):
    """Writes to any place that goodrun knows: s3://, gs://, abfs:// and other fsspec addresses, volumes, directories."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Nothing is written yet."""
        super().__init__(path)
        self._save_id = uuid.uuid4().hex[:8]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, whose files have names of their own."""
        super().reset(checkpoint_id)
        self._save_id = uuid.uuid4().hex[:8]

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the directory, where storage has such."""
        if kwargs.get("use_collectives", True) is False:
            raise CheckpointError("saves without collectives write one .metadata a rank, which this writer does not do")
        if is_coordinator:
            self._storage.make_directory(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the file of each rank."""
        names = (f"__{rank}_{self._save_id}{_SUFFIX}" for rank in range(len(plans)))
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Put this rank's file: tensors go to the wire from where they lie."""
        written: list[WriteResult] = []
        self._storage.write(self.path / plan.storage_data, _items(plan, planner, written))
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, then take away the files of a save that this one replaces."""
        metadata.version = _VERSION
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        metadata.storage_meta = self.storage_meta()
        self._storage.replace(self.path / _METADATA, pickle.dumps(metadata))
        for name in self._storage.entries(self.path):
            if name.startswith("__") and name.endswith(_SUFFIX) and self._save_id not in name:
                self._storage.remove(self.path / name)

    def storage_meta(self) -> StorageMeta:
        """What torch keeps about a save."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self._save_id)


def _items(plan: SavePlan, planner: SavePlanner, written: list[WriteResult]) -> Iterator[Bytes]:
    """The file, item by item; each is what torch.save makes of a tensor, or the planner of a value."""
    at = 0
    for item in plan.items:
        length = 0
        for part in _parts(item, planner):
            length += len(part)
            yield part
        written.append(WriteResult(item.index, length, _StorageInfo(plan.storage_data, at, length)))
        at += length


def _parts(item: WriteItem, planner: SavePlanner) -> list[Bytes]:
    data: Any = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        return [data.getvalue()]
    tensor = data.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) is not torch.Tensor:
        whole = io.BytesIO()
        torch.save(tensor.cpu(), whole)
        return [whole.getvalue()]
    tensor = tensor.cpu().contiguous()
    wrapped, raw = wrapping(tensor.dtype, tuple(tensor.shape)), bytes_of(tensor)
    tail = bytearray(wrapped.tail)
    for seal in wrapped.seals:
        tail[seal : seal + 4] = zlib.crc32(raw).to_bytes(4, "little")
    return [wrapped.head, raw, tail]


class ObjectStoreReader(_Place, StorageReader):
    """Reads what the writers, goodrun's Checkpointer or torch's FileSystemWriter have written, from any place that goodrun knows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Nothing is read yet."""
        super().__init__(path)
        self._where: dict[MetadataIndex, _StorageInfo] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """`.metadata`, without running code from it. Raises CheckpointDamaged where there is none: it was never committed."""
        try:
            metadata = read_metadata(self.path)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self.path} holds no .metadata: there is no checkpoint, or it was never committed") from None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = uuid.uuid4().hex
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Where everything is."""
        self._where = metadata.storage_data or {}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read only what this rank needs, many ranges at once."""
        by_place: dict[Span, list[ReadItem]] = {}
        for item in plan.items:
            info = self._where[item.storage_index]
            by_place.setdefault(Span(info.relative_path, info.offset, info.length), []).append(item)
        order = sorted(by_place)
        storage, path = self._storage, self.path
        ahead = Ahead(lambda file, at, nbytes: storage.read(path / file, at, nbytes), order)
        for span in order:
            raw = bytearray(span.nbytes)
            ahead.take(span, memoryview(raw))
            _give(by_place[span], raw, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _give(items: list[ReadItem], raw: bytearray, planner: LoadPlanner) -> None:
    tensor: torch.Tensor | None = None
    for item in items:
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(raw))
            continue
        if tensor is None:
            tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        part = tensor
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != part.size():
            name, has, wants = item.storage_index.fqn, tuple(part.size()), tuple(target.size())
            raise CheckpointDamaged(f"{name} is {has} in the checkpoint, {wants} was planned")
        target.copy_(part)
        planner.commit_tensor(item, target)


class _Volume(_Place):
    @classmethod
    def _checked(cls, path: str | os.PathLike[str]) -> Where:
        text = os.fspath(path)
        if not text.startswith("/Volumes/") or len([part for part in text.split("/") if part]) < 4:
            raise CheckpointError(f"{text} is no path in a volume: /Volumes/<catalog>/<schema>/<volume>/…")
        return located(text)


class UCVolumeWriter(_Volume, ObjectStoreWriter):
    """Writes to /Volumes/<catalog>/<schema>/<volume>/…: through the mount where there is one, else over the Files API."""


class UCVolumeReader(_Volume, ObjectStoreReader):
    """Reads from /Volumes/<catalog>/<schema>/<volume>/…: through the mount where there is one, else over the Files API."""
