"""Saving and restoring of training state at any world size, and the data order that survives a change of it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpointer import Checkpointer
    from .dcp_storage import ObjectStoreReader, ObjectStoreWriter, UCVolumeReader, UCVolumeWriter
    from .dicts import DictCheckpoints
    from .errors import (
        CheckpointDamaged,
        CheckpointError,
        CheckpointFenced,
        CheckpointMismatch,
        NotACheckpointDirectory,
        SnapshotKept,
        StorageUnreachable,
    )
    from .pending import PendingSave
    from .retention import Keep
    from .sampler import ElasticSampler

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointFenced",
    "CheckpointMismatch",
    "Checkpointer",
    "DictCheckpoints",
    "ElasticSampler",
    "Keep",
    "NotACheckpointDirectory",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "PendingSave",
    "SnapshotKept",
    "StorageUnreachable",
    "UCVolumeReader",
    "UCVolumeWriter",
]

# Imported when they are asked for: the keeper and the command line live without torch.
_HOME = {
    "Checkpointer": "checkpointer",
    "DictCheckpoints": "dicts",
    "ElasticSampler": "sampler",
    "Keep": "retention",
    "ObjectStoreReader": "dcp_storage",
    "ObjectStoreWriter": "dcp_storage",
    "PendingSave": "pending",
    "UCVolumeReader": "dcp_storage",
    "UCVolumeWriter": "dcp_storage",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
