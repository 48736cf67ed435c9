"""What memory has to say of a rank that something killed: Linux leaves nothing but SIGKILL behind."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_GIB = 2**30
_CGROUPS = Path("/sys/fs/cgroup")


def resident(pid: int) -> int:
    """Bytes that a process holds in memory; 0 if it is gone."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def own_group() -> Path:
    """The directory of this process's control group (version 2)."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return _CGROUPS / line[3:].lstrip("/")
    return _CGROUPS


def limit(group: Path) -> int:
    """Bytes that the ranks may use together: the tightest limit of the control groups above them, or what the machine has."""
    found = [os.sysconf("SC_PHYS_PAGES") * _PAGE]
    while group.is_relative_to(_CGROUPS):
        with suppress(OSError, ValueError):
            found.append(int((group / "memory.max").read_text()))
        group = group.parent
    return min(found)


def oom_kills(group: Path) -> int:
    """How many processes of the control group the kernel has killed for want of memory so far."""
    with suppress(OSError, ValueError):
        pairs = (line.split() for line in (group / "memory.events").read_text().splitlines())
        return next((int(n) for name, n in pairs if name == "oom_kill"), 0)
    return 0


def verdict(held: int, most: int, killed_for_memory: bool) -> str:
    """What to add to `killed by SIGKILL`: `held` bytes were its last known size, `most` what there was."""
    size = f"it last held {held / _GIB:.1f} of {most / _GIB:.1f} GiB"
    return f"by the kernel, out of memory: {size}" if killed_for_memory else f"nobody here sent it; out of memory? {size}"
