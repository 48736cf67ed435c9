"""Google's ml-goodput-measurement, fed the same run, comes to the same sums (extra: oracle)."""

from __future__ import annotations

import datetime
import random
from typing import Any

import pytest

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.goodput.account import account

oracle = pytest.importorskip("ml_goodput_measurement.src.goodput", reason="the oracle is an extra: pip install goodrun[oracle]")
utils = pytest.importorskip("ml_goodput_measurement.src.goodput_utils")
Badput = utils.BadputType

DAY = datetime.datetime(2026, 11, 30, tzinfo=datetime.timezone.utc)
RANKS = 4


class Memory:
    """Where the oracle keeps its log, in place of a cloud."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def write_cloud_logging_entry(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)

    def flush(self) -> None:
        pass

    def read_cloud_logging_entries(self, *_: Any, **__: Any) -> tuple[list[dict[str, Any]], Any]:
        return self.entries, None


class Both:
    """Tells one run to both: to the oracle step by step, to goodrun by the events that its launcher would write."""

    def __init__(self, tmp: str) -> None:
        self.memory = Memory()
        self.recorder = oracle.GoodputRecorder("job", "log", True, self.memory)
        self.cache = tmp
        self.t = 0.0
        self.attempt = 0
        self.story: list[ev.Event] = []

    def now(self) -> datetime.datetime:
        return DAY + datetime.timedelta(seconds=self.t)

    def tell(self, e: ev.Event, t: float | None = None) -> None:
        self.story.append(type(e)(**{**e.__dict__, "t": self.t if t is None else t, "node": "n", "attempt": self.attempt}))

    def start(self, restored: int, *, first: bool) -> None:
        """A start of 20 s: interpreter and imports 8, process group 4, set-up and restore 6; the first step takes 3 s, the others 1."""
        slots = tuple(range(RANKS))
        if first:
            self.tell(ev.RunStarted(slots=slots))
        self.tell(ev.AttemptStarted(slots=slots, world_size=RANKS))
        self.recorder.record_job_start_time(self.now())
        begin = self.t
        self.t += 8
        self.recorder.record_tpu_init_start_time(self.now())
        self.t += 4
        self.recorder.record_tpu_init_end_time(self.now())
        self.recorder.record_training_preparation_start_time(self.now())
        self.t += 6
        self.recorder.record_training_preparation_end_time(self.now())
        self.recorder.record_step_start_time(restored, self.now())
        self.t += 3
        marks = {
            "boot_t": begin + 2,
            "torch_t": begin + 8,
            "init_t": begin + 12,
            "restore_begin_t": begin + 14,
            "restore_end_t": begin + 18,
        }
        self.tell(ev.Restored(step=restored))
        self.tell(ev.FirstStep(step=restored + 1, first_step_t=self.t, **marks))

    def train(self, first: int, last: int, rng: random.Random) -> None:
        """Steps after `first` up to `last`, each a second; now and then an evaluation."""
        evaluated = 0.0
        for step in range(first + 1, last + 1):
            self.recorder.record_step_start_time(step, self.now())
            if rng.random() < 0.02:
                self.recorder.record_custom_badput_event_start_time(self.now(), "eval")
                seconds = rng.uniform(2, 9)
                self.t += seconds
                evaluated += seconds
                self.recorder.record_custom_badput_event_end_time(self.now(), "eval")
            self.t += 1
            if step % 5 == 0 or step == last:
                beat = ev.RankProgress(steps=(step + 1,) * RANKS, eval_s=(evaluated,) * RANKS, step_t=self.t)
                self.tell(beat, self.t + 0.1)

    def fault(self, step: int) -> None:
        """Half a second into a step; 30 s until it is noticed and the group has formed anew."""
        self.t += 0.5
        at = self.t
        self.t += 12
        self.tell(ev.Failed(step=step, best_step=step, fault_t=at))
        self.t += 3
        self.tell(ev.Stopped())
        self.t += 15
        self.attempt += 1

    def end(self) -> tuple[float, dict[Any, Any]]:
        """The oracle's goodput, a share, and its badput in percent."""
        self.recorder.record_job_end_time(self.now())
        self.tell(ev.RunEnded(outcome="succeeded"))
        calculator = oracle.GoodputCalculator("job", "log", self.memory, cache_dir=self.cache)
        percent, badput, _ = calculator.get_job_goodput(include_badput_breakdown=True)
        return percent / 100, badput


@pytest.mark.parametrize("seed", range(4))
def test_the_oracle_agrees(tmp_path: Any, seed: int) -> None:
    """Goodput and, of the time, evaluation, lost steps and the way back differ by less than 0.5 % over runs with several faults."""
    rng = random.Random(seed)
    both = Both(str(tmp_path))
    restored = 0
    both.start(restored, first=True)
    for _ in range(rng.randint(2, 4)):
        reached = restored + rng.randint(300, 900)
        both.train(restored, reached, rng)
        both.fault(reached + 1)
        restored = reached - reached % 50
        both.start(restored, first=False)
    both.train(restored, restored + 600, rng)
    theirs, badput = both.end()
    ours = account(both.story)
    whole, groups, b = ours.slot_s, ours.groups(), ours.buckets
    starts = sum(badput[kind] for kind in (Badput.TPU_INITIALIZATION, Badput.TRAINING_PREP, Badput.PROGRAM_STARTUP, Badput.OTHER))
    pairs = {
        "goodput": (ours.time_goodput, theirs),
        "evaluation": (b["evaluation"] / whole, badput[Badput.CUSTOM_BADPUT_EVENTS]["EVAL"] / 100),
        "lost steps": (b["redone work"] / whole, badput[Badput.WASTED_PROGRESS_FROM_DISRUPTION] / 100),
        "starting and coming back": (
            (groups["start-up"] + groups["fault"]) / whole,
            (starts + badput[Badput.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION]) / 100,
        ),
    }
    assert {name: mine for name, (mine, _) in pairs.items()} == pytest.approx(
        {name: other for name, (_, other) in pairs.items()}, abs=0.005
    )
    assert all(mine > 0.01 for mine, _ in pairs.values())
