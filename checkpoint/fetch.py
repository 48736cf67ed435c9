"""Reads tensors out of a checkpoint straight into place, from the keeper's memory or from files, checking every byte it takes."""

from __future__ import annotations

import ctypes
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .boxes import Box
from .crc import combine
from .errors import CheckpointDamaged, CheckpointMismatch
from .index import Chunk, Index, TensorEntry
from .manifest import Manifest, difference, first_fault
from .memory import PAGE, SlotShape

_BLOCK = 1 << 20
"""Bytes that are read and then checked while they are in the processor's cache."""


class Source(Protocol):
    """Where the bytes of a checkpoint are."""

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """These are going to be taken, about in this order: what takes long may begin."""

    def take(self, chunk: Chunk, into: memoryview) -> None:
        """Read a whole chunk; raises CheckpointDamaged if the bytes are not those that were saved."""

    def view(self, chunk: Chunk) -> memoryview | None:
        """The bytes where they are, if they need no reading."""

    def check_rest(self, index: Index, part: int, parts: int) -> None:
        """Check what the reading of tensors leaves out, or one of `parts` shares of it; raises CheckpointDamaged."""


class Files:
    """The shards of a committed checkpoint."""

    def __init__(self, checkpoint: Path, manifest: Manifest, files: ExitStack) -> None:
        """Descriptors are opened as needed and closed with `files`."""
        self._checkpoint, self._manifest, self._files = checkpoint, manifest, files
        self._fds: dict[str, int] = {}

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """A file system reads ahead by itself."""

    def _open(self, name: str) -> int:
        if name not in self._fds:
            try:
                fd = os.open(self._checkpoint / name, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise CheckpointDamaged(f"{name} is missing") from None
            self._files.callback(os.close, fd)
            self._fds[name] = fd
            size = os.fstat(fd).st_size
            if (fault := difference(name, (size, self._manifest.files[name][1]), self._manifest.files[name])) is not None:
                raise CheckpointDamaged(fault)
        return self._fds[name]

    def take(self, chunk: Chunk, into: memoryview) -> None:
        """Read and check, block by block."""
        fd, crc = self._open(chunk.file), 0
        for at in range(0, chunk.nbytes, _BLOCK):
            block = into[at : at + _BLOCK]
            _read(fd, chunk.at + at, block, chunk.file)
            crc = zlib.crc32(block, crc)
        if crc != self._manifest.items[chunk.file][chunk.item]:
            raise CheckpointDamaged(f"{chunk.file} does not match its checksum")

    def view(self, chunk: Chunk) -> memoryview | None:
        """Files have to be read."""
        return None

    def check_rest(self, index: Index, part: int, parts: int) -> None:
        """Check all that reading the tensors leaves out, or every `parts`-th file of it: with that, every byte of the checkpoint."""
        for name in sorted(self._manifest.files)[part::parts]:
            if name in index.files:
                self.check_wrapping(name, index.files[name])
            elif (fault := first_fault(self._checkpoint, [(name, self._manifest.files[name])])) is not None:
                raise CheckpointDamaged(fault)

    def check_wrapping(self, name: str, items: tuple[tuple[int, int], ...]) -> None:
        """Check what lies between the tensors of a shard; with their own checksums that is every byte of the file."""
        fd, (size, whole) = self._open(name), self._manifest.files[name]
        crc, at = 0, 0
        for (begin, length), own in zip(items, self._manifest.items[name], strict=True):
            crc = combine(zlib.crc32(os.pread(fd, begin - at, at), crc), own, length)
            at = begin + length
        crc = zlib.crc32(os.pread(fd, size - at, at), crc)
        if crc != whole:
            raise CheckpointDamaged(f"{name} does not match its checksum")


def _read(fd: int, at: int, into: memoryview, name: str) -> None:
    done = 0
    while done < len(into):
        n = os.preadv(fd, [into[done:]], at + done)
        if n == 0:
            raise CheckpointDamaged(f"{name} ends too early")
        done += n


class Slots:
    """The shards of a snapshot in the keeper's memory.

    A whole chunk is read as from a file: one copy, where the tables of a mapping's pages would cost as much again.
    """

    def __init__(self) -> None:
        """Empty until shards are added."""
        self._fds: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self.values: dict[int, bytes] = {}

    def add(self, rank: int, file: str, fd: int, shape: SlotShape, values: int) -> None:
        """The slot of one rank; the descriptor becomes this object's."""
        self._fds[file], self._sizes[file] = fd, shape.size
        self.values[rank] = os.pread(fd, values, shape.values_at)

    def __del__(self) -> None:
        """Close them; an offer may never be taken up."""
        for fd in self._fds.values():
            os.close(fd)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """All is here."""

    def take(self, chunk: Chunk, into: memoryview) -> None:
        """Copy; memory is trusted."""
        _read(self._fds[chunk.file], PAGE + chunk.at, into, chunk.file)

    def check_rest(self, index: Index, part: int, parts: int) -> None:
        """Memory is trusted."""

    def view(self, chunk: Chunk) -> memoryview:
        """The bytes in the slot, mapped for whoever wants only some of them."""
        return self.stretch(chunk.file, chunk.at, chunk.nbytes)

    def has(self, file: str) -> bool:
        """Whether this shard is here."""
        return file in self._fds

    def stretch(self, file: str, at: int, nbytes: int) -> memoryview:
        """A stretch of a shard."""
        if file not in self._maps:  # a copy on write: not even a mistake can write through it
            self._maps[file] = mmap.mmap(self._fds[file], self._sizes[file], access=mmap.ACCESS_COPY)
        return memoryview(self._maps[file])[PAGE + at : PAGE + at + nbytes]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which lives as long as somebody looks at it."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def fill(name: str, entry: TensorEntry, target: torch.Tensor, source: Source) -> None:
    """Bring the part of a tensor that `target` holds into it; it has the saved shape and may be sharded in any way."""
    local, box = _part_of(target)
    filled = 0
    for chunk in entry.chunks:
        common = chunk.box.common(box) if box.count else None
        if common is None:
            continue
        filled += common.count
        if chunk.nbytes != chunk.box.count * dtype_of(entry.dtype).itemsize:
            raise CheckpointDamaged(f"the index gives a part of {name} {chunk.nbytes} bytes, which do not fit its size")
        _bring(chunk, common, local, box, entry, source)
    if filled < box.count:
        raise CheckpointDamaged(f"the index has only {filled} of the {box.count} elements of {name}")


def needed(entry: TensorEntry, target: torch.Tensor) -> list[Chunk]:
    """The chunks that have something of what `target` holds."""
    _, box = _part_of(target)
    return [chunk for chunk in entry.chunks if box.count and chunk.box.common(box) is not None]


def _part_of(target: torch.Tensor) -> tuple[torch.Tensor, Box]:
    if not isinstance(target, DTensor):
        return target.detach(), Box((0,) * target.ndim, tuple(target.shape))
    size, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return target._local_tensor.detach(), Box(tuple(offset), tuple(size))


def _bring(chunk: Chunk, common: Box, local: torch.Tensor, box: Box, entry: TensorEntry, source: Source) -> None:
    where = local
    for d, (offset, size) in enumerate(zip(common.offset, common.size, strict=True)):
        if size != box.size[d]:
            where = where.narrow(d, offset - box.offset[d], size)
    dtype = dtype_of(entry.dtype)
    with torch.no_grad():
        if common == chunk.box and where.is_contiguous() and where.dtype == dtype and where.device.type == "cpu":
            source.take(chunk, bytes_of(where))
            return
        view = source.view(chunk)
        if view is not None:
            part = torch.frombuffer(view, dtype=dtype).view(chunk.box.size)
        else:
            part = torch.empty(chunk.box.size, dtype=dtype)
            source.take(chunk, bytes_of(part))
        for d in range(part.ndim):
            part = part.narrow(d, common.offset[d] - chunk.box.offset[d], common.size[d])
        where.copy_(part)


def dtype_of(name: str) -> torch.dtype:
    """torch's type of this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointMismatch(f"the checkpoint holds the dtype {name!r}, which this torch does not have")
    return dtype


def check_fit(index: Index, names: set[str], templates: Mapping[str, torch.Tensor], where: str, *, cast: bool) -> None:
    """Raise CheckpointMismatch if a tensor has another shape, or (unless `cast`) another type, than the script's; touches nothing."""
    for name in sorted(names):
        entry, like = index.tensors.get(name), templates.get(name)
        if entry is None:
            raise CheckpointDamaged(f"its values name the tensor {name}, its index does not")
        if like is None:
            continue
        shape, dtype = tuple(like.shape), str(like.dtype).removeprefix("torch.")
        if shape != entry.shape or (dtype != entry.dtype and not cast):
            how = "" if shape != entry.shape else ", or ask for the cast with cast=True"
            raise CheckpointMismatch(
                f"{name} is {entry.dtype} {entry.shape} in {where}, {dtype} {shape} in this script: "
                f"give the script the model that was saved, or another directory{how}"
            )
