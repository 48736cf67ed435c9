"""What the events tell of the run's snapshots: what is durable, on its way, or did not get there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import events as ev
from ..events import Event


@dataclass
class Saved:
    """Of all nodes together; `add` is the only way in."""

    durable: int = -1
    """The newest step that is; -1 for none."""
    upload: ev.Saving | None = None
    """The snapshot that is on its way to storage, where that takes a while."""
    unsaved: ev.SaveEnded | None = None
    """The newest snapshot, if it did not become durable."""

    def add(self, e: Event) -> None:
        """Take one event."""
        if isinstance(e, ev.Saving):
            if self.upload is not None and self.upload.step == e.step and not e.trouble:
                e = replace(e, trouble=self.upload.trouble)  # it lasts until the save has ended
            self.upload = e
        elif isinstance(e, ev.SaveEnded):
            if self.upload is not None and e.fate != "skipped" and e.step >= self.upload.step:
                self.upload = None
            self.unsaved = None if e.fate == "durable" else e
            if e.fate == "durable":
                self.durable = max(self.durable, e.step)

    @property
    def trouble(self) -> str:
        """Why the newest snapshot is not in storage, though it was tried; empty if nothing is wrong."""
        if self.upload is not None and self.upload.trouble:
            return self.upload.trouble
        return self.unsaved.why if self.unsaved is not None and self.unsaved.fate in ("failed", "kept") else ""
