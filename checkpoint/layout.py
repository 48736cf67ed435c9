"""Who copies what: the plan of a state that is made once, and holds until names, shapes or types change."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .boxes import Box, Piece, cut_small, share
from .errors import CheckpointError
from .index import Chunk, Index, TensorEntry
from .manifest import shard_file
from .ranks import Ranks
from .zipped import Wrapping, wrapping

_ALIGN = 64
_FORMAT: dict[str, Any] = {"version": "1.0.0"} if any(f.name == "version" for f in fields(Metadata)) else {}  # torch 2.7 and later
Paths = Mapping[str, tuple[str | int, ...]]


@dataclass(frozen=True)
class Placed:
    """A piece at its place in the shard file: the wrapping begins at `zip_at`, the bytes at `raw_at`."""

    piece: Piece
    dtype: torch.dtype
    wrapping: Wrapping
    zip_at: int

    @property
    def raw_at(self) -> int:
        """Where the tensor's bytes begin."""
        return self.zip_at + len(self.wrapping.head)

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.raw_at + self.piece.nbytes + len(self.wrapping.tail)


@dataclass(frozen=True)
class Layout:
    """What this rank copies, and (on rank 0) the index and torch's own metadata of the whole."""

    name: str
    signature: tuple[Any, ...]
    placed: tuple[Placed, ...]
    size: int
    origins: Mapping[str, Box]
    """The part of each tensor that this rank holds."""
    index: bytes = b""
    metadata: bytes = b""


def signature_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """What has to be the same for a plan to hold; cheap, for it is compared at every save."""
    return tuple([(name, t.shape, t.dtype, t.placements if isinstance(t, DTensor) else None) for name, t in tensors.items()])


def make_layout(tensors: Mapping[str, torch.Tensor], paths: Paths, ranks: Ranks, number: int) -> Layout:
    """Plan together: all ranks call it alike. Raises CheckpointError on all where their states do not fit together."""
    whole = {name: t for name, t in tensors.items() if not isinstance(t, DTensor)}
    sharded = {name: (box.offset, box.size) for name, t in tensors.items() if isinstance(t, DTensor) and (box := _local_box(t)) is not None}
    described = [(name, str(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
    digest = hashlib.sha256(repr((number, sorted(described))).encode()).hexdigest()[:16]
    everyone = ranks.gather((digest, sharded))
    if any(theirs != digest for theirs, _ in everyone):
        _complain(ranks.gather(sorted(described)))
    holders = _holders(whole, [boxes for _, boxes in everyone])
    widths = {name: t.dtype.itemsize for name, t in tensors.items()}
    shares: list[list[Piece]] = [[] for _ in range(ranks.size)]
    for group, boxes in holders.items():
        parts = share([Piece(name, box, widths[name]) for name, box in boxes], len(group))
        for rank, part in zip(group, parts, strict=True):
            shares[rank] += cut_small(part)
    types = {name: t.dtype for name, t in tensors.items()}
    mine = _place(shares[ranks.rank], types)
    origins = {name: Box(*sharded[name]) if name in sharded else Box((0,) * t.ndim, tuple(t.shape)) for name, t in tensors.items()}
    index = metadata = b""
    if ranks.rank == 0:
        index, metadata = _describe(tensors, paths, [_place(s, types) for s in shares])
    return Layout(digest, signature_of(tensors), mine, mine[-1].end if mine else 0, origins, index, metadata)


def _local_box(tensor: DTensor) -> Box | None:
    """The part of a sharded tensor that this rank has; None if it has none of it."""
    if any(p.is_partial() for p in tensor.placements):
        raise CheckpointError("a tensor with Partial placements is no state that can be saved: reduce it first")
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor._local_tensor
    if tuple(size) != tuple(local.shape):
        return None  # this rank is not among the mesh's
    return Box(tuple(offset), tuple(size)) if local.numel() or not tensor.numel() else None


def _complain(everyone: list[list[tuple[Any, ...]]]) -> None:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        odd = next((d for d in [*theirs, *first] if d not in first or d not in theirs), None)
        if odd is not None:
            name, dtype, shape = odd
            raise CheckpointError(f"the states of rank 0 and rank {rank} differ: {name} ({dtype}, {shape}) is not the same on both")


def _holders(
    whole: Mapping[str, torch.Tensor], everyone: list[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]
) -> dict[tuple[int, ...], list[tuple[str, Box]]]:
    """Boxes by the ranks that hold them alike: whole tensors by all, a shard by one, or by several where it is replicated."""
    found: dict[tuple[int, ...], list[tuple[str, Box]]] = {}
    everybody = tuple(range(len(everyone)))
    for name, tensor in whole.items():
        found.setdefault(everybody, []).append((name, Box((0,) * tensor.ndim, tuple(tensor.shape))))
    owners: dict[tuple[str, Box], list[int]] = {}
    for rank, boxes in enumerate(everyone):
        for name, (offset, size) in boxes.items():
            owners.setdefault((name, Box(offset, size)), []).append(rank)
    for key, ranks in owners.items():
        found.setdefault(tuple(ranks), []).append(key)
    return found


def _place(pieces: list[Piece], types: Mapping[str, torch.dtype]) -> tuple[Placed, ...]:
    placed, at = [], 0
    for piece in pieces:
        placed.append(Placed(piece, types[piece.name], wrapping(types[piece.name], piece.box.size), at))
        at = -(-placed[-1].end // _ALIGN) * _ALIGN
    return tuple(placed)


def _describe(tensors: Mapping[str, torch.Tensor], paths: Paths, everyone: list[tuple[Placed, ...]]) -> tuple[bytes, bytes]:
    """The index in our form and in torch's."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    where: dict[str, list[_StorageInfo]] = {name: [] for name in tensors}
    for rank, placed in enumerate(everyone):
        for item, p in enumerate(placed):
            chunks[p.piece.name].append(Chunk(p.piece.box, shard_file(rank), item, p.raw_at, p.piece.nbytes))
            where[p.piece.name].append(_StorageInfo(shard_file(rank), p.zip_at, p.end - p.zip_at))
    index = Index(
        {n: TensorEntry(str(t.dtype).removeprefix("torch."), tuple(t.shape), tuple(chunks[n])) for n, t in tensors.items()},
        {shard_file(r): tuple((p.raw_at, p.piece.nbytes) for p in placed) for r, placed in enumerate(everyone)},
    )
    stored: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in tensors.items():
        boxes = [c.box for c in chunks[name]]
        parts = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.size)) for b in boxes]
        stored[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), parts)
        for number, (box, info) in enumerate(zip(boxes, where[name], strict=True)):
            storage[MetadataIndex(name, box.offset, number)] = info
    metadata = Metadata(stored, planner_data=dict(paths), storage_data=storage, storage_meta=StorageMeta(), **_FORMAT)
    return index.to_bytes(), pickle.dumps(metadata)
