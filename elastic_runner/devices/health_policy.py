"""The health policy: a strict YAML file becomes frozen rules, and a pure function turns a device's findings into a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .findings import Finding

SHIPPED = Path(__file__).with_name("health_policy.yaml")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SPAN = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


class PolicyError(UsageError):
    """The health policy file cannot be used as it is written: the user's to mend, before anything is started."""


class Do(IntEnum):
    """What is done about a device, from the mildest to the hardest."""

    LOG = 0
    RESTART = 1
    SHED = 2
    DRAIN = 3
    PERM = 4


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of the policy. `strikes` findings within `within_s` make it `then`; `alone` replaces `do` in a job of one device."""

    do: Do
    meaning: str = ""
    strikes: int = 0
    within_s: float = 0.0
    then: Do | None = None
    alone: Do | None = None
    taints: bool = False
    """What was saved while this may have been so is not to be restored from: the device's memory has written wrong numbers."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Where another watcher of the GPUs is, and how often it is asked."""

    url: str
    every_s: float


@dataclass(frozen=True, kw_only=True)
class HealthPolicy:
    """All of it. `xids` and `recovery_actions` go by number; `other_xid` is for those not listed."""

    source: str
    every_s: float
    deadline_s: float
    coalesce_s: float
    settle_s: float
    term_s: float
    longest_s: float
    recovery_actions: Mapping[int, Rule]
    conditions: Mapping[str, Rule]
    xids: Mapping[int, Rule]
    other_xid: Rule
    gpud: Ask | None = None

    def rule(self, finding: Finding) -> Rule:
        """The line that speaks about a finding, before field 230 has had its say."""
        if finding.xid is not None:
            return self.xids.get(finding.xid, self.other_xid)
        if finding.condition == "recovery-action":
            # a number that this file does not know is one that a newer driver wants done: never nothing
            return self.recovery_actions.get(finding.recovery_action or 0, Rule(do=Do.SHED, meaning="unknown"))
        return self.conditions[finding.condition]

    def term(self, offences: int) -> float:
        """How long a device with that many offences is set aside."""
        return min(self.term_s * 2.0 ** min(max(offences - 1, 0), 40), self.longest_s)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be done about one device, on which finding, after how many like it, and why in words."""

    do: Do
    finding: Finding
    strikes: int
    reason: str
    taints: bool = False
    since_t: float = 0.0
    """Monotonic second at which the device was last known not to be so."""


def judge(policy: HealthPolicy, findings: Sequence[tuple[float, Finding]], *, alone: bool = False) -> Verdict:
    """The verdict on the newest of `findings`, which are (monotonic second, finding) pairs of one device, oldest first."""
    now, newest = findings[-1]
    rule = policy.rule(newest)
    counted = [t for t, f in findings if f.condition == newest.condition and policy.rule(f) is rule and now - t <= rule.within_s] or [now]
    strikes = len(counted)
    do = rule.alone if alone and rule.alone is not None else rule.do
    meaning = rule.meaning or newest.name
    reason = meaning if newest.condition in policy.conditions else f"{newest.name}: {meaning}"
    if rule.then is not None and strikes >= rule.strikes:
        do, reason = rule.then, f"{reason}, {strikes} times within {now - counted[0]:.0f} s"
    if newest.xid is not None and newest.recovery_action is not None:
        return replace(_driver_says(policy, newest, do, strikes, reason, alone=alone), taints=rule.taints)
    return Verdict(do=do, finding=newest, strikes=strikes, reason=reason, taints=rule.taints)


def _driver_says(policy: HealthPolicy, newest: Finding, do: Do, strikes: int, reason: str, *, alone: bool) -> Verdict:
    """Field 230 has the last word over the table of XIDs; "none" only ever softens."""
    action = newest.recovery_action or 0
    rule = policy.recovery_actions.get(action, Rule(do=Do.SHED, meaning="unknown"))
    wanted = rule.alone if alone and rule.alone is not None else rule.do
    said = min(do, wanted) if action == 0 else wanted
    words = f"{reason}; the driver's recovery action is {action}, {rule.meaning}"
    return Verdict(do=said, finding=newest, strikes=strikes, reason=words if said is not do or action else reason)


def load(path: Path | None = None) -> HealthPolicy:
    """Read a policy file, by default the one that comes with goodrun. Raises PolicyError, naming what is wrong and where."""
    import yaml  # here: it takes a while, and only a launcher with GPUs and `goodrun devices` need it

    path = path or SHIPPED
    try:
        # the C parser where there is one: the other takes as long as all the rest of a start without torch
        body: object = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as e:
        raise PolicyError(f"cannot read the health policy {str(path)!r}: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise PolicyError(f"the health policy {str(path)!r} is not YAML: {' '.join(str(e).split())}") from e
    return _Reader(str(path)).policy(body)


class _Reader:
    """Reads the file's parts, and says for each mistake where it is."""

    def __init__(self, path: str) -> None:
        self._path = path

    def policy(self, body: object) -> HealthPolicy:
        parts = ("schema", "probe", "coalesce", "settle", "quarantine", "recovery-actions", "conditions", "xids")
        top = self._mapping("the file", body, (*parts, "gpud"), parts)
        if top["schema"] != 1:
            raise self._wrong("schema", f"{top['schema']!r} is not 1, the only one that this goodrun knows")
        probe = self._mapping("probe", top["probe"], ("every", "deadline"), ("every", "deadline"))
        quarantine = self._mapping("quarantine", top["quarantine"], ("term", "longest"), ("term", "longest"))
        known = tuple(_shipped_conditions()) if self._path != str(SHIPPED) else tuple(self._any("conditions", top["conditions"]))
        conditions = self._mapping("conditions", top["conditions"], known, known)
        xids = dict(self._any("xids", top["xids"]))
        if "other" not in xids:
            raise self._wrong("xids", "'other' is missing, for XIDs that are not listed")
        other = self._rule("xids: other", xids.pop("other"))
        gpud, gpuds = self._gpud(top["gpud"]) if "gpud" in top else (None, {})
        return HealthPolicy(
            source=self._path,
            every_s=self._duration("probe: every", probe["every"]),
            deadline_s=self._duration("probe: deadline", probe["deadline"]),
            coalesce_s=self._duration("coalesce", top["coalesce"]),
            settle_s=self._duration("settle", top["settle"]),
            term_s=self._duration("quarantine: term", quarantine["term"]),
            longest_s=self._duration("quarantine: longest", quarantine["longest"]),
            recovery_actions=self._numbered("recovery-actions", self._any("recovery-actions", top["recovery-actions"])),
            conditions={str(name): self._rule(f"conditions: {name}", rule) for name, rule in conditions.items()} | gpuds,
            xids=self._numbered("xids", xids),
            other_xid=other,
            gpud=gpud,
        )

    def _gpud(self, body: object) -> tuple[Ask, dict[str, Rule]]:
        """Where it is, and the conditions that it adds."""
        parts = ("url", "every", "unhealthy", "check")
        fields = self._mapping("gpud", body, parts, parts)
        if not re.fullmatch(r"https?://[^/\s]+", str(fields["url"])):
            raise self._wrong("gpud: url", f"{fields['url']!r} is no address such as https://localhost:15132")
        rules = {f"gpud-{name}": self._rule(f"gpud: {name}", fields[name]) for name in ("unhealthy", "check")}
        return Ask(url=str(fields["url"]), every_s=self._duration("gpud: every", fields["every"])), rules

    def _numbered(self, where: str, body: Mapping[Any, object]) -> dict[int, Rule]:
        rules: dict[int, Rule] = {}
        for key, value in body.items():
            rule = self._rule(f"{where}: {key}", value)
            for part in str(key).split(","):
                span = _SPAN.fullmatch(part.strip())
                if span is None:
                    raise self._wrong(f"{where}: {key}", f"{part.strip()!r} is neither a number nor a span such as 126-135")
                for number in range(int(span[1]), int(span[2] or span[1]) + 1):
                    if number in rules:
                        raise self._wrong(f"{where}: {key}", f"{number} is already spoken for by another line")
                    rules[number] = rule
        return rules

    def _rule(self, where: str, body: object) -> Rule:
        fields = self._mapping(where, body, ("do", "meaning", "strikes", "within", "then", "alone", "taints"), ("do",))
        if len(fields.keys() & {"strikes", "within", "then"}) not in (0, 3):
            raise self._wrong(where, "strikes, within and then go together")
        strikes = fields.get("strikes", 0)
        if not isinstance(strikes, int) or isinstance(strikes, bool) or strikes < 0 or ("strikes" in fields and strikes < 1):
            raise self._wrong(where, f"strikes {strikes!r} is no number from 1 on")
        if not isinstance(fields.get("taints", False), bool):
            raise self._wrong(where, f"taints {fields['taints']!r} is neither true nor false")
        return Rule(
            taints=fields.get("taints", False),
            do=self._do(where, fields["do"]),
            meaning=str(fields.get("meaning", "")),
            strikes=strikes,
            within_s=self._duration(f"{where}: within", fields["within"]) if "within" in fields else 0.0,
            then=self._do(where, fields["then"]) if "then" in fields else None,
            alone=self._do(where, fields["alone"]) if "alone" in fields else None,
        )

    def _do(self, where: str, value: object) -> Do:
        if value not in Do.__members__:
            raise self._wrong(where, f"{value!r} is not one of {', '.join(Do.__members__)}")
        return Do[str(value)]

    def _duration(self, where: str, value: object) -> float:
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            raise self._wrong(where, f"{value!r} is no time such as 500ms, 5s, 10m or 24h")
        return float(match[1]) * _SECONDS[match[2]]

    def _any(self, where: str, body: object) -> Mapping[Any, object]:
        if not isinstance(body, Mapping):
            raise self._wrong(where, "it should hold keys and values")
        return body

    def _mapping(self, where: str, body: object, known: Sequence[str], needed: Sequence[str]) -> Mapping[Any, Any]:
        keys = self._any(where, body)
        for key in keys:
            if key not in known:
                raise self._wrong(where, f"the key {key!r} is unknown; there are {', '.join(known)}")
        for key in needed:
            if key not in keys:
                raise self._wrong(where, f"{key!r} is missing")
        return keys

    def _wrong(self, where: str, what: str) -> PolicyError:
        return PolicyError(f"the health policy {self._path!r}, {where}: {what}")


def _shipped_conditions() -> Mapping[str, Rule]:
    return load().conditions
