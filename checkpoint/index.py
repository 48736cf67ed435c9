"""The index of a checkpoint as JSON: for every tensor its parts, and where in which file the bytes of each are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from .boxes import Box
from .errors import CheckpointDamaged


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: item `item` of `file`, whose `nbytes` bytes begin at `at`."""

    box: Box
    file: str
    item: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint; `dtype` is torch's name for it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """All tensors by their dotted names, and the items of every shard file as (where, how many bytes)."""

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, tuple[tuple[int, int], ...]]

    def to_bytes(self) -> bytes:
        """The file's content."""
        tensors = {
            name: [t.dtype, t.shape, [[c.file, c.item, c.box.offset, c.box.size] for c in t.chunks]] for name, t in self.tensors.items()
        }
        return json.dumps({"tensors": tensors, "files": self.files}, separators=(",", ":")).encode()


def read_index(content: bytes) -> Index:
    """The index from its file's content."""
    try:
        whole = json.loads(content)
        files = {name: tuple((int(at), int(n)) for at, n in items) for name, items in whole["files"].items()}
        tensors = {}
        for name, (dtype, shape, chunks) in whole["tensors"].items():
            found = tuple(
                Chunk(Box(tuple(offset), tuple(size)), file, item, *files[file][item]) for file, item, offset, size in chunks
            )
            tensors[name] = TensorEntry(dtype, tuple(shape), found)
        return Index(tensors, files)
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise CheckpointDamaged(f"the index cannot be read ({type(e).__name__}: {e})") from None
