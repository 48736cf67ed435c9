"""Turns what the prober says of a job's devices into verdicts: each once, when it is new or has become harder."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from .answers import Device, Held, Report, Told
from .asking import Found, Heard, InUse, Ports, ProberProcess, Trouble, Xid
from .findings import DRIVER_GONE, Finding, findings, pace, slow_finding, xid_finding
from .gpud import Gpud
from .health_policy import Do, HealthPolicy, Verdict, judge
from .ports import PortWatch

_REMEMBERED = 2000
"""Findings kept for each device, for rules that count strikes."""
_LOOK_S = 0.02
_ANSWER_LOOK_S = 0.002


class DeviceWatch:
    """What is known of each device since the job began."""

    def __init__(
        self, policy: HealthPolicy, prober: ProberProcess, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reports: dict[str, Report] = {}
        """Each device's newest report."""
        self._policy, self._prober, self._say, self._clock = policy, prober, say, clock
        self._found: tuple[Device, ...] | None = None
        self._first: dict[str, tuple[float, Report]] = {}
        self._history: dict[str, deque[tuple[float, Finding]]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._standing: dict[str, dict[str, Do]] = defaultdict(dict)
        self._heard_t: dict[str, tuple[float, float]] = {}
        """When each device's report before the newest came, and the one before that."""
        self._slowed_t: dict[str, float] = {}
        """Since when the hardware has slowed each device that it slows now."""
        self._xid_t: dict[tuple[str, int], float] = {}
        self._waiting: list[Verdict] = []
        self._ports = PortWatch(say, clock)
        self._gpud = Gpud(policy.gpud.url, policy.gpud.every_s, say) if policy.gpud is not None else None

    @property
    def pid(self) -> int:
        """The prober's process id; 0 while there is none."""
        return self._prober.pid

    @property
    def well_t(self) -> float:
        """Whatever is found of a device from now on, it was well at this monotonic second; 0 while one has not been asked often enough."""
        return min((self._heard_t.get(uuid, (0.0, 0.0))[1] for uuid in self._prober.uuids), default=0.0)

    def devices(self, within_s: float) -> tuple[Device, ...] | None:
        """The devices that there are, waiting so long for the prober's first word; None if it cannot say."""
        end = self._clock() + within_s
        while self._found is None and self._clock() < end:
            for heard in self._prober.read():
                self._waiting += self._heard(heard)
                if isinstance(heard, Trouble) and not heard.asks:
                    return None
            time.sleep(_LOOK_S)  # the prober's pipe is read without waiting everywhere else
        return self._found

    def memory(self, uuids: Sequence[str], within_s: float) -> Mapping[str, Held] | None:
        """What is in use of the memory of these devices, asked now; None if nobody answers in time."""
        end = self._clock() + within_s
        if not self._prober.ask_memory(uuids):
            return None
        while self._clock() < end:
            all_heard = self._prober.read()
            for heard in all_heard:
                self._waiting += self._heard(heard)
            if answers := [h.held for h in all_heard if isinstance(h, InUse)]:
                return answers[-1]
            time.sleep(_ANSWER_LOOK_S)  # the prober's pipe is read without waiting everywhere else
        return None

    def watch(self, uuids: Sequence[str]) -> None:
        """Ask about these devices from now on; a device that was set aside is not asked about, for its driver may hang."""
        if not uuids:  # to the prober this would be everybody
            self._prober.close()
        elif tuple(uuids) != self._prober.uuids:
            self._prober.ask_about(uuids)
            self.reports.clear()  # the next prober hears of XIDs only once it has listened to each device itself
        for uuid in [u for u in self._first if u not in uuids]:  # if it comes back it begins anew: a reset sets its counters to zero
            del self._first[uuid]
            self._standing.pop(uuid, None)
            self._history.pop(uuid, None)

    def look(self, *, alone: bool = False) -> list[Verdict]:
        """The verdicts since the last look, without waiting. `alone`: it is a job of one device."""
        new, self._waiting = self._waiting, []
        if self._gpud is not None:
            new += self._judged(self._gpud.news(self._prober.uuids), alone=alone)
        for heard in self._prober.read():
            new += self._heard(heard, alone=alone)
        return new

    def slow(self, device: str, for_s: float) -> str:
        """The rank on this device was slow for so long: what the device says of its pace. A verdict follows if its hardware slowed it."""
        report = self.reports.get(device)
        if report is None:
            return ""
        said, since = pace(report), self._slowed_t.get(device)
        if since is not None and self._clock() - since >= for_s:
            self._waiting += self._judged([slow_finding(device, said)], alone=False)
        return said

    def close(self) -> None:
        """End the prober, and ask nobody any more."""
        self._prober.close()
        if self._gpud is not None:
            self._gpud.close()

    def _heard(self, heard: Heard, *, alone: bool = False) -> list[Verdict]:
        if isinstance(heard, Trouble):
            self._say(heard.text)
            self.reports.clear()  # likewise
        elif isinstance(heard, Found):
            self._found = self._found or heard.devices
        elif isinstance(heard, Xid):
            action = heard.recovery.value if heard.recovery.told is Told.VALUE else None
            return self._judged([xid_finding(heard.device, heard.code, action)] if self._is_new(heard) else [], alone=alone)
        elif isinstance(heard, Ports):
            self._ports.look(heard.states)
        elif isinstance(heard, Report):
            return self._reported(heard, alone=alone)
        return []  # an answer about memory that came too late

    def _reported(self, report: Report, *, alone: bool) -> list[Verdict]:
        if self._prober.uuids and report.device not in self._prober.uuids:
            return []
        if gone := next((a for _, a in report.failed() if a.code in DRIVER_GONE), None):
            self._say(f"NVIDIA's driver is gone ({gone.text}): the GPUs are no longer watched")
            self._prober.close()
            return []
        now = self._clock()
        well_t = self._heard_t.get(report.device, (now, now))[1]
        self._heard_t[report.device] = now, self._heard_t.get(report.device, (now, now))[0]
        self.reports[report.device] = report
        since, first = self._first.setdefault(report.device, (now, report))
        found = findings(first, report, (now - since) / 60)
        if any(f.condition == "hw-slowdown" for f in found):
            self._slowed_t.setdefault(report.device, now)
        else:
            self._slowed_t.pop(report.device, None)
        standing = self._standing[report.device]
        for condition in standing.keys() - {f.condition for f in found}:
            del standing[condition]
        return self._judged(found, alone=alone, well_t=well_t)

    def _is_new(self, xid: Xid) -> bool:
        """Whether this is no repetition: a driver may write one error dozens of times."""
        key, now = (xid.device, xid.code), self._clock()
        before, self._xid_t[key] = self._xid_t.get(key), now
        return before is None or now - before >= self._policy.coalesce_s

    def _judged(self, found: Sequence[Finding], *, alone: bool, well_t: float | None = None) -> list[Verdict]:
        """`well_t`: when the device was last known to be well; None for what is told as it happens."""
        return [replace(v, since_t=self._clock() if well_t is None else well_t) for v in self._fresh(found, alone=alone)]

    def _fresh(self, found: Sequence[Finding], *, alone: bool) -> Iterator[Verdict]:
        for finding in found:
            history, standing = self._history[finding.device], self._standing[finding.device]
            history.append((self._clock(), finding))
            verdict = judge(self._policy, history, alone=alone)
            if finding.xid is not None or finding.condition == "slow" or standing.get(finding.condition) is not verdict.do:
                yield verdict
            if finding.xid is None and finding.condition != "slow":
                standing[finding.condition] = verdict.do
