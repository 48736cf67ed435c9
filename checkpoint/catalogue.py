"""What lies in a checkpoint directory: which names are ours, which checkpoints there are, which may go."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointDamaged, NotACheckpointDirectory
from .manifest import MANIFEST_FILE, Manifest, read_manifest, sync_directory

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


def fresh_name(step: int, generation: int) -> str:
    """A name that was never used: no save ever writes into the directory of another."""
    return f"step-{step:010d}.g{generation}-{secrets.token_hex(3)}"


def found_in(directory: Path) -> list[Found]:
    """Everything here that bears the name of a checkpoint, newest first. Files are not verified yet."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) is None or not path.is_dir():
            continue
        step = int(match[1])
        try:
            manifest = read_manifest(path)
            if manifest.step != step:
                raise CheckpointDamaged(f"its manifest is that of step {manifest.step}")
            found.append(Found(path, step, manifest, None))
        except CheckpointDamaged as e:
            found.append(Found(path, step, None, str(e)))
    return sorted(found, key=lambda f: f.age, reverse=True)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its commit mark first: one that is half deleted no longer counts as one."""
    if (mark := checkpoint / MANIFEST_FILE).exists():
        mark.unlink()
        sync_directory(checkpoint)
    shutil.rmtree(checkpoint)


def prune(directory: Path, keep: int, just_committed: Path) -> None:
    """Delete what is not needed after a commit: leftovers that can no longer be committed, and all but the `keep` newest."""
    found = found_in(directory)
    whole = [f.path for f in found if (f.path / MANIFEST_FILE).exists()]
    for leftover in (f.path for f in found if f.path not in whole):
        remove(leftover)
    # The one just written stays even where a run that began anew left higher steps behind.
    for old in (p for p in whole[keep:] if p != just_committed):
        remove(old)
