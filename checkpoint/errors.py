"""What can go wrong with a checkpoint, each kind with whose fault it is."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint could not be written or read; raised as itself when storage (full disk, lost peer) is to blame."""


class CheckpointDamaged(CheckpointError):
    """The bytes on storage are not those that were committed, and no older checkpoint is whole: the storage's fault."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is whole but does not fit what the script gave: the script, its model or its data changed."""


class CheckpointFenced(CheckpointError):
    """A newer attempt of the job owns the directory: nobody's fault, this attempt was replaced and must end."""


class NotACheckpointDirectory(CheckpointError):
    """The directory given cannot be one of ours (someone else's files, a file, not writable): the caller's fault."""


class SnapshotKept(CheckpointError):
    """Storage across the network did not take a snapshot, which is kept on this node's disk: nobody's fault here, and to be uploaded."""


class StorageUnreachable(CheckpointError):
    """Storage across the network does not answer, so nothing is known of what is there; nobody's fault here, and worth another try."""


class StorageTrouble(OSError):
    """Storage across the network did not do what it was asked to. `strerror` holds no secret."""
