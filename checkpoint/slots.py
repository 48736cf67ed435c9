"""The memory a rank copies its part into: wrapped as the file will be, so that a save is nothing but the copy."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor

from .gpu import GpuCopies, on_gpu
from .layout import Layout
from .memory import PAGE, Memory, SlotShape

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_DONT_FORK = 10  # MADV_DONTFORK


class Slot:
    """One slot of this rank, being made ready by a thread of its own from the moment it is there."""

    def __init__(self, fd: int, shape: SlotShape, layout: Layout, gpu: GpuCopies | None = None) -> None:
        """The descriptor becomes this object's. `gpu`: where some of the tensors are in a GPU's memory."""
        self.number = 0
        """The snapshot in it; 0 is none."""
        self.values = 0
        """How many bytes of values are in it."""
        self.fd = fd
        self.shape = shape
        self._memory = Memory(fd, shape.size)
        self._gpu, self._pinned = gpu, False
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
        if self._gpu is not None:
            self._pinned = self._gpu.pin(ctypes.addressof(anchor), self.shape.size)
        if libc.madvise(at, size, _POPULATE_WRITE):
            for page in range(0, self.shape.size, mmap.PAGESIZE):  # an older kernel
                self._memory.map[page] = 0

    def ready(self) -> None:
        """Wait until it can be copied into."""
        self._ready.join()
        if self._fault is not None:
            raise self._fault

    def fill(self, number: int, tensors: Mapping[str, torch.Tensor], values: bytes) -> Callable[[], None] | None:
        """The save itself: copy this rank's part. Until it is done the slot counts as empty.

        What is in GPU memory is only queued: what is returned then waits for it, and `seal` is to be called. None: all is done.
        """
        self.number = number
        self._memory.holds = 0
        near: list[tuple[torch.Tensor, torch.Tensor]] = []
        far: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, name, begin, rows in self._copies:
            source = tensors[name]
            if isinstance(source, DTensor):
                source = source._local_tensor
            part = source if rows < 0 else source[begin : begin + rows]
            (far if on_gpu(source) else near).append((target, part))
        with torch.no_grad():
            queued = self._gpu.copy(far) if far and self._gpu is not None else None  # these run beside the copies below
            for target, part in near:
                target.copy_(part)
        self._memory.map[self.shape.values_at : self.shape.values_at + len(values)] = values
        self.values = len(values)
        if queued is None:
            self.seal()
        return queued

    def seal(self) -> None:
        """The copy is whole."""
        self._memory.holds = self.number

    @property
    def whole(self) -> bool:
        """Whether the snapshot with its number is in it to the last byte."""
        return self._memory.holds == self.number

    def release(self) -> None:
        """Let go of it; the keeper may still hold it."""
        if threading.current_thread() is not self._ready:
            self._ready.join()
        self._copies = []
        if self._pinned and self._gpu is not None:
            anchor = (ctypes.c_char * self.shape.size).from_buffer(self._memory.map)
            self._gpu.unpin(ctypes.addressof(anchor))
            del anchor
        self._memory.close()


def fds_of(slots: list[Slot]) -> tuple[int, ...]:
    """Descriptors to send along; each stays its slot's own."""
    return tuple(slot.fd for slot in slots)


def close_all(fds: list[int]) -> None:
    """Close descriptors that came with a message nobody waits for any more."""
    for fd in fds:
        os.close(fd)
