"""A keeper on a storage that fails at one call, or at which somebody dies: `faulty_keeper.py FAULT AT HOW FOLDER NAME --parent FD`.

Calls are counted from the moment FOLDER/armed exists; FOLDER/fired says that the fault came to pass, and at which call; FOLDER/hole, that
a save has touched the file system past the seam. TEST_PARTS in the environment names the kind of store that gets its files in parts of
64 KiB.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from goodrun.checkpoint.keeper import main
from goodrun.checkpoint.storage import Disk

T = TypeVar("T")
PART_BYTES = 64 << 10
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


class FaultyDisk(Disk):
    """Does harm at the call number `at`.

    `fault` is an errno's name, for this call alone or from it on (`how`: once, on); KILL, of the keeper itself before or after the call;
    KILL:NAMES, of the processes whose ids are in the files FOLDER/NAMES; or RUN, the command that is in FOLDER/run.
    """

    width = 1  # the same calls in the same order each time: every one of them is tried

    def __init__(self, fault: str, at: int, how: str, folder: Path) -> None:
        """Nothing is counted before it is armed."""
        self.fault, self.at, self.how, self.folder, self.count = fault, at, how, folder, 0
        self._inside = False
        sys.addaudithook(self._audit)

    def call(self, verb: str, path: Path, act: Callable[[], T]) -> T:
        """Count, and fail when it is time."""
        self._inside = True
        try:
            return self._call(verb, path, act)
        finally:
            self._inside = False

    def _call(self, verb: str, path: Path, act: Callable[[], T]) -> T:
        if not (self.folder / "armed").exists():
            return act()
        self.count += 1
        if self.count == self.at or (self.how == "on" and self.count > self.at):
            (self.folder / "fired").write_text(f"{self.count} {verb} {path.name}")
            self._harm(path, act)
        return act()

    def _harm(self, path: Path, act: Callable[[], T]) -> None:
        kind, _, whom = self.fault.partition(":")
        if kind == "RUN":
            subprocess.run(json.loads((self.folder / "run").read_text()), check=False)
        elif whom:
            for found in self.folder.glob(whom):
                os.kill(int(found.read_text()), signal.SIGKILL)
        elif kind == "KILL":
            try:
                if self.how == "after":
                    act()  # a mount may have a fault of its own here
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number), str(path))

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Python says of every file that is opened or changed; all of them have to have come by `call`."""
        if event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            path = str(args[0])
            if "step-" in path and not self._inside:
                with open(self.folder / "hole", "a") as f:
                    f.write(f"{event} {path}\n")


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
