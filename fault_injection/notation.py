"""Reads a chaos plan from a short text or a YAML file; every mistake is one sentence that names the entry and a way out.

An entry is `kind:target@moment`, entries are parted by `;`. A moment is a step of the job, a time since the run began, or a phase; an
attempt may follow, before which the entry does not fire:

    kill:rank=1@step=20; hang:rank=2@40s; exit:rank=0,code=3@step=50; kill:rank=1@phase=save,step=30; segv:rank=0@phase=restore,attempt=1

`random:mtbf=30s,seed=7,of=kill|hang,n=10` becomes ten entries at random moments; the same seed gives the same ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .kinds import KINDS, By
from .network_faults import MAX_DELAY_MS
from .plan import MAX_FAULTS, PHASES, ChaosError, Fault

EXAMPLE = "kill:rank=1@step=20; hang:rank=2@40s; exit:rank=0,code=3@step=50; slot-lost:slot=3@step=60"
_RANDOM_EXAMPLE = "random:mtbf=30s,seed=7,of=kill|hang,n=10"
_RANDOM_DEFAULT = ("kill", "segv", "hang", "stall")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
TIMES = {"for": "for_s", "grace": "grace_s", "by": "by_s"}
_SHORTEST_FOR_S, _LONGEST_FOR_S = 0.5, 3.0


def parse_plan(text_or_path: str, ranks: int = 1, slots: Sequence[int] = (0,)) -> tuple[Fault, ...]:
    """Read a plan from its text, or from the YAML file of that name (.yaml or .yml: a list of the same entries, or of mappings).

    `ranks` and `slots` are what random entries choose from.
    """
    if text_or_path.strip().endswith((".yaml", ".yml")):
        entries = _read_yaml(Path(text_or_path.strip()).expanduser())
    else:
        entries = [entry.strip() for entry in text_or_path.split(";") if entry.strip()]
    if not entries:
        raise ChaosError(f"the chaos plan {text_or_path!r} has no entries; write some, as in {EXAMPLE!r}.")
    entries = [single for entry in entries for single in (_drawn(entry, ranks, slots) if _kind_of(entry) == "random" else [entry])]
    if len(entries) > MAX_FAULTS:
        raise ChaosError(f"the chaos plan has {len(entries)} entries and at most {MAX_FAULTS} are possible; split it over several runs.")
    return tuple(_parse_entry(index, entry) for index, entry in enumerate(entries))


def _kind_of(entry: str) -> str:
    return entry.partition("@")[0].partition(":")[0].strip()


def _drawn(entry: str, ranks: int, slots: Sequence[int]) -> list[str]:
    """The entries that a random one stands for: exponential gaps around `mtbf` (a time, or a number of steps), targets even."""
    given = dict(part.partition("=")[::2] for part in map(str.strip, entry.partition(":")[2].split(",")) if part)
    for key in given:
        if key not in ("mtbf", "seed", "of", "n"):
            raise ChaosError(f"chaos entry {entry!r} has the unknown key {key!r}; write it as in {_RANDOM_EXAMPLE!r}.")
    mtbf = given.get("mtbf", "")
    duration = _DURATION.fullmatch(mtbf)
    if duration is None and not re.fullmatch(r"[1-9][0-9]{0,8}", mtbf):
        raise ChaosError(f"chaos entry {entry!r} has mtbf={mtbf}, neither time nor number of steps; write it as in {_RANDOM_EXAMPLE!r}.")
    mean = float(duration[1]) * _SECONDS[duration[2]] if duration else float(mtbf)
    of = [name.strip() for name in given["of"].split("|")] if given.get("of") else list(_RANDOM_DEFAULT)
    if unknown := [name for name in of if name not in KINDS]:
        raise ChaosError(f"chaos entry {entry!r} has the unknown kind {unknown[0]!r}; known are {', '.join(KINDS)}.")
    dice, at = random.Random(f"goodrun {given.get('seed', '0')}"), 0.0
    found = []
    for _ in range(_whole_number(entry, "n", given.get("n", "10"))):
        at += dice.expovariate(1 / mean)
        kind, rank, slot = dice.choice(of), dice.randrange(ranks), dice.choice(list(slots))
        seconds = dice.uniform(_SHORTEST_FOR_S, _LONGEST_FOR_S)
        keys = KINDS[kind].keys
        target = [f"slot={slot}" if "slot" in keys else f"rank={rank}"] if "rank" in keys else []
        target += [f"for={seconds:.1f}s"] if "for" in keys else []
        found.append(f"{kind}{':' if target else ''}{','.join(target)}@" + (f"{at:.1f}s" if duration else f"step={max(round(at), 1)}"))
    return found


def _parse_entry(index: int, entry: str) -> Fault:
    head, at, moment = entry.partition("@")
    kind, _, target = (part.strip() for part in head.partition(":"))
    if kind not in KINDS:
        raise ChaosError(f"chaos entry {entry!r} has the unknown kind {kind!r}; known are {', '.join(KINDS)}, as in {EXAMPLE!r}.")
    if not at or not moment.strip():
        raise ChaosError(f"chaos entry {entry!r} does not say when; end it with @step=N or a time such as @40s, as in {EXAMPLE!r}.")
    target, times = _parse_times(entry, kind, target)
    fault = Fault(index=index, kind=kind, text=entry, **_parse_target(entry, kind, target), **times, **_parse_moment(entry, moment))  # type: ignore[arg-type]
    if KINDS[kind].by is By.KEEPER and fault.at_phase not in (None, "save"):
        raise ChaosError(f"chaos entry {entry!r} has a phase in which nothing is written; {kind} takes @phase=save, a step or a time.")
    return fault


def _parse_times(entry: str, kind: str, target: str) -> tuple[str, dict[str, float]]:
    """The target without its durations, and those in seconds by the field that they belong to."""
    rest, times = [], dict[str, float]()
    for part in (part.strip() for part in target.split(",")):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in TIMES or key not in KINDS[kind].keys:
            rest.append(part)
            continue
        duration = _DURATION.fullmatch(value.removeprefix("-") if key == "by" else value)
        if duration is None or TIMES[key] in times:
            raise ChaosError(f"chaos entry {entry!r} has {key}={value}, which is not one time; write {key}=3s, {key}=500ms or {key}=2m.")
        times[TIMES[key]] = float(duration[1]) * _SECONDS[duration[2]] * (-1 if value.startswith("-") else 1)
    return ",".join(rest), times


def _parse_target(entry: str, kind: str, target: str) -> dict[str, int]:
    allowed = tuple(key for key in KINDS[kind].keys if key not in TIMES)
    numbers: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in target.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in allowed:
            takes = " and ".join(KINDS[kind].keys) or "no target"
            raise ChaosError(f"chaos entry {entry!r} has the unknown key {key!r}; {kind} takes {takes}, as in {EXAMPLE!r}.")
        if key in numbers:
            raise ChaosError(f"chaos entry {entry!r} gives {key} twice; write one entry for each, parted by ';'.")
        numbers[key] = _whole_number(entry, key, value)
    if KINDS[kind].has_target and len(numbers.keys() & {"rank", "slot"}) != 1:
        wanted = "either rank=R or slot=S" if "slot" in allowed else "rank=R"
        raise ChaosError(f"chaos entry {entry!r} does not say who; {kind} needs {wanted}, as in {EXAMPLE!r}.")
    numbers = {**(KINDS[kind].needs or {}), **numbers}
    if numbers.get("percent", 1) not in range(1, 101) or numbers.get("kib", 1) not in range(1, 1 << 20):
        raise ChaosError(f"chaos entry {entry!r} has a number out of range; percent takes 1 to 100, and kib 1 to 1048575.")
    if kind == "net-delay" and numbers["ms"] not in range(1, MAX_DELAY_MS + 1):
        raise ChaosError(f"chaos entry {entry!r} has ms={numbers['ms']}; net-delay takes 1 to {MAX_DELAY_MS} of them.")
    if kind == "exit" and numbers["code"] > 255:
        raise ChaosError(f"chaos entry {entry!r} has the exit code {numbers['code']}; a process can only exit with 0 to 255.")
    return numbers


def _parse_moment(entry: str, moment: str) -> dict[str, object]:
    """The fields of a fault that say when."""
    found: dict[str, object] = {}
    for part in (part.strip() for part in moment.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            duration = _DURATION.fullmatch(part)
            if duration is None:
                what = f"has the moment {part!r}, which is no time"
                raise ChaosError(f"chaos entry {entry!r} {what}; write @step=N, @40s, @1.5s, @500ms or @2m.")
            field, read = "at_s", float(duration[1]) * _SECONDS[duration[2]]
        elif key == "phase":
            if value not in PHASES:
                raise ChaosError(f"chaos entry {entry!r} has the phase {value!r}; there are {', '.join(PHASES)}.")
            field, read = "at_phase", value  # type: ignore[assignment]
        elif key in ("step", "attempt"):
            field, read = "at_step" if key == "step" else "from_attempt", _whole_number(entry, key, value)
        else:
            raise ChaosError(f"chaos entry {entry!r} has the unknown moment {part!r}; write @step=N, @phase=save or a time such as @40s.")
        if field in found:
            raise ChaosError(f"chaos entry {entry!r} has two moments of one sort; keep one of them.")
        found[field] = read
    if not found.keys() - {"from_attempt"} or ("at_s" in found and len(found.keys() - {"from_attempt"}) > 1):
        raise ChaosError(f"chaos entry {entry!r} needs one moment: @step=N, @phase=save (with a step, if you like) or a time such as @40s.")
    if found.get("at_phase") in ("start", "restore") and "at_step" in found:
        raise ChaosError(f"chaos entry {entry!r} has a step in a phase that has none yet; write @phase={found['at_phase']},attempt=N.")
    return found


def _whole_number(entry: str, key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise ChaosError(f"chaos entry {entry!r} has {key}={value}, which is no whole number from 0 on; write it as in {EXAMPLE!r}.")
    return int(value)


def _read_yaml(path: Path) -> list[str]:
    import yaml  # here, because no worker of a run with chaos reads a file

    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ChaosError(f"the chaos plan {str(path)!r} cannot be read: {error.strerror}; give a readable file, or {EXAMPLE!r}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ChaosError(f"the chaos plan {str(path)!r} is not YAML ({reason}); write a list of entries such as {EXAMPLE!r}.") from None
    if not isinstance(content, list):
        raise ChaosError(f"the chaos plan {str(path)!r} holds no list; write one entry per line, as in '- kill:rank=1@step=20'.")
    return [_yaml_entry(path, item) for item in content]


_MOMENTS = ("step", "at", "phase", "attempt")


def _yaml_entry(path: Path, item: object) -> str:
    if isinstance(item, str):
        return item.strip()
    if isinstance(item, Mapping) and len(item) == 1:
        [(kind, fields)] = item.items()
        if isinstance(fields, Mapping):
            moments = [str(value) if key == "at" else f"{key}={value}" for key, value in fields.items() if key in _MOMENTS]
            target = ",".join(f"{key}={value}" for key, value in fields.items() if key not in _MOMENTS)
            if {"step", "at"} <= fields.keys():
                raise ChaosError(f"the chaos plan {str(path)!r} has an entry with both step and at ({item!r}); keep one of them.")
            return f"{kind}:{target}" + (f"@{','.join(moments)}" if moments else "")
    raise ChaosError(
        f"the chaos plan {str(path)!r} has the entry {item!r}; write 'kill:rank=1@step=20', "
        "{kill: {rank: 1, step: 20}} or {hang: {rank: 2, at: 40s}}."
    )
