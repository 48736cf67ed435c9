"""A keeper on a storage that fails as the chaos plan says; started in place of the ordinary one where the plan has faults of storage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .. import progress
from ..checkpoint import keeper
from ..checkpoint.storage import Disk
from ..fault_injection.storage_faults import StorageFaults, armed

T = TypeVar("T")


class FaultyDisk(Disk):
    """Lets every call of a save go by the faults that wait for it."""

    def __init__(self, faults: StorageFaults) -> None:
        """Nothing is hurt yet."""
        self._faults = faults

    def call(self, verb: str, path: Path, act: Callable[[], T]) -> T:
        """Do it, or what the plan makes of it."""
        return self._faults.call(verb, path, act)


def main() -> None:
    """As the ordinary keeper's, with the same arguments."""
    page = progress.attach(int(os.environ.pop(progress.PAGE_FD_VARIABLE)))
    keeper.main(FaultyDisk(armed(os.environ, page)))
