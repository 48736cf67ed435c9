"""What a slot-second can have been spent on; each is in exactly one of these."""

from __future__ import annotations

from enum import Enum


class Bucket(str, Enum):
    """One kind of use. `group` is the part before the colon, by which people think of it."""

    PRODUCTIVE = "productive"
    START_LAUNCH = "start-up: launch"  # the launcher, the rendezvous, the interpreters
    START_IMPORT = "start-up: import"
    START_INIT = "start-up: init"
    START_RESTORE = "start-up: restore"
    START_FIRST_STEP = "start-up: first step"  # the script's own set-up, compilation and the first step
    DATA_WAIT = "data wait"
    SAVE_STALL = "checkpoint stall"
    EVAL = "evaluation"
    FAULT_DETECT = "fault: detect"
    FAULT_STOP = "fault: stop"
    FAULT_RENDEZVOUS = "fault: rendezvous"
    FAULT_START = "fault: start"
    FAULT_IMPORT = "fault: import"
    FAULT_INIT = "fault: init"
    FAULT_RESTORE = "fault: restore"
    FAULT_FIRST_STEP = "fault: first step"
    REDONE = "redone work"  # steps that were done, until a fault took them back
    IDLE = "idle capacity"  # slots set aside, in reserve, or waiting for a group that fits
    SHUTDOWN = "shutdown"
    UNKNOWN = "unknown"

    @property
    def group(self) -> str:
        """The part that people name first."""
        return self.value.partition(":")[0]


GROUPS: tuple[str, ...] = tuple(dict.fromkeys(b.group for b in Bucket))
