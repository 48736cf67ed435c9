"""The checkpoint layer as the cases in shared/cases drive it (CKPT_ADAPTER=goodrun_ckpt)."""

from __future__ import annotations

from typing import Any

from goodrun.checkpoint import DictCheckpoints, PendingSave


class Ckpt:
    """A nested dict, saved and resumed."""

    def __init__(self, root: str) -> None:
        """All ranks construct it."""
        self._checkpoints = DictCheckpoints(root)

    def save(self, state: dict[str, Any], step: int) -> None:
        """Save and wait."""
        self._checkpoints.save(state, step).result()

    def save_async(self, state: dict[str, Any], step: int) -> PendingSave:
        """Save in the background."""
        return self._checkpoints.save(state, step)

    def resume(self, state: dict[str, Any]) -> int | None:
        """Load the newest usable checkpoint into `state`."""
        return self._checkpoints.load(state)
