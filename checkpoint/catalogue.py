"""What lies in a checkpoint directory: which names are ours, which checkpoints there are, which may go."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .distrust import distrusted
from .errors import CheckpointDamaged, NotACheckpointDirectory, StorageTrouble, StorageUnreachable
from .fence import Token
from .manifest import MANIFEST_FILE, Manifest, read_manifest
from .places import Where, storage_at
from .retention import Dated, Keep, superfluous
from .storage import Storage

_NAME = re.compile(r"step-(\d{10,})\.g(\d+)-([0-9a-f]{6})")
_AHEAD = 4
"""By how many snapshots one node can be ahead of another: fewer than this."""


@dataclass(frozen=True)
class Found:
    """A directory that bears the name of a checkpoint: with its manifest, or with the reason why it has none that counts.

    The manifest is read when somebody asks for it: of thousands of checkpoints only the newest few are of interest.
    """

    path: Where
    step: int

    @cached_property
    def distrusted(self) -> str | None:
        """Why it is not to be restored from, whole as it may be."""
        return distrusted(self.path)

    @cached_property
    def _read(self) -> Manifest | str:
        if self.distrusted is not None:
            return f"it is not trusted: {self.distrusted}"
        try:
            manifest = read_manifest(self.path)
        except CheckpointDamaged as e:
            return str(e)
        if _NAME.fullmatch(self.path.name) and manifest.step != self.step:
            return f"its manifest is that of step {manifest.step}"
        return manifest

    @property
    def manifest(self) -> Manifest | None:
        """The commit mark; None where there is none that counts."""
        return None if isinstance(self._read, str) else self._read

    @property
    def fault(self) -> str | None:
        """Why there is none."""
        return self._read if isinstance(self._read, str) else None

    @property
    def marked(self) -> bool:
        """Whether it was committed once, whatever has become of it."""
        return self.manifest is not None or storage_at(self.path).exists(self.path / MANIFEST_FILE)

    @property
    def age(self) -> tuple[int, int, int]:
        """The greater, the newer: by step as a number; of one step the one that the later attempt wrote."""
        return (self.step, self.manifest.started, self.manifest.generation) if self.manifest else (self.step, 0, 0)


def check_directory(directory: Where) -> None:
    """Raise NotACheckpointDirectory unless the path is ours to use: absent, or holding nothing but checkpoints. Writes nothing.

    StorageUnreachable where that cannot be told.
    """
    if isinstance(directory, Path) and not _usable(directory):
        return
    try:
        entries = storage_at(directory).entries(directory)
    except StorageTrouble as e:
        raise StorageUnreachable(f"{directory} cannot be looked at: {e.strerror}") from None
    except OSError as e:
        raise NotACheckpointDirectory(f"{directory} cannot be looked at: {e.strerror}") from None
    for name, size in sorted(entries.items()):
        if name == "lost+found":  # the root of a file system of its own
            continue
        if not name.startswith((".", "step-")) or (name.startswith("step-") and size is not None):
            raise NotACheckpointDirectory(
                f"{directory} holds files that are not goodrun's ({name}): name an empty or new directory for checkpoints"
            )


def _usable(directory: Path) -> bool:
    """Whether it is there; raises NotACheckpointDirectory where it can neither be used nor made."""
    there = next(p for p in (directory, *directory.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        raise NotACheckpointDirectory(f"the checkpoint directory {directory} cannot be made: {there} is not a directory; name another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise NotACheckpointDirectory(f"the checkpoint directory {directory} cannot be used: {there} is not writable; name another one")
    return there == directory


def fresh_name(step: int, token: Token, number: int, by: Token | None = None) -> str:
    """A name that was never used, the same on all nodes: no save ever writes into the directory of another.

    `by` is a later attempt that writes anew what this one left in memory.
    """
    again = "" if by is None else f".{by.started}.{by.generation}"
    unique = hashlib.sha256(f"{token.started}.{token.generation}.{number}{again}".encode()).hexdigest()[:6]
    return f"step-{step:010d}.g{(by or token).generation}-{unique}"


def names_from(step: int, token: Token, number: int, names: Iterable[str]) -> list[str]:
    """Those of the names that an attempt gives to its snapshot `number`, that of `step`, and to the few after it."""
    found = [m for m in map(_NAME.fullmatch, names) if m is not None and int(m[1]) >= step]
    return [m[0] for m in found if any(m[0] == fresh_name(int(m[1]), token, number + n) for n in range(_AHEAD))]


def found_in(directory: Where) -> list[Found]:
    """Everything here that bears the name of a checkpoint, newest first. Files are not verified yet."""
    entries = storage_at(directory).entries(directory)
    found = [found_at(directory / name) for name, size in entries.items() if size is None and _NAME.fullmatch(name)]
    steps = Counter(f.step for f in found)
    return sorted(found, key=lambda f: f.age if steps[f.step] > 1 else (f.step, 0, 0), reverse=True)


def found_at(path: Where) -> Found:
    """The checkpoint at this path, whatever its name; without a manifest if there is none that counts."""
    match = _NAME.fullmatch(path.name)
    if match is not None:
        return Found(path, int(match[1]))
    found = Found(path, 0)
    return replace(found, step=found.manifest.step) if found.manifest is not None else found


def remove(checkpoint: Where, storage: Storage[Any]) -> None:
    """Delete a checkpoint, its commit mark first: one that is half deleted no longer counts as one."""
    storage.remove_tree(checkpoint, MANIFEST_FILE)


def prune(
    directory: Where,
    keep: Keep,
    just_committed: Where,
    storage: Storage[Any],
    *,
    known: dict[str, Found] | None = None,
    others_write: bool = False,
) -> list[Where]:
    """Delete what is not needed after a commit and say what: leftovers that can no longer be committed, and what the rule lets go.

    With `others_write`, a directory of a later step may be one that another node has begun, and stays. What was looked at is kept in
    `known`, for a commit mark never changes.
    """
    known = {} if known is None else known
    found = [known.get(f.path.name, f) for f in found_in(directory)]
    # One whose manifest is damaged may be all that is left of something: like one that is not trusted it goes with its age.
    marked = [f for f in found if f.marked]
    step = next((f.step for f in found if f.path == just_committed), 0)
    going = [f.path for f in found if f not in marked and not (others_write and f.step > step)]
    dated = [Dated(f.path.name, f.step, f.manifest.committed if f.manifest else 0.0, f.manifest is not None) for f in marked]
    goes = set(superfluous(dated, keep, _vouched(marked, just_committed)))
    # The one just written stays even where a run that began anew left higher steps behind.
    going += [f.path for f in marked if f.path.name in goes and f.path != just_committed]
    for path in going:
        remove(path, storage)
    known.clear()
    known.update({f.path.name: f for f in marked if f.path not in going})
    return going


def _vouched(found: list[Found], just_committed: Where) -> int | None:
    """Up to which step the numbers are known to be good: by the checkpoint just written, or the others where it cannot say."""
    said = {f.path: f.manifest.vouched for f in found if f.manifest is not None and f.manifest.vouched is not None}
    return said.get(just_committed, max(said.values(), default=None))
