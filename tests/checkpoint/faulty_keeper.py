"""A keeper on a storage that fails, or that dies with it, at one call: `faulty_keeper.py FAULT AT HOW FOLDER NAME --parent FD`.

Calls are counted from the moment FOLDER/armed exists; FOLDER/fired says that the fault came to pass, and at which call. TEST_PARTS in
the environment names the kind of store that gets its files in parts of 64 KiB.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from goodrun.checkpoint.keeper import main
from goodrun.checkpoint.storage import Disk

T = TypeVar("T")
PART_BYTES = 64 << 10


class FaultyDisk(Disk):
    """Refuses the call number `at`, once or from then on; or kills its own process before or after it."""

    def __init__(self, fault: str, at: int, how: str, folder: Path) -> None:
        """`fault` is an errno's name or KILL; `how` is once, on, before or after."""
        self.fault, self.at, self.how, self.folder, self.count = fault, at, how, folder, 0

    def call(self, verb: str, path: Path, act: Callable[[], T]) -> T:
        """Count, and fail when it is time."""
        if not (self.folder / "armed").exists():
            return act()
        self.count += 1
        hit = self.count == self.at or (self.how == "on" and self.count > self.at)
        if not hit:
            return act()
        (self.folder / "fired").write_text(f"{self.count} {verb} {path.name}")
        if self.fault == "KILL":
            if self.how == "after":
                act()
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self.fault)
        raise OSError(number, os.strerror(number), str(path))


def in_small_parts(kind: str) -> None:
    """Its client puts parts from this size on."""
    if kind == "s3":
        from goodrun.checkpoint.remote.s3 import S3

        S3.part_bytes = PART_BYTES
    elif kind == "volume":
        from databricks.sdk.config import Config

        Config.files_ext_multipart_upload_min_stream_size = PART_BYTES
        Config.files_ext_multipart_upload_default_part_size = PART_BYTES
        Config.files_ext_multipart_upload_part_size_options = [PART_BYTES]


if __name__ == "__main__":
    in_small_parts(os.environ.get("TEST_PARTS", ""))
    fault, at, how, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    del sys.argv[1:5]
    main(FaultyDisk(fault, at, how, folder))
