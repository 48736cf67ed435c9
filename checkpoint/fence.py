"""Which attempt of the job owns a checkpoint directory: one that was replaced cannot commit any more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .errors import CheckpointFenced
from .manifest import write_durably

FENCE_FILE = ".fence.json"


class Token(NamedTuple):
    """An attempt; the greater one is the newer: first the start of the run (wall ns), then the attempt's number within it."""

    started: int
    generation: int


class Fence:
    """The mark on a directory that names its owner; only rank 0 uses it."""

    def __init__(self, directory: Path, environ: Mapping[str, str] = os.environ) -> None:
        """The token is goodrun's where it started this process; under plain torchrun it is made from the clock and the restart count."""
        self._file = directory / FENCE_FILE
        self._given = "GOODRUN_RUN_STARTED" in environ
        self.token = Token(
            int(environ.get("GOODRUN_RUN_STARTED") or time.time_ns()),
            int(environ.get("GOODRUN_GENERATION") or environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        )
        self._claimed = False

    def _owner(self) -> Token | None:
        try:
            found = json.loads(self._file.read_text())
            return Token(int(found["started"]), int(found["generation"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # a fence nobody can read stops nobody

    def claim(self) -> None:
        """Take the directory, or raise CheckpointFenced where a newer attempt has it."""
        if self._claimed:
            self.check()
            return
        owner = self._owner()
        if not self._given and owner is not None and owner >= self.token:
            # Under plain torchrun clocks of two hosts are all there is to go by; who claims later is the newer one.
            self.token = Token(owner.started + 1, self.token.generation)
        self._claimed = True
        self.check()

    def check(self) -> None:
        """Raise CheckpointFenced if a newer attempt has taken the directory; put our mark back if an older one overwrote it."""
        owner = self._owner()
        if owner is not None and owner > self.token:
            raise CheckpointFenced(
                f"{self._file.parent} belongs to a newer attempt of the job (attempt {owner.generation}, this is {self.token.generation}): "
                f"this one was replaced and must end; if that attempt is gone for good, delete {self._file}"
            )
        if owner != self.token:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._file, json.dumps(self.token._asdict()).encode())
