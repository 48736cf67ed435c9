"""Reads a record that is still being written: what is there, then what comes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..events import Event
from ..journal import FILE_NAME, parse_line, read_thinned

_OLD_PROGRESS_LINES = 6_000  # a record of months opens in a moment; what is added later is read in full


class Follower:
    """One reader of one record. It only reads: the run that is watched never waits for it."""

    def __init__(self, run_dir: Path) -> None:
        """Raises OSError if the record cannot be read."""
        self._path = run_dir / FILE_NAME
        self._run_dir = run_dir
        self._offset = _whole_lines(self._path)

    def so_far(self) -> Iterator[Event]:
        """Everything that was there when the follower was made."""
        return read_thinned(self._run_dir, _OLD_PROGRESS_LINES, upto=self._offset)

    def news(self) -> list[Event]:
        """What has been added since; a line that is still being written comes next time."""
        with open(self._path, "rb") as f:
            f.seek(self._offset)
            added = f.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [e for line in whole.splitlines() if (e := parse_line(line)) is not None]


def _whole_lines(path: Path) -> int:
    """How many bytes the complete lines of a file take."""
    with open(path, "rb") as f:
        end = f.seek(0, os.SEEK_END)
        while end:
            begin = max(end - 65536, 0)
            f.seek(begin)
            cut = f.read(end - begin).rfind(b"\n")
            if cut >= 0:
                return begin + cut + 1
            end = begin
    return 0
