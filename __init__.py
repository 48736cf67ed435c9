"""goodrun: `goodrun train.py` in place of `torchrun train.py`, and the job survives."""

from .progress import heartbeat

__all__ = ["__version__", "heartbeat"]
__version__ = "0.1.0"
