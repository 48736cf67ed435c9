"""Saving and restoring of training state at any world size, and the data order that survives a change of it."""

from .checkpointer import Checkpointer
from .dicts import DictCheckpoints
from .errors import CheckpointDamaged, CheckpointError, CheckpointFenced, CheckpointMismatch, NotACheckpointDirectory
from .pending import PendingSave
from .sampler import ElasticSampler

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointFenced",
    "CheckpointMismatch",
    "Checkpointer",
    "DictCheckpoints",
    "ElasticSampler",
    "NotACheckpointDirectory",
    "PendingSave",
]
