"""What the keeper tells of the saves, as events; and the words on what a job that was told to stop has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..progress import Mark, Progress
from .events import SaveEnded, Saving, SnapshotCopied
from .journal import Journal

Pages = Mapping[int, Progress]


class Saves:
    """Keeps the record of what becomes of this node's snapshots."""

    def __init__(self, journal: Journal, say: Callable[[str], None], note: Callable[[str], None]) -> None:
        """`say` tells people and the record; `note` only the record, of what the ranks say themselves."""
        self.durable = -1
        """The newest step that became durable in this run."""
        self.made = 0
        """How many did."""
        self.lost = ""
        """Why the newest snapshot is not in storage, where nothing newer is."""
        self._lost_step = -1
        self._journal, self._say, self._note = journal, say, note
        self._stopped: tuple[int, Pages] | None = None

    def hear(self, told: dict[str, Any]) -> None:
        """Take in one thing that the keeper has told."""
        step, why, op = told.get("step", -1), told.get("why", ""), told.get("op")
        if why and not told.get("replaced"):
            self._note(why)
        if op in ("writing", "trouble"):
            self._journal.write(Saving(step=step, done=told.get("done", 0), total=told.get("total", 0), trouble=why))
        elif op == "copied":
            self._journal.write(SnapshotCopied(step=step, seconds=told["seconds"], nbytes=told["bytes"], nodes=told["nodes"]))
        elif op in ("durable", "failed", "skipped"):
            fate = "replaced" if told.get("replaced") else "kept" if told.get("kept") else op
            if fate == "durable":
                self.durable, self.made = max(self.durable, step), self.made + 1
            if fate in ("failed", "kept") and not told.get("fenced"):
                self.lost, self._lost_step = why, step
            elif fate == "durable" and step >= self._lost_step:
                self.lost = ""
            self._journal.write(SaveEnded(step=step, fate=fate, seconds=told.get("seconds", 0.0), path=told.get("path", ""), why=why))

    def stopped(self, before: Pages, after: Pages) -> None:
        """The job was told to stop, and its ranks have ended: their pages when the signal came, and at the end."""
        self._stopped = max(self.durable, *(p.durable_step for p in before.values())), after

    def last_words(self) -> None:
        """The keeper is done: say which checkpoint a job that was told to stop has left, where it keeps any."""
        if self._stopped is None:
            return
        (had, after), self._stopped = self._stopped, None
        if not any(p.restored_step >= 0 or p.saved_step >= 0 or p.marks[Mark.RESTORE_END] for p in after.values()):
            return
        has = max(self.durable, *(p.durable_step for p in after.values()))
        left = min(p.left_step for p in after.values())
        if left >= 0 or has > had:
            self._say(f"step {max(left, has)} was saved on the way out")
            return
        resumes = max(has, *(p.restored_step for p in after.values()))
        self._say(f"no checkpoint was made on the way out: the next run goes on from step {max(resumes, 0)}")
