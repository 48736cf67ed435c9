"""What would win back most: the largest losses of a run, each with what helps, said only where the record supports it."""

from __future__ import annotations

from dataclasses import dataclass

from .account import Goodput
from .buckets import Bucket

_WORTH_SAYING = 0.005  # of all slot-seconds
_HELP: dict[Bucket, str] = {
    Bucket.DATA_WAIT: "waiting for the data loader",
    Bucket.SAVE_STALL: "training stands still for checkpoints: save less often (every=… of the Checkpointer)",
    Bucket.EVAL: "evaluation: less often, or on fewer samples",
    Bucket.REDONE: "steps were done twice after faults: save more often",
    Bucket.IDLE: "slots stood idle: --spares takes the place of a lost one",
    Bucket.SHUTDOWN: "the script took its time to end after its last step",
    Bucket.START_LAUNCH: "the launcher and the interpreters",
    Bucket.START_IMPORT: "importing torch and the script's modules",
    Bucket.START_INIT: "forming the process group",
    Bucket.START_RESTORE: "reading the checkpoint at the start",
    Bucket.START_FIRST_STEP: "the script's set-up and its first step: compilation, warm-up, data sets",
    Bucket.FAULT_DETECT: "the time until faults were noticed",
    Bucket.FAULT_STOP: "the other ranks were slow to stop",
    Bucket.FAULT_RENDEZVOUS: "forming the group anew",
    Bucket.FAULT_START: "starting interpreters after faults: ranks without a standby (warm start) pay for it",
    Bucket.FAULT_IMPORT: "importing after faults: ranks without a standby (warm start) pay for it",
    Bucket.FAULT_INIT: "forming the process group after faults",
    Bucket.FAULT_RESTORE: "reading checkpoints after faults",
    Bucket.FAULT_FIRST_STEP: "the script's set-up and first step after faults: cache what it compiles and loads",
    Bucket.UNKNOWN: "nothing tells what was done: let the script beat with goodrun.heartbeat(step=…)",
}


def _help(bucket: Bucket, goodput: Goodput) -> str:
    return goodput.starved or _HELP[bucket] if bucket is Bucket.DATA_WAIT else _HELP[bucket]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One loss: how many slot-seconds could be won, their share of all, and what helps."""

    name: str
    """The bucket, or "straggler": that time is part of the productive steps."""
    slot_s: float
    share: float
    text: str


def advise(goodput: Goodput) -> list[Advice]:
    """The losses worth a word, largest first."""
    whole = goodput.slot_s or 1.0
    losses = [(bucket.value, spent, _help(bucket, goodput)) for bucket, spent in goodput.losses()]
    losses.append(("straggler", goodput.straggling_s, goodput.straggler))
    return [
        Advice(name=name, slot_s=spent, share=spent / whole, text=text)
        for name, spent, text in sorted(losses, key=lambda loss: -loss[1])
        if spent / whole >= _WORTH_SAYING
    ]
