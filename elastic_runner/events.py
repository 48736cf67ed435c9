"""What can happen to a run: every event is a frozen dataclass and one JSON line; all else is a fold over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """The common stamp. `t`: monotonic seconds of this boot; `wall`: ISO time for people; `attempt`: the job's generation number."""

    name: ClassVar[str] = ""
    t: float = 0.0
    wall: str = ""
    node: str = ""
    attempt: int = -1


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The launcher took the job. `argv` is its command line, `slots` the device slots it was given, `spares` those kept in reserve."""

    name: ClassVar[str] = "run_started"
    schema: int = SCHEMA
    run_id: str = ""
    pid: int = 0
    argv: tuple[str, ...] = ()
    cwd: str = ""
    script: str = ""
    slots: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    torch: str = ""
    version: str = ""
    chaos: str = ""


@dataclass(frozen=True, kw_only=True)
class AttemptStarted(Event):
    """Ranks are about to be started. `slots[i]` is the slot of local rank i; `rendezvous_s` the seconds that forming the group took."""

    name: ClassVar[str] = "attempt_started"
    world_size: int = 0
    first_rank: int = 0
    slots: tuple[int, ...] = ()
    rendezvous_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RoundFormed(Event):
    """The job's nodes have agreed on a generation. `nodes` are the agents in the order of their ranks, this one at `node_rank`.

    `reason` is why there is a new round, `clock_behind_s` how far this node's wall clock is behind the leader's.
    """

    name: ClassVar[str] = "round_formed"
    generation: int = -1
    nodes: tuple[str, ...] = ()
    node_rank: int = -1
    leader: str = ""
    reason: str = ""
    clock_behind_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WorkersSpawned(Event):
    """All processes of this node exist. `pids[i]` belongs to local rank i; `warm` of them had torch imported already."""

    name: ClassVar[str] = "workers_spawned"
    pids: tuple[int, ...] = ()
    warm: int = 0


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """A rank's Checkpointer restored `step` from `source`; `seconds` is the slowest rank's."""

    name: ClassVar[str] = "restored"
    step: int = -1
    source: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FirstStep(Event):
    """Every rank of this node has finished its first step of the attempt.

    The marks are monotonic seconds, each that of the slowest rank; 0 where the script never passed it.
    """

    name: ClassVar[str] = "first_step"
    step: int = -1
    boot_t: float = 0.0
    torch_t: float = 0.0
    init_t: float = 0.0
    restore_begin_t: float = 0.0
    restore_end_t: float = 0.0
    first_step_t: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankExited(Event):
    """One rank's process ended. `code` as in subprocess: negative is a signal. `rank` is global, `slot` the device slot."""

    name: ClassVar[str] = "rank_exited"
    rank: int = -1
    slot: int = -1
    pid: int = 0
    code: int = 0
    step: int = -1


@dataclass(frozen=True, kw_only=True)
class RankHung(Event):
    """A detector named a rank. `evidence` says on what grounds, `silent_s` for how long it had not beaten."""

    name: ClassVar[str] = "rank_hung"
    rank: int = -1
    slot: int = -1
    pid: int = 0
    step: int = -1
    evidence: tuple[str, ...] = ()
    silent_s: float = 0.0
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class StackDumped(Event):
    """A rank's Python stack, taken before anything was killed, innermost frame first."""

    name: ClassVar[str] = "stack_dumped"
    rank: int = -1
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChaosFired(Event):
    """An entry of the chaos plan fired."""

    name: ClassVar[str] = "chaos_fired"
    index: int = -1
    entry: str = ""
    rank: int = -1
    slot: int = -1


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The first failure of an attempt: what the decision was made on. `fault_t`: monotonic second at which it happened, as far as known.

    `kind` is one of policy.Kind's values; `cause` is the sentence people read; `message` the exception and its traceback, `log` where
    more of it is.
    """

    name: ClassVar[str] = "failed"
    kind: str = ""
    rank: int = -1
    slot: int = -1
    step: int = -1
    best_step: int = -1
    cause: str = ""
    message: str = ""
    log: str = ""
    fault_t: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Decided(Event):
    """What policy made of it. `action` is one of policy.Do's values; `slots` are those that go on."""

    name: ClassVar[str] = "decided"
    action: str = ""
    slots: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Stopping(Event):
    """Ranks were asked to stop with `signal`; `why` is "restart", "signal" or "end"."""

    name: ClassVar[str] = "stopping"
    signal: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """No process of the attempt is left. `killed` are the ranks that had to be killed, `signal` what they ignored."""

    name: ClassVar[str] = "stopped"
    seconds: float = 0.0
    killed: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Receipt(Event):
    """The line printed after a restart: where training goes on, and what it cost."""

    name: ClassVar[str] = "receipt"
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RankProgress(Event):
    """Where the ranks were, written every few seconds and at the end of an attempt; index is the local rank.

    The waits count from the start of the attempt, what a rank waits for at this moment included. `silent_s`: since its last beat.
    `own_s`: from having its data to its backward pass.
    `step_t`: when the newest step was finished, 0 if none was. `saved_step` is the newest snapshot, `durable_step` the newest on storage.
    """

    name: ClassVar[str] = "progress"
    steps: tuple[int, ...] = ()
    data_wait_s: tuple[float, ...] = ()
    save_stall_s: tuple[float, ...] = ()
    longest_step_s: float = 0.0
    durable_step: int = -1
    eval_s: tuple[float, ...] = ()
    own_s: tuple[float, ...] = ()
    last_step_s: tuple[float, ...] = ()
    silent_s: tuple[float, ...] = ()
    phases: tuple[str, ...] = ()
    step_t: float = 0.0
    saved_step: int = -1
    loss: float | None = None
    """Mean of the newest finite losses of the ranks that have given one."""


@dataclass(frozen=True, kw_only=True)
class ReplicasTold(Event):
    """Digests of the model after `step`, by rank, where ranks on several nodes hold it whole: for other nodes to compare with theirs."""

    name: ClassVar[str] = "replicas_told"
    step: int = -1
    ranks: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Saving(Event):
    """A snapshot on its way to storage, every few seconds: `done` of `total` bytes. `trouble`: why its storage did not take it just now."""

    name: ClassVar[str] = "saving"
    step: int = -1
    done: int = 0
    total: int = 0
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class SaveEnded(Event):
    """What became of a snapshot, `seconds` after it was taken.

    `fate`: "durable" (in `path`), "failed", "kept" (on this node's disk: its storage is gone), or, where the storage is slower than the
    cadence, "skipped" (not taken) or "replaced" (by a newer one).
    """

    name: ClassVar[str] = "save_ended"
    step: int = -1
    fate: str = ""
    seconds: float = 0.0
    path: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class SnapshotCopied(Event):
    """This node's parts of a snapshot are in the memory of so many other `nodes`, `seconds` after it was taken; `nbytes` were sent."""

    name: ClassVar[str] = "snapshot_copied"
    step: int = -1
    seconds: float = 0.0
    nbytes: int = 0
    nodes: int = 0


@dataclass(frozen=True, kw_only=True)
class DataStarved(Event):
    """A rank's loader does not keep up. Over `over_s` seconds and `steps` steps it waited `waited_s`; `text` is what people are told.

    `workers` are the loader's, -1 if unknown; `enough` of them would keep up by what was measured, 0 where nothing tells.
    """

    name: ClassVar[str] = "data_starved"
    rank: int = -1
    steps: int = 0
    over_s: float = 0.0
    waited_s: float = 0.0
    workers: int = -1
    enough: int = 0
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RankSlow(Event):
    """A rank that its peers waited for. `own_s`, `peers_s`: own work in a step, over `steps` steps; `device`: what its device says."""

    name: ClassVar[str] = "rank_slow"
    rank: int = -1
    slot: int = -1
    steps: int = 0
    over_s: float = 0.0
    own_s: float = 0.0
    peers_s: float = 0.0
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceVerdict(Event):
    """A device said something that the health policy has a rule for. `verdict`: LOG, RESTART, SHED, DRAIN, PERM. Slot -1: not ours."""

    name: ClassVar[str] = "device_verdict"
    device: str = ""
    index: int = -1
    slot: int = -1
    condition: str = ""
    evidence: str = ""
    verdict: str = ""
    strikes: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceSetAside(Event):
    """A slot was left out. `until` is the wall time (ISO) at which it is re-tested, empty for never; a CPU slot has no `device`."""

    name: ClassVar[str] = "device_set_aside"
    slot: int = -1
    device: str = ""
    index: int = -1
    reason: str = ""
    offences: int = 0
    until: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceTested(Event):
    """A slot that was left out has been re-tested; one that passed comes back at the next checkpoint."""

    name: ClassVar[str] = "device_tested"
    slot: int = -1
    device: str = ""
    passed: bool = False
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """A remark for people: something unusual that needed no decision."""

    name: ClassVar[str] = "notice"
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The launcher is done. `outcome`: "succeeded", "failed" or "stopped"; `status` is its exit status."""

    name: ClassVar[str] = "run_ended"
    outcome: str = ""
    status: int = 0
    reason: str = ""
    step: int = -1
    chaos_unfired: tuple[str, ...] = field(default=())


KINDS: dict[str, type[Event]] = {
    cls.name: cls
    for cls in (
        RunStarted, RoundFormed, AttemptStarted, WorkersSpawned, Restored, FirstStep, RankExited, RankHung, StackDumped, ChaosFired, Failed,
        Decided, Stopping, Stopped, Receipt, RankProgress, RankSlow, DeviceVerdict, DeviceSetAside, DeviceTested, DataStarved,
        ReplicasTold, Saving, SaveEnded, SnapshotCopied, Notice, RunEnded,
    )
}  # fmt: skip
