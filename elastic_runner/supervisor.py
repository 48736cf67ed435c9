"""Watches an attempt, asks policy, performs: the thin loop between observers, decider, processes and record."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from .attempt import Attempt, Broken, Finished, Left, Signalled
from .bootstrap import MODULES_FILE_VARIABLE
from .departing import Departure
from .devices.ward import Ward
from .events import AttemptStarted, Decided, WorkersSpawned
from .hang import HangDetector
from .inflicting import Inflicting
from .journal import Journal
from .keeper import KeeperProcess
from .nodes.member import Changed, Ended
from .nursery import Nursery
from .options import RunConfig
from .policy import Action, Do, Failure, Kind, Slots, decide
from .preemption import PreemptionWatch
from .recorder import Recorder
from .seating import Seating
from .signals import Signals
from .stopping import Stopper
from .trust import Trust
from .workers import Spawn, WorkerContext

STARTED_VARIABLE = "GOODRUN_RUN_STARTED"
"""When the run began, in nanoseconds of wall time: with the generation, what checkpoints are fenced by."""
_TEND_AFTER_S = 5.0
_NEWS_WITHIN_S = 0.5
"""A node's end reaches its peers' ranks and its peers' launchers within a few milliseconds of each other."""


class Outcome(Enum):
    """How watching an attempt ended."""

    HEALTHY = "healthy"  # nothing yet; look again
    SUCCEEDED = "succeeded"
    RESTART = "restart"
    GIVE_UP = "give up"


@dataclass(kw_only=True)
class Supervisor:
    """One node's part of a run. Its state: the slots, the failures so far, and the attempt under watch."""

    config: RunConfig
    journal: Journal
    signals: Signals
    recorder: Recorder
    say: Callable[[str], None]
    worker_env: dict[str, str]
    """Added to every worker's environment."""
    started_t: float = field(default_factory=time.monotonic)
    admitted: Slots | None = None
    """The slots that the ledger of this node leaves to the run; None: all."""
    seating: Seating = field(init=False)
    stopper: Stopper = field(init=False)
    departure: Departure = field(init=False)
    chaos: Inflicting = field(init=False)
    trust: Trust = field(init=False)
    nursery: Nursery | None = None
    keeper: KeeperProcess | None = None
    ward: Ward | None = None
    preemption: PreemptionWatch | None = None
    generation: int = -1
    world_size: int = 0
    attempts: int = 0
    restarts: int = 0
    """Those that count against the user's `--max-restarts`."""
    failures: list[Failure] = field(default_factory=list)
    attempt: Attempt | None = None
    last_failure: Broken | None = None
    pending: Action | None = None
    """Decided, not yet performed."""
    news: Callable[[float], Changed | Ended | None] = lambda timeout_s: None
    """Why this round of nodes is over, once it is; waits up to so many seconds for that."""

    def __post_init__(self) -> None:
        self.seating = Seating(
            slots=self.config.slots if self.admitted is None else self.admitted,
            size=len(self.config.slots.active),
            ward=self.ward,
            signals=self.signals,
            notice=self.recorder.notice,
            decided=self._decided,
            wait_s=self.config.wait_for_devices_s,
        )
        self.stopper = Stopper(journal=self.journal, signals=self.signals, say=self.say)
        self.departure = Departure(
            config=self.config, signals=self.signals, stopper=self.stopper, recorder=self.recorder, say=self.say
        )
        self.chaos = Inflicting(
            plan=self.config.chaos,
            recorder=self.recorder,
            ward=self.ward,
            keeper=self.keeper,
            nursery=self.nursery,
            started_t=self.started_t,
        )
        self.trust = Trust(writer=lambda: (int(self.worker_env[STARTED_VARIABLE]), self.generation), recorder=self.recorder)
        if self.ward is not None:
            self.recorder.pacing.device_of = self.ward.slow
            self.ward.tainted, self.trust.well_t = self.trust.tainted, self.ward.well_t
        if self.keeper is not None:
            self.trust.vouch = self.keeper.vouch
        if self.nursery is not None:
            self.nursery.say = self.recorder.notice

    @property
    def slots(self) -> Slots:
        """The slots as they are now."""
        return self.seating.slots

    # -- starting ------------------------------------------------------------------------------------------------------

    def attempt_begins(self, generation: int, world_size: int, first_rank: int, rendezvous_s: float) -> None:
        """The group has formed as `generation`; its ranks are about to be started."""
        self.generation = self.journal.attempt = generation
        self.attempts += 1
        self.world_size = world_size
        self.journal.write(
            AttemptStarted(world_size=world_size, first_rank=first_rank, slots=self.slots.active, rendezvous_s=round(rendezvous_s, 6))
        )

    def spawn_plan(self) -> Spawn:
        """What the workers of the coming attempt get besides torch's own description."""
        env = {**self.worker_env, **self.chaos.env(self.generation), **self.trust.env(), "GOODRUN_GENERATION": str(self.generation)}
        if self.nursery is not None and self.nursery.learns_from is not None:
            env[MODULES_FILE_VARIABLE] = str(self.nursery.learns_from)
        return Spawn(
            generation=self.generation,
            slots=self.slots.active,
            stack_dir=self.journal.run_dir / "stacks",
            env=env,
            devices=self.seating.visible(),
            virtual_local_rank=self.config.virtual_local_rank,
            script_is_python=self.config.script_is_python,
            nursery=self.nursery,
        )

    def workers_started(self, context: WorkerContext) -> None:
        """The ranks exist: watch them."""
        warm = sum(r.warm for r in context.ranks)
        self.journal.write(WorkersSpawned(pids=tuple(r.pid for r in context.ranks), warm=warm))
        self.recorder.attempt_begins()
        detector = HangDetector(known_start_s=self.recorder.known_start_s) if self.config.hang_detection else None
        here = len(context.ranks)
        numbers, whole_job = self.trust.numbers(here, self.world_size), here == self.world_size
        self.attempt = Attempt(context, self.signals, detector, self.chaos.slot_lost, numbers, whole_job=whole_job)

    # -- watching ------------------------------------------------------------------------------------------------------

    def watch(self, until_t: float | None = None) -> Outcome:
        """Watch the attempt until it ends, or until monotonic time `until_t`.

        Raises what `signals.raises` makes of a stop signal, once the signal was obeyed and all ranks are gone.
        """
        assert self.attempt is not None
        attempt = self.attempt
        while until_t is None or time.monotonic() < until_t:
            seen = attempt.observe()
            self.recorder.look(attempt)
            if self.keeper is not None:
                self.keeper.tend()
            self.chaos.tend(attempt, self.generation)
            self._tend_nursery(attempt)
            self.trust.look(attempt.pages(), attempt.numbers)
            if isinstance(seen, Finished):
                self.recorder.progress(attempt.pages())
                return Outcome.SUCCEEDED
            if isinstance(seen, Signalled):
                self.departure.signalled(attempt, seen.signum)
            elif isinstance(seen, Left):
                gone, waiting = _names(seen.gone), _names(seen.waiting)
                self.recorder.notice(f"{gone} left with status 0 a while ago; {waiting} still at work")
            elif isinstance(seen, Broken) and self.departure.with_another(attempt, self.world_size):
                self.membership_changed()
                return Outcome.RESTART
            elif isinstance(seen, Broken) and not self._only_watched(attempt, seen):
                return self._broken(attempt, seen)
            elif (outcome := self._devices(attempt)) is not None:
                return outcome
        return Outcome.HEALTHY

    def _tend_nursery(self, attempt: Attempt) -> None:
        """Standbys are made beside the training, not beside a start: that would take the starting ranks' cores."""
        quiet = self.recorder.training or time.monotonic() - attempt.born_t > _TEND_AFTER_S
        if self.nursery is not None and quiet and (command := attempt.context.common_command()):
            self.nursery.tend(command, len(attempt.ranks))

    def _only_watched(self, attempt: Attempt, broken: Broken) -> bool:
        """Whether this was a detector in dry run. A rank that has obeyed somebody ends the run here, as that asked."""
        if broken.failure.kind is Kind.HANG:
            self.recorder.hang(broken, dry_run=self.config.dry_run_detectors)
            if self.config.dry_run_detectors:
                self.recorder.notice(f"{broken.cause} (dry run: nothing is done)")
                attempt.forget_detector()
                return True
        self.departure.obeyed(attempt, broken.failure.rank)
        return False

    def _broken(self, attempt: Attempt, broken: Broken) -> Outcome:
        # what a rank says when it dies of its GPU is "CUDA error", and a restart with that GPU would only fail again
        if self.ward is not None and (sick := self.ward.look(attempt, self.slots)) is not None and sick.failure.kind is not Kind.DEVICE:
            broken = sick
        if broken.failure.kind is Kind.CONNECTION and self.news(_NEWS_WITHIN_S) is not None:
            self.membership_changed()
            return Outcome.RESTART
        self.recorder.failure(attempt, broken)
        self.last_failure = broken
        self.failures.append(broken.failure)
        self.trust.failed(broken, self.world_size)
        action = decide(self.failures, self.slots, self.config.budgets, self.restarts)
        self._decided(action)
        self.say(f"{broken.cause} ({broken.where}): {_words(action)}")
        return Outcome.GIVE_UP if action.do is Do.GIVE_UP else Outcome.RESTART

    def _devices(self, attempt: Attempt) -> Outcome | None:
        """A sick device ends the attempt; one that is well again comes back with the next checkpoint."""
        if (sick := self.seating.sick(attempt)) is not None:
            return self._broken(attempt, sick)
        if (action := self.seating.growth(self.durable_step)) is None:
            return None
        self._decided(action)
        self.recorder.interrupted()
        self.say(_words(action))
        return Outcome.RESTART

    def membership_changed(self) -> None:
        """Another node came or went, or this one was left behind: start over with whoever is there."""
        if self.attempt is not None:
            self.departure.of_all(self.attempt)
        news = self.news(0.0)
        why = news.reason if news is not None else "another node joins or has left"
        if isinstance(news, Changed) and news.at_once and self.attempt is not None:
            self.stopper.kill(self.attempt, why)  # the others may be about to go on without us
        failure = Failure(t=time.monotonic(), kind=Kind.PEER, slot=-1, rank=-1, message=why)
        self._decided(decide([failure], self.slots, self.config.budgets, self.restarts))
        self.recorder.interrupted()
        self.say(f"{why}: starting over with the nodes that are there")

    @property
    def durable_step(self) -> int:
        """The newest durable checkpoint that this node's ranks know of; -1 if none."""
        return max((p.durable_step for p in self.attempt.pages().values()), default=-1) if self.attempt is not None else -1

    def _decided(self, action: Action) -> None:
        self.pending = action
        self.journal.write(Decided(action=action.do.value, slots=action.slots.active, reason=action.reason))

    def begin_restart(self) -> None:
        """Stop what is left of the attempt, and take over the slots that were decided."""
        assert self.attempt is not None and self.pending is not None
        started = max((p.run_started for p in self.attempt.pages().values()), default=0)
        self.worker_env[STARTED_VARIABLE] = str(started or self.worker_env[STARTED_VARIABLE])
        grows = self.pending.do is Do.GROW
        hung = self.last_failure.failure.rank if self.last_failure is not None and self.last_failure.evidence and not grows else None
        self.stopper.stop(self.attempt, signal.SIGTERM, self.config.restart_grace_s, "restart", hung=hung)
        if self.stopper.asked is not None:
            raise self.signals.raises(self.stopper.asked)
        slots, self.pending = self.pending.slots, None
        self.restarts += not grows
        self.seating.restart(slots)

    # -- stopping ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave no rank behind, whatever happened."""
        if self.attempt is not None and self.attempt.ranks:
            self.stopper.stop(self.attempt, signal.SIGTERM, self.config.restart_grace_s, "end")

    def settle(self) -> None:
        """Nothing trains any more: what is whole in memory becomes durable, and it is said what that leaves."""
        self.end()
        if self.keeper is not None:
            self.keeper.close()
        self.recorder.saves.last_words()

    def close(self) -> None:
        """The run is over: leave nothing behind."""
        self.settle()
        if self.preemption is not None:
            self.preemption.close()
        if self.ward is not None:
            self.ward.close()
        if self.nursery is not None:
            self.nursery.close()


def _names(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _words(action: Action) -> str:
    n = len(action.slots.active)
    if action.do is Do.GIVE_UP:
        return f"giving up ({action.reason})"
    if action.do is Do.WAIT:
        return action.reason
    return f"restarting {n} rank{'s' if n > 1 else ''} ({action.reason})"
