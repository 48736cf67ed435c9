"""Shared memory in the processor's large pages: mapped where they fit, and backed by them as far as the kernel gives any.

The kernel's copy out of 4 KiB pages costs more than twice as much as out of 2 MiB pages (docs/benchmarks_checkpoint.md), and every process
that maps the memory has to enter each page in its tables.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

_FIXED = 0x10  # MAP_FIXED
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
_AT_ONCE = 32
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _large() -> int:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return mmap.PAGESIZE  # a kernel without: nothing here is larger than that


LARGE = _large()
"""Bytes of a large page; of an ordinary one where there are no others."""


def mapped(fd: int, size: int) -> memoryview:
    """The first `size` bytes of a file, shared, at an address that is a multiple of a large page; unmapped with the last look at it.

    Raises OSError, and ValueError where the file is shorter: a look beyond its end kills a process.
    """
    if os.fstat(fd).st_size < size:
        raise ValueError(f"{size} bytes were to be mapped of {os.fstat(fd).st_size}")
    step = LARGE if size >= LARGE else mmap.PAGESIZE
    length = size + step - mmap.PAGESIZE
    room = _libc.mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)  # it has such an address in it
    if room == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    at = -(-room // step) * step
    if _libc.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, fd, 0) != at:
        fault = ctypes.get_errno()
        _libc.munmap(room, length)
        raise OSError(fault, os.strerror(fault))
    memory = (ctypes.c_char * size).from_address(at)
    weakref.finalize(memory, _libc.munmap, room, length).atexit = False  # threads may still write when the interpreter ends
    return memoryview(memory).cast("B")


def enlarge(fd: int, memory: memoryview) -> None:
    """Back memory that is fresh and mapped as above by large pages, as far as there are any; what they do not fill stays as it is.

    They are given whatever the administrator chose for shared memory by itself (`shmem_enabled`, usually "never"), short of "deny".
    Raises OSError where there is no memory left.
    """
    whole = len(memory) // LARGE * LARGE
    if not whole or LARGE == mmap.PAGESIZE:
        return
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for begin in range(0, whole, _AT_ONCE * LARGE):  # whoever is killed meanwhile does not have to wait for all of it
        end = min(begin + _AT_ONCE * LARGE, whole)
        for page in range(begin, end, LARGE):  # what has no page at all yet is not collapsed
            os.posix_fallocate(fd, page, mmap.PAGESIZE)
        if _libc.madvise(at + begin, end - begin, _COLLAPSE):
            return
