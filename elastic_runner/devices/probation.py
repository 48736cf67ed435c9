"""Slots that were left out, on their way back: each serves its term, is re-tested, and waits for the next checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from ..events import DeviceSetAside, DeviceTested, Event
from .asking import command
from .health_policy import Do, HealthPolicy, Verdict
from .identity import VISIBLE, Bound
from .ledger import Entry, Ledger, LedgerError
from .retest import CPU

_TEST_WITHIN_S = 180.0
_FAILED_TESTS_FOR_GOOD = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a re-test ended."""

    passed: bool
    detail: str
    seconds: float


class Retest:
    """One test in its own process; `result` never waits."""

    def __init__(self, device: Bound | None, env: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begin_t = clock, clock()
        own = {**env, VISIBLE: device.asked} if device else dict(env)
        self._process = subprocess.Popen(
            command("retest", os.getpid(), device.uuid if device else CPU),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=own,
            start_new_session=True,
            cwd="/",
        )

    def result(self) -> Result | None:
        """How it ended; None while it runs. One that takes too long has failed, and is killed."""
        seconds = self._clock() - self._begin_t
        if self._process.poll() is None:
            if seconds < _TEST_WITHIN_S:
                return None
            self._process.kill()
            return Result(passed=False, detail=f"the test did not end within {_TEST_WITHIN_S:.0f} s", seconds=seconds)
        assert self._process.stdout is not None
        with self._process.stdout as out:
            said = out.read()
        try:
            body = json.loads(said)
            return Result(passed=bool(body["passed"]), detail=str(body["detail"]), seconds=seconds)
        except (ValueError, KeyError, TypeError):
            return Result(passed=False, detail=f"the test ended with status {self._process.returncode} and no result", seconds=seconds)

    def close(self) -> None:
        """End it, whatever it has come to."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # it may stand in the driver
            self._process.wait(1.0)
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass(kw_only=True)
class Aside:
    """A slot that is left out. `due_t`: monotonic second of its next test, None for never."""

    slot: int
    device: Bound | None
    reason: str
    due_t: float | None
    offences: int = 1
    failed_tests: int = 0
    test: Retest | None = None
    passed_at_step: int | None = None
    """The newest complete checkpoint's step when it passed: it is let in with a newer one."""
    evidence: str = ""
    in_ledger: bool = False
    """The node's ledger knows, for its device was the reason."""

    @property
    def uuid(self) -> str:
        """Its device; empty for a CPU slot."""
        return self.device.uuid if self.device is not None else ""


class Probation:
    """The slots that are left out of one run, in step with the node's ledger."""

    def __init__(
        self,
        policy: HealthPolicy,
        ledger: Ledger | None,
        *,
        record: Callable[[Event], object],
        say: Callable[[str], None],
        run_id: str,
        env: Mapping[str, str],
    ) -> None:
        """`ledger` is None where no slot has a device that outlives the run; `env` is what re-tests run with."""
        self.aside: dict[int, Aside] = {}
        self._policy, self._ledger, self._record, self._say, self._env = policy, ledger, record, say, env
        self._by = f"run {run_id}"
        self._offences: Counter[int] = Counter()
        self._said: set[str] = set()

    def entry(self, device: Bound) -> Entry | None:
        """What the node's ledger has on a device now."""
        if self._ledger is None:
            return None
        try:
            return self._ledger.read().get(device.uuid)
        except LedgerError as e:
            self._say_once(f"{e}: this run goes on without it")
            return None

    def take_over(self, slot: int, device: Bound, entry: Entry) -> None:
        """A slot whose device somebody else has set aside already."""
        due_t = None if entry.until is None else time.monotonic() + max(entry.until - time.time(), 0.0)
        self.aside[slot] = Aside(
            slot=slot,
            device=device,
            reason=entry.reason,
            evidence=entry.evidence,
            due_t=due_t,
            offences=entry.offences,
            failed_tests=entry.failed_tests,
            in_ledger=True,
        )

    def put(self, slot: int, device: Bound | None, reason: str, verdict: Verdict | None) -> None:
        """Policy has left a slot out. Its device goes into the ledger if there is a verdict on it: else it may only have had bad luck."""
        entry = self.entry(device) if device is not None else None
        if device is not None and entry is not None and entry.out:
            self.take_over(slot, device, entry)
            return
        aside = Aside(slot=slot, device=device, reason=verdict.reason if verdict else reason, due_t=None, in_ledger=verdict is not None)
        aside.evidence = verdict.finding.evidence if verdict else ""
        aside.offences = max(entry.offences if entry is not None and verdict is not None else 0, self._offences[slot]) + 1
        self._set_aside(aside, for_good=verdict is not None and verdict.do is Do.PERM)

    def back(self, durable_step: int) -> tuple[int, ...]:
        """The slots to let in now: their term is over, they have passed their test, and there is a checkpoint since."""
        for aside in self.aside.values():
            self._tend(aside, durable_step)
        ready = tuple(a.slot for a in self.aside.values() if a.passed_at_step is not None and durable_step > a.passed_at_step)
        for slot in ready:
            del self.aside[slot]
        return ready

    def hear_releases(self) -> None:
        """A device that a person has let in again is tested at once, instead of when its term ends."""
        for aside in self.aside.values():
            entry = self.entry(aside.device) if aside.in_ledger and aside.device is not None else None
            if entry is not None and not entry.out and aside.test is None and aside.passed_at_step is None:
                aside.due_t = time.monotonic()

    def close(self) -> None:
        """End what tests there are."""
        for aside in self.aside.values():
            if aside.test is not None:
                aside.test.close()

    def _set_aside(self, aside: Aside, *, for_good: bool) -> None:
        term = self._policy.term(aside.offences)
        aside.due_t = None if for_good else time.monotonic() + term
        until = None if for_good else time.time() + term
        self.aside[aside.slot] = aside
        self._offences[aside.slot] = aside.offences
        self._record(
            DeviceSetAside(
                slot=aside.slot,
                device=aside.uuid,
                index=aside.device.index if aside.device is not None else -1,
                reason=aside.reason,
                offences=aside.offences,
                until="" if until is None else datetime.fromtimestamp(until, timezone.utc).isoformat(timespec="seconds"),
            )
        )
        entry = Entry(
            device=aside.uuid,
            since=time.time(),
            until=until,
            offences=aside.offences,
            failed_tests=aside.failed_tests,
            reason=aside.reason,
            evidence=aside.evidence,
            by=self._by,
        )
        self._write(aside, lambda before: entry)

    def _tend(self, aside: Aside, durable_step: int) -> None:
        if aside.test is None:
            if aside.passed_at_step is None and aside.due_t is not None and time.monotonic() >= aside.due_t:
                aside.test = Retest(aside.device, self._env)
            return
        result = aside.test.result()
        if result is None:
            return
        aside.test = None
        tested = DeviceTested(
            slot=aside.slot, device=aside.uuid, passed=result.passed, detail=result.detail, seconds=round(result.seconds, 3)
        )
        self._record(tested)
        if result.passed:
            aside.passed_at_step = durable_step
            self._say(f"slot {aside.slot} has passed its test ({result.detail}): it comes back at the next checkpoint")
            fresh = Entry(device=aside.uuid, offences=aside.offences)
            self._write(aside, lambda e: replace(e or fresh, out=False, since=time.time(), until=None, failed_tests=0, by=self._by))
            return
        aside.failed_tests, aside.offences = aside.failed_tests + 1, aside.offences + 1
        aside.reason, aside.evidence = "failed its test", result.detail
        self._set_aside(aside, for_good=aside.failed_tests >= _FAILED_TESTS_FOR_GOOD)
        again = "it is set aside for good" if aside.due_t is None else f"the next is in {self._policy.term(aside.offences):.0f} s"
        self._say(f"slot {aside.slot} has failed its test ({result.detail}): {again}")

    def _write(self, aside: Aside, how: Callable[[Entry | None], Entry]) -> None:
        if self._ledger is None or not aside.in_ledger:
            return
        try:
            self._ledger.change(aside.uuid, how)
        except LedgerError as e:
            self._say_once(f"{e}: {aside.uuid} is set aside in this run only")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
