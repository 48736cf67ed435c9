"""Reading of checkpoints that torch's own dcp.save wrote, without running code from them.

`.metadata` is a pickle, and so are the non-tensor items. The first is read by an unpickler that knows the dozen harmless classes DCP puts
there and no other; the second by torch's own restricted one (weights_only), which knows plain values and tensors.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from .boxes import Box
from .codec import Encoder, Place, Tree
from .errors import CheckpointDamaged
from .fetch import bytes_of
from .index import Chunk, Index, TensorEntry
from .places import Where, storage_at
from .restoring import Offer

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        if global_name not in _ALLOWED.get(module_name, ()):
            raise CheckpointDamaged(f".metadata asks for {module_name}.{global_name}, which no checkpoint needs: it will not be run")
        return super().find_class(module_name, global_name)


def read_metadata(path: Where) -> Metadata:
    """The index that DCP wrote into the checkpoint at `path`."""
    metadata = _Unpickler(io.BytesIO(storage_at(path).read(path / ".metadata"))).load()
    if not isinstance(metadata, Metadata):
        raise CheckpointDamaged(f".metadata of {path.name} holds a {type(metadata).__name__}")
    return metadata


class _Items:
    """The items of a stock checkpoint: each is what torch.save made of one tensor or value."""

    def __init__(self, path: Where) -> None:
        self._path, self._storage = path, storage_at(path)

    def load(self, file: str, at: int, length: int) -> Any:
        raw = self._storage.read(self._path / file, at, length)
        if len(raw) < length:
            raise CheckpointDamaged(f"{file} ends too early")
        try:
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as e:
            raise CheckpointDamaged(f"an item of {file} is a pickle that asks for more than values: it will not be run") from e


class Stock:
    """A stock checkpoint as a source of bytes."""

    def __init__(self, path: Where, lengths: dict[tuple[str, int], int]) -> None:
        """`lengths` are those of the stored items, by file and offset."""
        self._items, self._lengths = _Items(path), lengths

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """They are loaded one by one."""

    def take(self, chunk: Chunk, into: memoryview) -> None:
        """Load the item, and copy; stock checkpoints have no checksums."""
        tensor = self._items.load(chunk.file, chunk.at, self._lengths[chunk.file, chunk.at])
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.box.size or tensor.nbytes != chunk.nbytes:
            raise CheckpointDamaged(f"an item of {chunk.file} is not the tensor that .metadata names")
        into[:] = bytes_of(tensor.contiguous())

    def view(self, chunk: Chunk) -> memoryview | None:
        """Items have to be loaded."""
        return None

    def check_rest(self, index: Index, part: int, parts: int) -> None:
        """There is nothing to compare with."""


def stock(path: Where) -> Offer:
    """The stock checkpoint at this path as an offer; its step is the last number in its name. Raises CheckpointDamaged."""
    metadata = read_metadata(path)
    stored = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}
    lengths = {(info.relative_path, info.offset): info.length for info in stored.values()}
    tensors: dict[str, TensorEntry] = {}
    for name, meta in metadata.state_dict_metadata.items():
        if isinstance(meta, TensorStorageMetadata):
            chunks = tuple(_chunk(name, Box(tuple(c.offsets), tuple(c.sizes)), meta, stored) for c in meta.chunks)
            tensors[name] = TensorEntry(str(meta.properties.dtype).removeprefix("torch."), tuple(meta.size), chunks)
    values = _values(path, metadata, tensors)
    numbers = re.findall(r"\d+", path.name)
    return Offer(
        step=int(numbers[-1]) if numbers else 0,
        world_size=len({info.relative_path for info in stored.values()}),
        started=0,
        generation=0,
        path=path,
        entries=tuple(values),
        index=lambda: Index(tensors, {}),
        values=lambda rank: json.dumps(values).encode(),
        source=lambda files: Stock(path, lengths),
        tier="storage",
    )


def _chunk(name: str, box: Box, meta: TensorStorageMetadata, stored: dict[tuple[str, tuple[int, ...]], Any]) -> Chunk:
    info = stored.get((name, box.offset))
    if info is None:
        raise CheckpointDamaged(f".metadata does not say where {name} is")
    return Chunk(box, info.relative_path, 0, info.offset, box.count * meta.properties.dtype.itemsize)


def _values(path: Where, metadata: Metadata, tensors: dict[str, TensorEntry]) -> dict[str, Any]:
    """The tree that was saved, in our own JSON, with its tensors by name."""
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
    tree: dict[str, Tree] = {}
    items = _Items(path)
    for name in metadata.state_dict_metadata:
        where = paths.get(name, (name,))
        if name in tensors:
            leaf: Any = _Named(name)
        else:
            info = (metadata.storage_data or {})[MetadataIndex(name)]
            leaf = items.load(info.relative_path, info.offset, info.length)
        _put(tree, where, leaf)
    encoder = _NamedEncoder(lambda name, tensor: Place.OWN)
    return {str(key): encoder.encode(value, str(key)) for key, value in tree.items()}


class _Named:
    """Stands for a tensor that is read later."""

    def __init__(self, name: str) -> None:
        self.name = name


class _NamedEncoder(Encoder):
    def encode(self, value: Tree, *path: str | int) -> Any:
        return {"$": "shared", "name": value.name} if isinstance(value, _Named) else super().encode(value, *path)


def _put(tree: Any, where: tuple[Any, ...], leaf: Any) -> None:
    """Set a value in nested dicts and lists, which are made as the path needs them."""
    for key, after in itertools.pairwise(where):
        fresh: Any = [] if isinstance(after, int) else {}
        if isinstance(tree, list):
            tree.extend([None] * (key + 1 - len(tree)))
            tree[key] = fresh if tree[key] is None else tree[key]
        else:
            tree.setdefault(key, fresh)
        tree = tree[key]
    if isinstance(tree, list):
        tree.extend([None] * (where[-1] + 1 - len(tree)))
    tree[where[-1]] = leaf
