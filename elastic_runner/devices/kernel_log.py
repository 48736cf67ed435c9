"""XIDs as NVIDIA's driver writes them into the kernel's log: the other road by which they are heard, where this user may read it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

LOG_VARIABLE = "GOODRUN_KERNEL_LOG"
"""Another file to read than the kernel's own."""
_KERNELS = "/dev/kmsg"
_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)[^)]*\): (\d+)")
_RECORD = 8192

Place = tuple[int, int, int]
"""Where a device is on the PCI bus: domain, bus, device."""


class KernelLog:
    """What is written to the log from now on."""

    def __init__(self, path: str | None = None) -> None:
        """Raises OSError where it cannot be read; `path` is by default the kernel's own log."""
        self._fd = os.open(path or os.environ.get(LOG_VARIABLE, _KERNELS), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._fd, 0, os.SEEK_END)
        self._rest = b""

    def xids(self) -> Iterator[tuple[Place, int]]:
        """The XIDs written since the last call, without waiting."""
        with suppress(BlockingIOError):
            while True:
                try:
                    text = os.read(self._fd, _RECORD)
                except BrokenPipeError:  # the log has gone round, and this record is lost
                    continue
                if not text:
                    return
                *lines, self._rest = (self._rest + text).split(b"\n")
                for line in lines:
                    if (found := _LINE.search(line.decode(errors="replace"))) is not None:
                        domain, bus, device = (int(part, 16) for part in found.groups()[:3])
                        yield (domain, bus, device), int(found[4])
