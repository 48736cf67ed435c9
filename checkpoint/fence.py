"""Which attempt of the job owns a checkpoint directory: one that was replaced cannot commit any more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from .errors import CheckpointFenced
from .places import Where, storage_at
from .storage import Disk, Storage

FENCE_FILE = ".fence.json"


class Token(NamedTuple):
    """An attempt; the greater one is the newer: first the start of the run (wall ns), then the attempt's number within it."""

    started: int
    generation: int


def own_token(environ: Mapping[str, str] = os.environ) -> tuple[Token, bool]:
    """This attempt's token, and whether a launcher gave it; under plain torchrun it is made from the clock and the restart count."""
    token = Token(
        int(environ.get("GOODRUN_RUN_STARTED") or time.time_ns()),
        int(environ.get("GOODRUN_GENERATION") or environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
    )
    return token, "GOODRUN_RUN_STARTED" in environ


class Fence:
    """The mark on a directory that names its owner."""

    def __init__(self, directory: Where, token: Token, *, given: bool = True, disk: Disk | None = None) -> None:
        """Nothing is written yet."""
        self._file = directory / FENCE_FILE
        self._given = given
        self._disk = disk
        self.token = token

    @cached_property
    def _storage(self) -> Storage[Any]:
        return storage_at(self._file.parent, self._disk)

    def _owner(self) -> Token | None:
        try:
            found = json.loads(self._storage.read(self._file))
            return Token(int(found["started"]), int(found["generation"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # a fence nobody can read stops nobody

    def claim(self) -> Token:
        """Take the directory, if it is there yet, and return the token to go by; CheckpointFenced where a newer attempt has it."""
        owner = self._owner()
        # Under plain torchrun clocks of two hosts are all there is to go by; who claims later is the newer one. So it is where a run begins
        # and finds an owner that has begun in its future: one of two clocks was wrong.
        in_future = owner is not None and self.token.generation == 0 and owner.started > time.time_ns()
        if owner is not None and owner >= self.token and (not self._given or in_future):
            self.token = Token(owner.started + 1, self.token.generation)
        self._given = True
        if self._storage.exists(self._file.parent):  # nothing is written for a mere look at a directory that is not there yet
            self.check()
        return self.token

    def check(self) -> None:
        """Raise CheckpointFenced if a newer attempt has taken the directory; put our mark back if an older one overwrote it."""
        owner = self._owner()
        if owner is not None and owner > self.token:
            raise CheckpointFenced(fenced(self._file.parent, owner, self.token))
        if owner != self.token:
            self._storage.make_directory(self._file.parent)
            self._storage.replace(self._file, json.dumps(self.token._asdict()).encode())


def fenced(directory: Where, owner: Token, mine: Token) -> str:
    """The sentence for an attempt that was replaced."""
    return (
        f"{directory} belongs to a newer attempt of the job (attempt {owner.generation}, this is {mine.generation}): "
        f"this one was replaced and must end; if that attempt is gone for good, delete {directory / FENCE_FILE}"
    )
