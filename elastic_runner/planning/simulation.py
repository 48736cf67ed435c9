"""A seeded discrete-event simulation of a job on many GPUs, in which the production policy decides after every failure."""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..policy import Budgets, Do, Failure, Kind, Slots, decide
from .rates import DAY_S, YEAR_S, expected_failures
from .yields import Costs

_REMEMBERED = 128  # failures that the policy is shown: more than any budget counts, and few enough to look through at each one


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One job. A slot is a GPU; `node_share` of the failures take all GPUs of a node at once, `lost_share` need a repair."""

    gpus: int
    days: float
    per_gpu_year: float
    costs: Costs
    interval_s: float
    gpus_per_node: int = 8
    node_share: float = 0.0
    lost_share: float = 1.0
    repair_s: float = DAY_S
    spares: int = 0
    min_gpus: int = 1
    multiple_of: int = 1
    budgets: Budgets = field(default_factory=Budgets)
    resubmit_s: float = 1800.0
    """How long it takes until a job that the policy gave up is started again by somebody."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One simulated job. The goodputs are shares of the whole time: of the clock, and of the GPUs asked for."""

    time_goodput: float
    capacity_goodput: float
    failures: int
    restarts: int
    gave_up: int
    smallest: int
    waited_s: float
    """How long it stood still because too few GPUs were left."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over replicas and its standard error; the latter is NaN where one replica tells none."""

    mean: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What many replicas of a scenario came to."""

    replicas: int
    seed: int
    time_goodput: Estimate
    capacity_goodput: Estimate
    any_failure: Estimate
    failures: Estimate
    mtbf_s: Estimate
    restarts: Estimate
    gave_up: Estimate
    smallest: int


class _Job:
    """The state of one simulated job between two events."""

    def __init__(self, scenario: Scenario, rng: random.Random) -> None:
        self.s, self.rng = scenario, rng
        self.end = scenario.days * DAY_S
        self.now = self.begin = 0.0
        """`begin`: when the steps since the last restart began."""
        self.slots = Slots(
            active=tuple(range(scenario.gpus)),
            spare=tuple(range(scenario.gpus, scenario.gpus + scenario.spares)),
            min_nproc=scenario.min_gpus,
            multiple_of=scenario.multiple_of,
        )
        self.repairs: list[tuple[float, int]] = []
        self.seen: list[Failure] = []
        self.kept_s = self.kept_gpu_s = self.waited_s = 0.0
        self.failures = self.restarts = self.gave_up = 0
        self.smallest = scenario.gpus

    def run(self) -> Outcome:
        """Go from event to event until the time is up."""
        while self.now < self.end:
            failure_t = self.now + self._time_to_failure()
            grow_t = self._growth_t()
            self.now = min(failure_t, grow_t, self.end)
            if self.now == self.end:
                self._keep(self.end, last=True)
            elif self.now == grow_t:
                self._grow()
            else:
                self._fail()
        whole = self.end or 1.0
        return Outcome(
            time_goodput=self.kept_s / whole,
            capacity_goodput=self.kept_gpu_s / whole / self.s.gpus,
            failures=self.failures,
            restarts=self.restarts,
            gave_up=self.gave_up,
            smallest=self.smallest,
            waited_s=self.waited_s,
        )

    def _time_to_failure(self) -> float:
        """Drawn afresh at every event: an exponential time has no memory."""
        per_s = len(self.slots.active) * self.s.per_gpu_year / YEAR_S
        return self.rng.expovariate(per_s) if per_s else math.inf

    def _keep(self, until: float, *, last: bool = False, snapshot: bool = False) -> None:
        """Count the steps that survive `until`: up to the last durable checkpoint; all of them where the job ends or chooses to restart."""
        period, lag = self.s.interval_s + self.s.costs.stall_s, 0.0 if last or snapshot else self.s.costs.durable_s
        spent = until - self.begin
        if spent <= 0:
            return
        if period <= 0:  # a checkpoint after each step that costs nothing
            kept = max(spent - lag, 0.0)
        else:
            whole = max(math.floor((spent - lag) / period + (1e-9 if snapshot else 0.0)), 0)
            kept = whole * self.s.interval_s + (min(spent - whole * period, self.s.interval_s) if last else 0.0)
        self.kept_s += kept
        self.kept_gpu_s += kept * len(self.slots.active)

    def _growth_t(self) -> float:
        """When the job will take repaired GPUs back: at the first checkpoint after the repair."""
        if not self.repairs or len(self.slots.active) >= self.s.gpus:
            return math.inf
        period = self.s.interval_s + self.s.costs.stall_s
        repaired = self.repairs[0][0]
        after = max(repaired, self.now) - self.begin
        return max(self.begin + (math.ceil(after / period - 1e-12) * period if period > 0 and after > 0 else max(after, 0.0)), self.now)

    def _take_back(self) -> None:
        """Repaired slots wait in reserve."""
        back = set()
        while self.repairs and self.repairs[0][0] <= self.now:
            back.add(heapq.heappop(self.repairs)[1])
        if back:
            out = tuple(o for o in self.slots.out if o[0] not in back)
            self.slots = replace(self.slots, spare=(*self.slots.spare, *sorted(back)), out=out)

    def _reserves(self) -> tuple[int, ...]:
        """Those reserves that can be used, where slots are missing."""
        n = len(self.slots.active)
        size = min(n + len(self.slots.spare), self.s.gpus)
        return self.slots.spare[: max(size - size % self.s.multiple_of - n, 0)]

    def _bring_in(self, new: tuple[int, ...]) -> None:
        self.slots = replace(self.slots, active=self.slots.active + new, spare=self.slots.spare[len(new) :])

    def _grow(self) -> None:
        """Restart with the repaired ones, if that wins more until the next failure, which takes them in for nothing, than it costs."""
        self._take_back()
        new, active = self._reserves(), len(self.slots.active)
        until_failure_s = YEAR_S / (active * self.s.per_gpu_year)
        if len(new) * until_failure_s > active * self.s.costs.recover_s:
            self._keep(self.now, snapshot=True)
            self._bring_in(new)
            self.begin = self.now + self.s.costs.recover_s
            self.restarts += 1

    def _fail(self) -> None:
        self.failures += 1
        step = int(self.kept_s + max(self.now - self.begin, 0.0))
        self._keep(self.now)
        self.begin = self.now + self.s.costs.restart_s
        self._take_back()
        slot = self.slots.active[self.rng.randrange(len(self.slots.active))]
        lost = self.rng.random() < self.s.lost_share
        whole_node = self.rng.random() < self.s.node_share
        for victim in self._node_of(slot) if lost and whole_node else [slot]:
            self._ask_policy(Failure(t=self.now, kind=Kind.SLOT_LOST if lost else Kind.SIGNAL, slot=victim, rank=0, step=step))
        if new := self._reserves():
            self._bring_in(new)
        self.restarts += 1
        self.smallest = min(self.smallest, len(self.slots.active))

    def _node_of(self, slot: int) -> list[int]:
        """The slots in use on the same node."""
        first = slot - slot % self.s.gpus_per_node
        not_in_use = {*self.slots.spare, *(out for out, _ in self.slots.out)}
        return [v for v in range(first, min(first + self.s.gpus_per_node, self.s.gpus + self.s.spares)) if v not in not_in_use]

    def _ask_policy(self, failure: Failure) -> None:
        self.seen = [*self.seen[-_REMEMBERED:], failure]
        action = decide(self.seen, self.slots, self.s.budgets, self.restarts)
        if action.do is Do.RESTART_WITHOUT:
            heapq.heappush(self.repairs, (self.now + self.s.repair_s, failure.slot))
        elif action.do is Do.GIVE_UP and failure.kind is Kind.SLOT_LOST:  # too few are left: it stands still until this one is back
            self.begin += self.s.repair_s
            self.waited_s += self.s.repair_s
        elif action.do is Do.GIVE_UP:
            self.gave_up += 1
            self.seen = []
            self.begin += self.s.resubmit_s
        self.slots = action.slots


def simulate(scenario: Scenario, *, seed: int, replicas: int | None = None, progress: Callable[[int], None] | None = None) -> Simulated:
    """Run `replicas` independent jobs; by default as many as keep the work, and the error, small."""
    n = replicas or replicas_for(scenario)
    outcomes = []
    for i in range(n):
        outcomes.append(_Job(scenario, random.Random(f"{seed}/{i}")).run())
        if progress is not None:
            progress(i + 1)
    total = sum(o.failures for o in outcomes)
    time_s = n * scenario.days * DAY_S
    return Simulated(
        replicas=n,
        seed=seed,
        time_goodput=_estimate([o.time_goodput for o in outcomes]),
        capacity_goodput=_estimate([o.capacity_goodput for o in outcomes]),
        any_failure=_estimate([float(o.failures > 0) for o in outcomes]),
        failures=_estimate([float(o.failures) for o in outcomes]),
        # exponential times: the error of a mean of k of them is mean / sqrt k
        mtbf_s=Estimate(mean=time_s / total, error=time_s / total / math.sqrt(total)) if total else Estimate(mean=math.inf, error=math.nan),
        restarts=_estimate([float(o.restarts) for o in outcomes]),
        gave_up=_estimate([float(o.gave_up) for o in outcomes]),
        smallest=min(o.smallest for o in outcomes),
    )


def replicas_for(scenario: Scenario) -> int:
    """Between 4 and 20,000, so that about 20,000 failures are drawn in all; fewer where each costs a look at very many slots."""
    failures = max(expected_failures(scenario.gpus, scenario.per_gpu_year, scenario.days), 1.0)
    wanted = 20_000 / failures
    affordable = 5e8 / (scenario.gpus * failures)
    return int(min(max(min(wanted, affordable), 4), 20_000))


def _estimate(values: Sequence[float]) -> Estimate:
    n = len(values)
    return Estimate(mean=statistics.fmean(values), error=statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan)
