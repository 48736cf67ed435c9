"""Snapshot memory in large pages: there where the kernel gives them, mapped as long as somebody looks at it, and no longer."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

import pytest
import torch

from goodrun.checkpoint.memory import Memory
from goodrun.checkpoint.pages import LARGE, mapped

MANY = 70 if LARGE <= 2 << 20 else 1  # more than are asked for at once
SIZE = MANY * LARGE + 3 * mmap.PAGESIZE


def mappings(inode: int) -> int:
    """How often this process has mapped a file; other tests' memory may be there, too."""
    return sum(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def in_large_pages(memory: Memory) -> int:
    """Bytes of it that this process has mapped by large pages."""
    begin = f"{ctypes.addressof(ctypes.c_char.from_buffer(memory.map)):x}-"
    words = Path("/proc/self/smaps").read_text().split(begin, 1)[1].split("ShmemPmdMapped:", 1)[1].split()
    return int(words[0]) << 10


def gives_large_pages() -> bool:
    """MADV_COLLAPSE is of Linux 6.1; "deny" is the one setting that it heeds."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    newer = tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)
    return newer and LARGE > mmap.PAGESIZE and setting.exists() and "[deny]" not in setting.read_text()


@pytest.mark.skipif(not gives_large_pages(), reason="this kernel has no large pages for shared memory (MADV_COLLAPSE, Linux 6.1)")
def test_a_slot_lies_in_large_pages():
    """All but its last, unfinished one; and all of it is there already."""
    memory = Memory.create(SIZE)
    assert in_large_pages(memory) == MANY * LARGE
    assert os.fstat(memory.fd).st_blocks * 512 == SIZE
    memory.close()


@pytest.mark.parametrize("size", [mmap.PAGESIZE, LARGE, SIZE])
def test_memory_of_any_size_is_shared_by_whoever_has_the_descriptor(size):
    """What one writes up to the last byte the other reads."""
    memory = Memory.create(size)
    other, inode = Memory(os.dup(memory.fd), size), os.fstat(memory.fd).st_ino
    memory.map[size - 3 : size] = b"end"
    assert bytes(other.map[size - 3 :]) == b"end"
    assert os.fstat(memory.fd).st_size == size
    memory.close()
    assert bytes(other.map[size - 3 :]) == b"end"
    other.close()
    assert mappings(inode) == 0


def test_memory_goes_with_the_last_look_at_it():
    """A tensor in it can be read after it was closed; then nothing is left mapped."""
    memory = Memory.create(SIZE)
    inode = os.fstat(memory.fd).st_ino
    tensor = torch.frombuffer(memory.map, dtype=torch.uint8, count=LARGE, offset=mmap.PAGESIZE)
    memory.map[mmap.PAGESIZE] = 7
    memory.close()
    del memory
    assert tensor[0] == 7
    assert mappings(inode) == 1
    del tensor
    assert mappings(inode) == 0


def test_a_file_that_is_shorter_is_not_mapped():
    """Whoever looked beyond its end would be killed."""
    fd = os.memfd_create("short")
    os.truncate(fd, mmap.PAGESIZE)
    with pytest.raises(ValueError, match=str(2 * mmap.PAGESIZE)):
        mapped(fd, 2 * mmap.PAGESIZE)
    os.close(fd)
