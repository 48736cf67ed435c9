"""The last lines of a run: what happened in words, first failure first, and the exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .attempt import signal_name
from .events import RunEnded
from .policy import Kind
from .seating import NoDevices
from .supervisor import Supervisor
from .surroundings import why_shared_memory

_SHOW_LINES = 12
NODE_UNFIT = 69
"""The exit status where no device of this node is to be used (sysexits' EX_UNAVAILABLE): do not start the job here again."""
START_AGAIN = 75
"""The exit status of a job that was asked to leave because its time or its machine runs out (sysexits' EX_TEMPFAIL): start it again."""


def succeeded(sup: Supervisor) -> int:
    """Every rank ended with 0; that is not enough where the last snapshot was lost on its way to storage."""
    if why := sup.recorder.saves.lost:
        sup.say(f"FAILED: training is over, and its last checkpoint is not in storage: {why}")
        _end(sup, "failed", 1, why)
        return 1
    _end(sup, "succeeded", 0, "")
    if (again := sup.attempts - 1) > 0:
        s = "" if again == 1 else "s"
        sup.say(f"done after {again} restart{s}; the story: goodrun history {sup.journal.run_dir}")
    return 0


def failed(sup: Supervisor, error: Exception) -> int:
    """Policy gave up, or torch did: show the rank, the reason and what the script said, the latter last."""
    broken = sup.last_failure
    if broken is None:
        status = NODE_UNFIT if isinstance(error, NoDevices) else 1
        sup.say(str(error))
        _end(sup, "failed", status, str(error))
        _say_where_not(sup, status)
        return status
    lines = _last_words(broken.failure.message, broken.log)
    if lines:
        sup.say(f"what rank {broken.failure.rank} said last:")
        for line in lines:
            sup.say(f"  {line}")
    if shm := why_shared_memory(f"{broken.cause}\n{broken.failure.message}\n" + "\n".join(_last_words("", broken.log))):
        sup.say(shm)
    reason = sup.pending.reason if sup.pending is not None else ""
    more = f"; its log is {broken.log}" if broken.log else ""
    sup.say(f"FAILED: {broken.cause} ({broken.where}, pid {broken.pid}): {reason}{more}")
    status = NODE_UNFIT if broken.failure.kind in (Kind.NODE_SICK, Kind.SLOT_LOST) else 1
    _end(sup, "failed", status, f"{broken.cause}: {reason}")
    _say_where_not(sup, status)
    return status


def _say_where_not(sup: Supervisor, status: int) -> None:
    """How to tell Slurm to start the job elsewhere."""
    if status == NODE_UNFIT and (step := sup.config.slurm) is not None:
        node = step.nodes[step.node]
        sup.say(f"to keep job {step.job} off this node: scontrol update JobId={step.number} ExcNodeList={node}, or sbatch --exclude={node}")


def stopped(sup: Supervisor, signum: int, waits_for: str | None) -> int:
    """A signal ended the run."""
    text = f"stopped by {signal_name(signum)}" + (f" while waiting for {waits_for}" if waits_for else "")
    status = 128 + signum
    notice = sup.preemption.notice if sup.preemption is not None else ""
    if notice or signal_name(signum) == sup.config.requeue_signal:
        text, status = f"{notice or text}: to be started again", START_AGAIN
    sup.say(text)
    _end(sup, "stopped", status, text)
    return status


def broken_launch(sup: Supervisor, args: Any, error: Exception) -> int:
    """torch's launcher itself failed: no rank is to blame."""
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    low = words.lower()
    status = 1
    if "address already in use" in low or "eaddrinuse" in low:
        port = args.master_port or args.rdzv_endpoint or "29500"
        words, status = f"the port is taken: {port}; free it, or choose another with --master-port or --rdzv-endpoint", 2
    elif isinstance(error, ValueError) and sup.generation < 0:
        status = 2
    sup.say(words if status == 2 else f"the launcher could not go on: {type(error).__name__}: {words}")
    _end(sup, "failed", status, words)
    return status


def _end(sup: Supervisor, outcome: str, status: int, reason: str) -> None:
    unfired = tuple(f.text for f in sup.config.chaos if f.index not in sup.recorder.fired)
    if unfired and outcome == "succeeded":
        sup.say(f"chaos that never came to pass: {'; '.join(unfired)}")
    step = sup.recorder.best_step
    sup.journal.write(RunEnded(outcome=outcome, status=status, reason=reason, step=step, chaos_unfired=unfired))


def _last_words(message: str, log: str) -> list[str]:
    """The end of the exception's traceback, else of the rank's own log."""
    if message:
        head, _, stack = message.partition("\n")
        return (stack or head).rstrip().splitlines()[-_SHOW_LINES:]
    try:
        return Path(log).read_text(errors="replace").rstrip().splitlines()[-_SHOW_LINES:] if log else []
    except OSError:
        return []
