"""goodrun: `goodrun train.py` in place of `torchrun train.py`, and the job survives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .progress import heartbeat

if TYPE_CHECKING:
    from .checkpoint import ObjectStoreReader, ObjectStoreWriter, UCVolumeReader, UCVolumeWriter

__all__ = ["ObjectStoreReader", "ObjectStoreWriter", "UCVolumeReader", "UCVolumeWriter", "__version__", "heartbeat"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """What needs torch is imported when it is asked for."""
    if name in __all__:
        from . import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
