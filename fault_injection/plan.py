"""A chaos plan: who is hurt, how and when, as frozen entries read from a short text; pure but for reading the plan's file.

An entry is `kind:target@moment`, entries are parted by `;`, and a moment is a step of the job or a time since the run began:

    kill:rank=1@step=20; hang:rank=2@40s; exit:rank=0,code=3@step=50; slot-lost:slot=3@step=60
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .kinds import KINDS

CHAOS_VARIABLE = "GOODRUN_CHAOS"
"""The plan as a worker gets it: `to_env` of what is left of it."""
RUN_STARTED_VARIABLE = "GOODRUN_RUN_STARTED_MONO"
"""The monotonic second at which the run (not the attempt) began."""
SLOT_VARIABLE = "GOODRUN_SLOT"
"""The device slot that a worker is bound to."""

MAX_FAULTS = 63  # a rank tells which entries fired as bits of one signed 64-bit word

EXAMPLE = "kill:rank=1@step=20; hang:rank=2@40s; exit:rank=0,code=3@step=50; slot-lost:slot=3@step=60"
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")


class ChaosError(ValueError):
    """The chaos plan cannot be carried out as written; the user's to mend, before anything is started."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of a plan: exactly one of `rank` and `slot`, and exactly one of `at_step` and `at_s`, is set."""

    index: int
    kind: str
    rank: int | None = None
    slot: int | None = None
    at_step: int | None = None
    at_s: float | None = None
    code: int = 1
    factor: int = 1
    """How many times as long a slow rank's steps take."""
    for_s: float | None = None
    """How long a device's fault lasts; None is for good."""
    text: str = ""

    @property
    def from_outside(self) -> bool:
        """The supervisor inflicts it; all others are carried out by the rank itself, after a step."""
        return self.at_s is not None and KINDS[self.kind].from_outside


def parse_plan(text_or_path: str) -> tuple[Fault, ...]:
    """Read a plan from its text, or from the YAML file of that name (.yaml or .yml: a list of the same entries, or of mappings)."""
    if text_or_path.strip().endswith((".yaml", ".yml")):
        entries = _read_yaml(Path(text_or_path.strip()).expanduser())
    else:
        entries = [entry.strip() for entry in text_or_path.split(";") if entry.strip()]
    if not entries:
        raise ChaosError(f"the chaos plan {text_or_path!r} has no entries; write some, as in {EXAMPLE!r}.")
    if len(entries) > MAX_FAULTS:
        raise ChaosError(f"the chaos plan has {len(entries)} entries and at most {MAX_FAULTS} are possible; split it over several runs.")
    return tuple(_parse_entry(index, entry) for index, entry in enumerate(entries))


def check_plan(plan: Sequence[Fault], world_size: int, slots: Collection[int]) -> None:
    """Refuse entries that can never fire: a rank or a device slot that the job does not have."""
    for fault in plan:
        if fault.rank is not None and fault.rank >= world_size:
            raise ChaosError(
                f"chaos entry {fault.text!r} names rank {fault.rank}, but this job has {world_size} "
                f"{'rank' if world_size == 1 else 'ranks'}; name one of 0 to {world_size - 1}."
            )
        if fault.slot is not None and fault.slot not in slots:
            known = ", ".join(str(slot) for slot in sorted(slots))
            raise ChaosError(f"chaos entry {fault.text!r} names slot {fault.slot}, but this node has only {known}; name one of these.")


def remaining(plan: Sequence[Fault], fired: Collection[int]) -> tuple[Fault, ...]:
    """What has not fired yet."""
    return tuple(fault for fault in plan if fault.index not in fired)


def due(plan: Sequence[Fault], fired: Collection[int], elapsed_s: float) -> tuple[Fault, ...]:
    """What the supervisor has to inflict now, `elapsed_s` seconds into the run, the earliest first."""
    ripe = [(f.at_s, f.index, f) for f in remaining(plan, fired) if f.from_outside and f.at_s is not None and f.at_s <= elapsed_s]
    return tuple(fault for _, _, fault in sorted(ripe, key=lambda item: item[:2]))


def for_rank(plan: Sequence[Fault], rank: int, slot: int | None = None) -> tuple[Fault, ...]:
    """What this rank, bound to this device slot, has to inflict on itself."""
    return tuple(f for f in plan if not f.from_outside and (f.rank == rank or (f.slot is not None and f.slot == slot)))


def to_env(plan: Sequence[Fault]) -> str:
    """The plan as the value of an environment variable."""
    return json.dumps([asdict(fault) for fault in plan])


def from_env(value: str) -> tuple[Fault, ...]:
    """The plan that `to_env` wrote."""
    return tuple(Fault(**fields) for fields in json.loads(value))


def _parse_entry(index: int, entry: str) -> Fault:
    head, at, moment = entry.partition("@")
    kind, _, target = (part.strip() for part in head.partition(":"))
    if kind not in KINDS:
        raise ChaosError(f"chaos entry {entry!r} has the unknown kind {kind!r}; known are {', '.join(KINDS)}, as in {EXAMPLE!r}.")
    if not at or not moment.strip():
        raise ChaosError(f"chaos entry {entry!r} does not say when; end it with @step=N or a time such as @40s, as in {EXAMPLE!r}.")
    target, for_s = _parse_for(entry, kind, target)
    numbers = _parse_target(entry, kind, target)
    at_step, at_s = _parse_moment(entry, moment.strip())
    return Fault(
        index=index,
        kind=kind,
        rank=numbers.get("rank"),
        slot=numbers.get("slot"),
        at_step=at_step,
        at_s=at_s,
        code=numbers.get("code", 1),
        factor=numbers.get("factor", 1),
        for_s=for_s,
        text=entry,
    )


def _parse_for(entry: str, kind: str, target: str) -> tuple[str, float | None]:
    """The target without `for=TIME`, and that time in seconds."""
    parts = [part.strip() for part in target.split(",")]
    times = [part.partition("=")[2].strip() for part in parts if part.partition("=")[0].strip() == "for" and "for" in KINDS[kind].keys]
    if not times:
        return target, None
    duration = _DURATION.fullmatch(times[0])
    if len(times) > 1 or duration is None:
        raise ChaosError(f"chaos entry {entry!r} has for={', '.join(times)}, which is not one time; write for=3s, for=500ms or for=2m.")
    rest = ",".join(part for part in parts if part.partition("=")[0].strip() != "for")
    return rest, float(duration[1]) * _SECONDS[duration[2]]


def _parse_target(entry: str, kind: str, target: str) -> dict[str, int]:
    allowed = tuple(key for key in KINDS[kind].keys if key != "for")
    numbers: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in target.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in allowed:
            raise ChaosError(f"chaos entry {entry!r} has the unknown key {key!r}; {kind} takes {' and '.join(allowed)}, as in {EXAMPLE!r}.")
        if key in numbers:
            raise ChaosError(f"chaos entry {entry!r} gives {key} twice; write one entry for each, parted by ';'.")
        numbers[key] = _whole_number(entry, key, value)
    if len(numbers.keys() & {"rank", "slot"}) != 1:
        wanted = "either rank=R or slot=S" if "slot" in allowed else "rank=R"
        raise ChaosError(f"chaos entry {entry!r} does not say who; {kind} needs {wanted}, as in {EXAMPLE!r}.")
    numbers = {**(KINDS[kind].needs or {}), **numbers}
    if kind == "exit" and numbers["code"] > 255:
        raise ChaosError(f"chaos entry {entry!r} has the exit code {numbers['code']}; a process can only exit with 0 to 255.")
    return numbers


def _parse_moment(entry: str, moment: str) -> tuple[int | None, float | None]:
    key, equals, value = (part.strip() for part in moment.partition("="))
    if equals:
        if key != "step":
            raise ChaosError(f"chaos entry {entry!r} has the unknown moment {moment!r}; write @step=N or a time such as @40s.")
        return _whole_number(entry, "step", value), None
    duration = _DURATION.fullmatch(moment)
    if duration is None:
        raise ChaosError(f"chaos entry {entry!r} has the moment {moment!r}, which is no time; write @step=N, @40s, @1.5s, @500ms or @2m.")
    return None, float(duration[1]) * _SECONDS[duration[2]]


def _whole_number(entry: str, key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise ChaosError(f"chaos entry {entry!r} has {key}={value}, which is no whole number from 0 on; write it as in {EXAMPLE!r}.")
    return int(value)


def _read_yaml(path: Path) -> list[str]:
    import yaml  # here, because every worker of a run with chaos imports this module and none reads a file

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


def _yaml_entry(path: Path, item: object) -> str:
    if isinstance(item, str):
        return item.strip()
    if isinstance(item, Mapping) and len(item) == 1:
        [(kind, fields)] = item.items()
        if isinstance(fields, Mapping):
            moments = [f"step={value}" if key == "step" else str(value) for key, value in fields.items() if key in ("step", "at")]
            target = ",".join(f"{key}={value}" for key, value in fields.items() if key not in ("step", "at"))
            if len(moments) > 1:
                raise ChaosError(f"the chaos plan {str(path)!r} has an entry with both step and at ({item!r}); keep one of them.")
            return f"{kind}:{target}" + "".join(f"@{moment}" for moment in moments)
    raise ChaosError(
        f"the chaos plan {str(path)!r} has the entry {item!r}; write 'kill:rank=1@step=20', "
        "{kill: {rank: 1, step: 20}} or {hang: {rank: 2, at: 40s}}."
    )
