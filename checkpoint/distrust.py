"""Checkpoints that are complete and not to be restored from: taken after the numbers had gone bad, or on a device whose memory had.

The launcher says which, in the environment of the ranks; the first rank to restore writes that into them, so that later runs know it, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import StorageTrouble, StorageUnreachable
from .places import Where, storage_at

DISTRUST_VARIABLE = "GOODRUN_DISTRUST"
"""A JSON list of [step, started, generation, why]."""
MARK_FILE = "distrusted.json"


@dataclass(frozen=True)
class Distrust:
    """Of the attempts up to one, checkpoints beyond a step are not trusted."""

    beyond: int
    started: int
    generation: int
    why: str

    def covers(self, step: int, started: int, generation: int) -> bool:
        """Whether it is about a checkpoint of this step, written by this attempt."""
        return step > self.beyond and (started, generation) <= (self.started, self.generation)


def distrusts() -> tuple[Distrust, ...]:
    """What the launcher has told this process."""
    return read(os.environ.get(DISTRUST_VARIABLE, "[]"))


def read(value: str) -> tuple[Distrust, ...]:
    """What `to_env` made of them."""
    return tuple(Distrust(*fields) for fields in json.loads(value))


def to_env(distrusted: Sequence[Distrust]) -> str:
    """The value of the variable."""
    return json.dumps([[d.beyond, d.started, d.generation, d.why] for d in distrusted])


def mark(checkpoint: Where, why: str) -> None:
    """Write into a checkpoint that it is not to be restored from."""
    storage_at(checkpoint).replace(checkpoint / MARK_FILE, json.dumps({"why": why}).encode())


def distrusted(checkpoint: Where) -> str | None:
    """Why a checkpoint is not to be restored from; None if it may be."""
    try:
        return str(json.loads(storage_at(checkpoint).read(checkpoint / MARK_FILE))["why"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except StorageTrouble as e:
        raise StorageUnreachable(f"{checkpoint} cannot be read: {e.strerror}") from None
    except (OSError, ValueError, KeyError, TypeError):
        return "for a reason that cannot be read"
