"""What agents say to each other, and its form as JSON."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, fields
from typing import Any, TypeVar

from .rounds import Known, Place, Round
from .standing import NOTHING, Counted


@dataclass(frozen=True)
class Message:
    """Anything that is said."""


@dataclass(frozen=True)
class Hello(Message):
    """To a leader, or one that would be: I follow you. `held` is my endpoint or -1.

    `gone`: leaders that ended while they led me; `lost`: those that fell silent; `counted`: what the last round was told with.
    """

    node: str
    name: str
    held: int
    known: Known
    gone: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    counted: Counted = NOTHING


@dataclass(frozen=True)
class Withdraw(Message):
    """I follow another one now."""


@dataclass(frozen=True)
class Status(Message):
    """From the holder of an endpoint: whether it leads the job."""

    node: str
    leading: bool


@dataclass(frozen=True)
class Ping(Message):
    """From a leader. `heard`: your newest Pong; `age_s`: how old its knowledge of a majority; `wall`: its clock."""

    n: int
    heard: int
    leading: bool
    age_s: float
    running: bool
    wall: float


@dataclass(frozen=True)
class Pong(Message):
    """The answer to Ping `n`: a count of one's own, the newest durable checkpoint, how far one's clock is behind the leader's."""

    n: int
    m: int
    durable: int
    behind_s: float = 0.0


@dataclass(frozen=True)
class Ready(Message):
    """My ranks are stopped; I wait for the next round. `next` is the least generation that I can accept.

    `distrusted`: checkpoints that are not to be restored from, in the words of checkpoint/distrust.py; `turn`: numbers went bad here, all
    ranks are to come to other devices.
    `keeper`: the port at which my keeper takes copies of snapshots, 0 for none; `copies`: to how many nodes it sends its own.
    """

    next: int
    started: int
    address: str
    port: int
    size: int
    role: str
    hint: int
    distrusted: tuple[str, ...] = ()
    turn: bool = False
    keeper: int = 0
    copies: int = 0


@dataclass(frozen=True)
class Change(Message):
    """Stop your ranks and get ready: there will be another round."""

    reason: str


@dataclass(frozen=True)
class Propose(Message):
    """Would this be a round? `counted` is for the leader after me."""

    round: Round
    counted: Counted = NOTHING


@dataclass(frozen=True)
class Ack(Message):
    """Yes, and I have not acknowledged anything of that generation or later."""

    generation: int


@dataclass(frozen=True)
class Commit(Message):
    """All have acknowledged: begin. `started` is when the run began, for the fence of checkpoints; `reason` why there is a new round.

    `distrusted` are the checkpoints that any of us distrusts.
    `keepers`: those of the next nodes, "ADDRESS PORT", to which this one's sends copies of its snapshots.
    """

    generation: int
    place: Place
    started: int
    reason: str
    distrusted: tuple[str, ...] = ()
    keepers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Leave(Message):
    """I go and shall not come back under this id. `done`: my ranks have all ended with 0. `closes`: nobody else need go on, either."""

    reason: str
    done: bool = False
    closes: bool = False


@dataclass(frozen=True)
class Closed(Message):
    """The job is over."""

    reason: str
    ok: bool


@dataclass(frozen=True)
class Refused(Message):
    """You are not to take part."""

    reason: str


@dataclass(frozen=True)
class Have(Message):
    """What I know of the agents' records, "AGENT N" for each; from now on, tell me what I lack."""

    newest: tuple[str, ...]


@dataclass(frozen=True)
class Lines(Message):
    """Lines of agents' records: "AGENT N P EVENT", P being 1 for mere progress, EVENT its JSON."""

    lines: tuple[str, ...]


_KINDS: dict[str, type[Message]] = {
    c.__name__: c for c in (Hello, Withdraw, Status, Ping, Pong, Ready, Change, Propose, Ack, Commit, Leave, Closed, Refused, Have, Lines)
}


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "float": (float, int),
    "Counted": (Counted,),
    "Known": (Known,),
    "Place": (Place,),
    "Round": (Round,),
}


class Garbled(ValueError):
    """Bytes that are no message: a fault of the sender's, or of another version; the connection is closed."""


def encode(message: Message) -> bytes:
    """A message as bytes."""
    body = {f.name: _plain(getattr(message, f.name)) for f in fields(message)}
    return json.dumps([type(message).__name__, body], separators=(",", ":")).encode()


def decode(raw: bytes) -> Message:
    """The message that `encode` made of it; raises Garbled for anything else."""
    try:
        name, body = json.loads(raw)
        cls = _KINDS[name]
        if set(body) != {f.name for f in fields(cls)}:
            raise Garbled(f"{name} with the fields {sorted(body)}")
        return _all_fit(cls(**{k: _made(k, v) for k, v in body.items()}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise Garbled(str(e)) from e


def _plain(value: Any) -> Any:
    if isinstance(value, Round):
        return [value.generation, " ".join(value.nodes), value.leader]
    if isinstance(value, Known):
        return [None if value.committed is None else _plain(value.committed), [_plain(r) for r in value.pending]]
    return list(astuple(value)) if isinstance(value, Place | Counted) else value


def _made(key: str, value: Any) -> Any:
    if key == "round":
        return _round(value)
    if key == "known":
        committed, pending = value
        return Known(None if committed is None else _round(committed), tuple(_round(r) for r in pending))
    if key == "counted":
        return _all_fit(Counted(*map(tuple, value)))
    if key == "place":
        return _all_fit(Place(*value))
    return tuple(value) if isinstance(value, list) else value


def _round(body: Any) -> Round:
    generation, nodes, leader = body
    return _all_fit(Round(generation, tuple(nodes.split(" ")), leader))


T = TypeVar("T")


def _all_fit(made: T) -> T:
    for f in fields(made):  # type: ignore[arg-type]
        if not _fits(getattr(made, f.name), str(f.type)):
            raise Garbled(f"{type(made).__name__}.{f.name} is {getattr(made, f.name)!r}")
    return made


def _fits(value: Any, annotation: str) -> bool:
    if kinds := _TYPES.get(annotation):
        return isinstance(value, kinds) and (annotation == "bool" or type(value) is not bool)
    return isinstance(value, tuple) and all(isinstance(v, str) for v in value)
