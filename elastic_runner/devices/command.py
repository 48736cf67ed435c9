"""`goodrun devices`: this node's GPUs with their health now, those set aside, and what would be done about an XID."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import GoodrunError, UsageError
from .answers import Device, Report, Told
from .asking import Found, ProberProcess, Trouble
from .findings import Finding, findings, xid_finding
from .health_policy import HealthPolicy, judge, load
from .ledger import Entry, Ledger

_ANSWER_WITHIN_S = 60.0
_LOOK_S = 0.02
JSON_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Health:
    """One GPU as it is now. `health`: "nothing found", "not known" or what is wrong with it, in words."""

    device: Device
    health: str
    unknown: tuple[str, ...] = ()
    """What its driver does not tell."""
    entry: Entry | None = None


def main(argv: Sequence[str]) -> int:
    """`goodrun devices [--json] [--health-policy FILE] [--explain XID]`, `… release GPU`, `… quarantine GPU`; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        print(_answer(args))
    except GoodrunError as e:
        print(f"goodrun devices: {e}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="goodrun devices", description="Show this node's GPUs, their health now, and those set aside.")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument("--health-policy", type=Path, metavar="FILE", help="another policy than the one that comes with goodrun")
    parser.add_argument("--explain", metavar="XID", help="say what is done about an XID, or about a condition such as query-hangs, and why")
    actions = parser.add_subparsers(dest="action", metavar="{release,quarantine}")
    release = actions.add_parser("release", help="let a GPU back in; a job that runs re-tests it first")
    release.add_argument("gpu", metavar="GPU", help="its number or UUID, or the beginning of that")
    quarantine = actions.add_parser("quarantine", help="set a GPU aside; jobs that run on it go on without it")
    quarantine.add_argument("gpu", metavar="GPU", help="its number or UUID, or the beginning of that")
    quarantine.add_argument("--reason", default="set aside by hand", help="why")
    quarantine.add_argument("--hours", type=float, help="until it may be re-tested (default: for good)")
    return parser


def _answer(args: argparse.Namespace) -> str:
    policy = load(args.health_policy)
    if args.explain is not None:
        return explain(policy, args.explain)
    ledger = Ledger.of_node(os.environ)
    if args.action is not None:
        return _change(args, ledger, policy)
    entries = ledger.read()
    found, why_not = ask(policy, os.environ)
    known = [replace(h, entry=entries.pop(h.device.uuid, None)) for h in found]
    lost = "not known: the driver does not find it"
    gone = [Health(device=Device(uuid=e.device, name=e.name), health=lost, entry=e) for e in entries.values()]
    return _json(known + gone, why_not) if args.json else _table(known + gone, why_not)


def ask(policy: HealthPolicy, environ: Mapping[str, str]) -> tuple[list[Health], str]:
    """Every GPU's health after one round of questions, and why there may be none."""
    prober = ProberProcess(policy.every_s, policy.deadline_s, environ)
    prober.start()
    devices: dict[str, Device] | None = None
    reports: dict[str, Report] = {}
    try:
        end = time.monotonic() + _ANSWER_WITHIN_S
        while time.monotonic() < end and (devices is None or reports.keys() < devices.keys()):
            for heard in prober.read():
                if isinstance(heard, Found):
                    devices = devices or {d.uuid: d for d in heard.devices}
                elif isinstance(heard, Report):
                    reports.setdefault(heard.device, heard)
                elif isinstance(heard, Trouble) and not heard.asks:
                    return [], heard.text
            time.sleep(_LOOK_S)  # the pipe is read without waiting
    finally:
        prober.close()
    if devices is None:
        return [], f"the driver has not answered within {_ANSWER_WITHIN_S:.0f} s: the GPUs' health is not known"
    return [_health(d, reports.get(d.uuid)) for d in devices.values()], ""


def _health(device: Device, report: Report | None) -> Health:
    if report is None:
        return Health(device=device, health="not known: the driver has not answered about it")
    if wrong := findings(report, report, 0.0):
        return Health(device=device, health="; ".join(f"{f.name} ({f.evidence})" for f in wrong), unknown=report.unknown())
    told = sum(a.told is Told.VALUE for a in report.answers.values())
    return Health(device=device, health="nothing found" if told > 1 else "not known: it tells nothing", unknown=report.unknown())


def explain(policy: HealthPolicy, what: str) -> str:
    """What is done about an XID or a condition, and on which grounds."""
    if what.isdigit():
        finding = xid_finding("", int(what), None)
    elif what in policy.conditions:
        finding = Finding(device="", condition=what)
    else:
        raise UsageError(f"--explain {what!r} is neither the number of an XID nor one of {', '.join(policy.conditions)}")
    rule = policy.rule(finding)
    verdict = judge(policy, [(0.0, finding)])
    lines = [f"{verdict.reason}: {_DOES[rule.do.name]}"]
    if rule.then is not None:
        lines.append(f"time {rule.strikes} within {rule.within_s:g} s on one GPU: {_DOES[rule.then.name]}")
    if rule.alone is not None:
        lines.append(f"in a job of one GPU: {_DOES[rule.alone.name]}")
    if finding.xid is not None:
        lines.append("where the driver gives its own recovery action (NVML field 230), that is done instead:")
        lines += [f"  {n} {r.meaning}: {r.do.name}" for n, r in sorted(policy.recovery_actions.items())]
    lines.append(f"said in {policy.source}; another file: --health-policy FILE")
    return "\n".join(lines)


_DOES = {
    "LOG": "LOG, nothing is done but to write it down",
    "RESTART": "RESTART, the script starts again on the same GPUs: it is not the GPU's fault",
    "SHED": "SHED, the GPU is set aside, the job goes on without it, and it is re-tested after its term",
    "DRAIN": "DRAIN, the job ends with status 69: no GPU of this node is to be used",
    "PERM": "PERM, the GPU is set aside for good; only `goodrun devices release` lets it back in",
}


def _change(args: argparse.Namespace, ledger: Ledger, policy: HealthPolicy) -> str:
    known = {e.device: Device(uuid=e.device, name=e.name) for e in ledger.read().values()}
    if args.gpu not in known:
        known |= {h.device.uuid: h.device for h in ask(policy, os.environ)[0]}
    device = _named(args.gpu, list(known.values()))
    now, by = time.time(), getpass.getuser()
    if args.action == "release":
        ledger.release(device.uuid, now, by)
        return f"{device.uuid} is let back in; a job that runs re-tests it first"
    until = None if args.hours is None else now + args.hours * 3600

    def set_aside(before: Entry | None) -> Entry:
        offences = before.offences if before is not None else 0
        return Entry(device=device.uuid, name=device.name, since=now, until=until, offences=offences, reason=args.reason, by=by)

    ledger.change(device.uuid, set_aside)
    return f"{device.uuid} is set aside {_until(until)}; jobs that run on it go on without it"


def _named(word: str, devices: list[Device]) -> Device:
    fits = [d for d in devices if (word.isdigit() and d.index == int(word)) or d.uuid.lower().startswith(word.lower())]
    if len(fits) != 1:
        what = f"fits {len(fits)} GPUs" if fits else "is no GPU of this node, nor one in its ledger"
        raise UsageError(f"{word!r} {what}; `goodrun devices` lists them")
    return fits[0]


def _table(devices: list[Health], why_not: str) -> str:
    lines = [why_not] if why_not else []
    for h in devices:
        number = str(h.device.index) if h.device.index >= 0 else "-"
        lines.append(f"{number:>3}  {h.device.uuid}  {h.device.name or '-'}  {h.health}")
        if h.unknown:
            lines.append(f"     not told by its driver: {', '.join(h.unknown)}")
        if h.entry is not None and h.entry.out:
            who = f"{h.entry.by}, offence {h.entry.offences}"
            lines.append(f"     SET ASIDE {_until(h.entry.until)}: {h.entry.reason} ({who}) {h.entry.evidence}".rstrip())
    return "\n".join(lines or ["the driver counts no GPU here, and none is set aside"])


def _until(until: float | None) -> str:
    return "for good" if until is None else f"until {datetime.fromtimestamp(until):%Y-%m-%d %H:%M:%S}"


def _json(devices: list[Health], why_not: str) -> str:
    body: list[dict[str, Any]] = [asdict(h) for h in devices]
    return json.dumps({"schema": JSON_SCHEMA, "devices": body, "why_none": why_not}, indent=2)
