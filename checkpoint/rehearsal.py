"""What is different while a job is only rehearsed: its checkpoints lie elsewhere, and the samples that it trained on are written down."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from .places import Where, located
from .url import Url

REHEARSAL_VARIABLE = "GOODRUN_REHEARSAL"
"""The folder of the rehearsal, where there is one."""
CHECKPOINTS, SAMPLES = "checkpoints", "samples"


def placed(directory: str | os.PathLike[str] | Url) -> Where:
    """Where checkpoints meant for `directory` go: in a rehearsal below its folder, so that the job's own are neither read nor touched."""
    place, folder = located(directory), os.environ.get(REHEARSAL_VARIABLE)
    if folder is None:
        return place
    parts = place.absolute().parts[1:] if isinstance(place, Path) else tuple(p for p in re.split(r"[:/]+", str(place)) if p)
    return Path(folder, CHECKPOINTS, *parts)


class SampleLog:
    """A file for each rank of each attempt; a line for each batch that was trained on: epoch, position, samples."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Begin the file of this rank."""
        started, attempt = (int(os.environ.get(f"GOODRUN_{name}", "0")) for name in ("RUN_STARTED", "GENERATION"))
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{started:020d}.{attempt:06d}.{rank}"
        self._fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    @classmethod
    def of_process(cls, rank: int) -> SampleLog | None:
        """The log of this process, if it rehearses."""
        folder = os.environ.get(REHEARSAL_VARIABLE)
        return None if folder is None else cls(Path(folder, SAMPLES), rank)

    def trained(self, epoch: int, position: int, samples: Sequence[int]) -> None:
        """One batch was trained on; what is written is there even if this process dies next."""
        os.write(self._fd, (" ".join(map(str, (epoch, position, *samples))) + "\n").encode())
