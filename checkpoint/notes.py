"""The notes by which nodes tell each other, in the directory that they share, what they have written of a checkpoint; and its uniting."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import CheckpointDamaged
from .manifest import MANIFEST_FILE, read_manifest
from .places import Where
from .storage import Storage
from .vouching import Word, read_word, vouched

_NOTE = ".node-"
HEAD_FILE = ".head.json"
"""A manifest that names the files of rank 0's node alone: what is kept of a checkpoint whose other nodes' files are elsewhere."""


@dataclass
class Written:
    """Files of a checkpoint with bytes and crc32, and the crc32 of the tensors in each shard; `ranks` are those whose files these are."""

    ranks: set[int] = field(default_factory=set)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    items: dict[str, tuple[int, ...]] = field(default_factory=dict)
    words: set[Word] = field(default_factory=set)
    """What the ranks say of their numbers."""

    def to_bytes(self) -> bytes:
        """The note."""
        return json.dumps([sorted(self.ranks), self.files, self.items, list(self.words)]).encode()

    def add(self, note: bytes) -> None:
        """Take in what another node has written."""
        ranks, files, items, *words = json.loads(note)
        self.ranks |= set(ranks)
        self.files.update({name: (size, crc) for name, (size, crc) in files.items()})
        self.items.update({name: tuple(sums) for name, sums in items.items()})
        self.words |= {read_word(word) for said in words for word in said}


def note_file(ranks: Iterable[int]) -> str:
    """The name of the note on these ranks."""
    return f"{_NOTE}{min(ranks)}.json"


def notes_among(names: Iterable[str]) -> list[str]:
    """Those of the names in a directory that are notes."""
    return sorted(name for name in names if name.startswith(_NOTE))


def heard(checkpoint: Where, storage: Storage[Any]) -> Written:
    """What all nodes have written, as far as their notes are there."""
    found = Written()
    for name in notes_among(storage.entries(checkpoint)):
        found.add(storage.read(checkpoint / name))
    return found


def united(checkpoint: Where, storage: Storage[Any]) -> list[int]:
    """Commit a checkpoint whose parts were brought one by one, if all are there; the ranks whose parts are missing."""
    parts = heard(checkpoint, storage)
    try:
        head = read_manifest(checkpoint, HEAD_FILE)
    except CheckpointDamaged:
        return [0]
    missing = sorted(set(range(head.world_size)) - parts.ranks)
    if not missing:
        whole = replace(head, files={**head.files, **parts.files}, items={**head.items, **parts.items}, vouched=vouched(parts.words))
        storage.replace(checkpoint / MANIFEST_FILE, whole.to_bytes())
    return missing
