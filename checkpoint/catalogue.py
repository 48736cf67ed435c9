"""What lies in a checkpoint directory: which names are ours, which checkpoints there are, which may go."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .distrust import marked
from .errors import CheckpointDamaged, NotACheckpointDirectory
from .fence import Token
from .manifest import MANIFEST_FILE, Manifest, read_manifest
from .retention import Dated, Keep, superfluous
from .storage import Disk

_NAME = re.compile(r"step-(\d{10,})\.g(\d+)-([0-9a-f]{6})")


@dataclass(frozen=True)
class Found:
    """A directory that bears the name of a checkpoint: with its manifest, or with the reason why it has none that counts."""

    path: Path
    step: int
    manifest: Manifest | None
    fault: str | None

    @property
    def age(self) -> tuple[int, int, int]:
        """The greater, the newer: by step as a number; of one step the one that the later attempt wrote."""
        return (self.step, self.manifest.started, self.manifest.generation) if self.manifest else (self.step, 0, 0)


def check_directory(directory: Path) -> None:
    """Raise NotACheckpointDirectory unless the path is ours to use: absent, or holding nothing but checkpoints. Writes nothing."""
    there = next(p for p in (directory, *directory.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        raise NotACheckpointDirectory(f"the checkpoint directory {directory} cannot be made: {there} is not a directory; name another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise NotACheckpointDirectory(f"the checkpoint directory {directory} cannot be used: {there} is not writable; name another one")
    if there != directory:
        return
    for entry in sorted(directory.iterdir()):
        if entry.name == "lost+found":  # the root of a file system of its own
            continue
        if not entry.name.startswith((".", "step-")) or (entry.name.startswith("step-") and not entry.is_dir()):
            raise NotACheckpointDirectory(
                f"{directory} holds files that are not goodrun's ({entry.name}): name an empty or new directory for checkpoints"
            )


def fresh_name(step: int, token: Token, number: int) -> str:
    """A name that was never used, the same on all nodes: no save ever writes into the directory of another."""
    unique = hashlib.sha256(f"{token.started}.{token.generation}.{number}".encode()).hexdigest()[:6]
    return f"step-{step:010d}.g{token.generation}-{unique}"


def found_in(directory: Path) -> list[Found]:
    """Everything here that bears the name of a checkpoint, newest first. Files are not verified yet."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = [found_at(path) for path in paths if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda f: f.age, reverse=True)


def found_at(path: Path) -> Found:
    """The checkpoint at this path, whatever its name; without a manifest if there is none that counts."""
    match = _NAME.fullmatch(path.name)
    step = int(match[1]) if match else 0
    try:
        if (why := marked(path)) is not None:
            raise CheckpointDamaged(f"it is not trusted: {why}")
        manifest = read_manifest(path)
        if match is not None and manifest.step != step:
            raise CheckpointDamaged(f"its manifest is that of step {manifest.step}")
        return Found(path, manifest.step, manifest, None)
    except CheckpointDamaged as e:
        return Found(path, step, None, str(e))


def remove(checkpoint: Path, disk: Disk) -> None:
    """Delete a checkpoint, its commit mark first: one that is half deleted no longer counts as one."""
    disk.remove_tree(checkpoint, MANIFEST_FILE)


def prune(directory: Path, keep: Keep, just_committed: Path, disk: Disk, *, others_write: bool = False) -> list[Path]:
    """Delete what is not needed after a commit and say what: leftovers that can no longer be committed, and what the rule lets go.

    With `others_write`, a directory of a later step may be one that another node has begun, and stays.
    """
    found = found_in(directory)
    # One whose manifest is damaged may be all that is left of something: it goes with its age, as if it were whole.
    marked = [f for f in found if f.manifest is not None or (f.path / MANIFEST_FILE).exists()]
    step = next((f.step for f in found if f.path == just_committed), 0)
    going = [f.path for f in found if f not in marked and not (others_write and f.step > step)]
    dated = [Dated(f.path.name, f.step, f.manifest.committed if f.manifest else 0.0) for f in marked]
    goes = set(superfluous(dated, keep))
    # The one just written stays even where a run that began anew left higher steps behind.
    going += [f.path for f in marked if f.path.name in goes and f.path != just_committed]
    for path in going:
        remove(path, disk)
    return going
