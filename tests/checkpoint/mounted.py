"""What stands for a mounted volume in the tests: a storage that refuses what such mounts refuse.

Every system call of a save goes by `call`, and the descriptors that are open are looked at in the kernel's own words: flags and offsets.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from goodrun.checkpoint.mount import Mount

T = TypeVar("T")
_REFUSED = {"rename": errno.EOPNOTSUPP, "fsyncdir": errno.EINVAL, "opendir": errno.EOPNOTSUPP}
_FLAGS = os.O_DIRECT | os.O_APPEND | os.O_RDWR


class Refusing(Mount):
    """No rename, no sync of directories, no append, no writing around the cache, no write but at the end of what is there."""

    def __init__(self) -> None:
        """Nothing has been asked yet."""
        super().__init__()
        self.calls: list[str] = []

    def call(self, verb: str, path: Path, act: Callable[[], T]) -> T:
        """Refuse, or do it and look at what was done."""
        self.calls.append(verb)
        if verb in _REFUSED:
            raise OSError(_REFUSED[verb], os.strerror(_REFUSED[verb]), str(path))
        if verb == "open" and path.exists():
            raise OSError(errno.EPERM, "a file that is there cannot be opened for writing", str(path))
        before = path.stat().st_size if verb == "write" else 0
        done = act()
        if verb == "open":
            fd = done if isinstance(done, int) else -1
            flags = int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)
            assert not flags & _FLAGS, f"{path.name} was opened with flags {flags:o}"
        if verb == "write":
            assert path.stat().st_size == before + (done if isinstance(done, int) else 0), f"{path.name} was not written at its end"
        return done
