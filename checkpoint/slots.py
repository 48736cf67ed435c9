"""The memory a rank copies its part into: wrapped as the file will be, so that a save is nothing but the copy."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from .layout import Layout
from .memory import PAGE, Memory, SlotShape

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_DONT_FORK = 10  # MADV_DONTFORK


class Slot:
    """One slot of this rank, being made ready by a thread of its own from the moment it is there."""

    def __init__(self, fd: int, shape: SlotShape, layout: Layout) -> None:
        """The descriptor becomes this object's; it is kept for a keeper that takes another's place."""
        self.number = 0
        """The snapshot in it; 0 is none."""
        self.values = 0
        """How many bytes of values are in it."""
        self.fd = fd
        self.shape = shape
        self._memory = Memory(fd, shape.size)
        self._copies: list[tuple[torch.Tensor, str, int, int]] = []
        self._fault: BaseException | None = None
        self._ready = threading.Thread(target=self._prepare, args=(layout,), name="goodrun-slot", daemon=True)
        self._ready.start()

    def _prepare(self, layout: Layout) -> None:
        try:
            self._populate()
            image = memoryview(self._memory.map)[PAGE : PAGE + self.shape.shard]
            for p in layout.placed:
                image[p.zip_at : p.raw_at] = p.wrapping.head
                image[p.raw_at + p.piece.nbytes : p.end] = p.wrapping.tail
                if not p.piece.nbytes:
                    continue
                flat = torch.frombuffer(self._memory.map, dtype=p.dtype, count=p.piece.box.count, offset=PAGE + p.raw_at)
                origin = layout.origins[p.piece.name]
                begin, rows = 0, -1
                if p.piece.box != origin:
                    begin, rows = p.piece.box.offset[0] - origin.offset[0], p.piece.box.size[0]
                self._copies.append((flat.view(p.piece.box.size), p.piece.name, begin, rows))
        except BaseException as e:  # the thread's border: whoever waits for the slot raises it
            self._fault = e

    def _populate(self) -> None:
        """Have every page in this process's tables, and none in those of its children."""
        libc = ctypes.CDLL(None, use_errno=True)
        anchor = (ctypes.c_char * self.shape.size).from_buffer(self._memory.map)
        at, size = ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(self.shape.size)
        libc.madvise(at, size, _DONT_FORK)
        if libc.madvise(at, size, _POPULATE_WRITE):
            for page in range(0, self.shape.size, mmap.PAGESIZE):  # an older kernel
                self._memory.map[page] = 0

    def ready(self) -> None:
        """Wait until it can be copied into."""
        self._ready.join()
        if self._fault is not None:
            raise self._fault

    def fill(self, number: int, tensors: Mapping[str, torch.Tensor], values: bytes) -> None:
        """The save itself: copy this rank's part. Until it is done the slot counts as empty."""
        self.number = number
        self._memory.holds = 0
        into, out = [], []
        for target, name, begin, rows in self._copies:
            source = tensors[name]
            if isinstance(source, DTensor):
                source = source._local_tensor
            into.append(target)
            out.append(source if rows < 0 else source[begin : begin + rows])
        with torch.no_grad():
            for target, source in zip(into, out, strict=True):
                target.copy_(source, non_blocking=True)
        if any(source.is_cuda for source in out):
            torch.cuda.current_stream().synchronize()
        self._memory.map[self.shape.values_at : self.shape.values_at + len(values)] = values
        self.values = len(values)
        self._memory.holds = number

    def release(self) -> None:
        """Let go of it; the keeper may still hold it."""
        if threading.current_thread() is not self._ready:
            self._ready.join()
        self._copies = []
        self._memory.close()


def fds_of(slots: list[Slot]) -> tuple[int, ...]:
    """Descriptors to send along; each stays its slot's own."""
    return tuple(slot.fd for slot in slots)


def close_all(fds: list[int]) -> None:
    """Close descriptors that came with a message nobody waits for any more."""
    for fd in fds:
        os.close(fd)
