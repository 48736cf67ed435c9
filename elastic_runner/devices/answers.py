"""What a device says of itself: every query's answer is a value, or one of the three ways of not having one. None of those is "healthy"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

GPU_LOST = 15
RESET_REQUIRED = 16
NOT_SUPPORTED = (3, 13, 25)
"""The driver's codes for: not on this device, not in this library, a structure that it does not know."""


class Told(str, Enum):
    """How a query went."""

    VALUE = "value"
    UNSUPPORTED = "unsupported"  # the device or its driver does not know the question
    ERROR = "error"  # it should know, and failed
    HUNG = "hung"  # it did not come back within the deadline


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One query's answer. `code` and `text` are the driver's, where it gave no value."""

    told: Told
    value: int = 0
    code: int = 0
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Who a device is; `index` is where the driver counted it at the prober's start."""

    uuid: str
    name: str = ""
    index: int = -1
    instances: tuple[str, ...] = ()
    """UUIDs of its MIG instances."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What is in use of a device's memory, in bytes, and by which processes, as far as the driver names them."""

    used: int
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """All answers of one device in one round, by query."""

    device: str
    answers: Mapping[str, Answer] = field(default_factory=dict)

    def value(self, query: str) -> int | None:
        """The query's value; None if it has none, whatever the reason."""
        answer = self.answers.get(query)
        return answer.value if answer is not None and answer.told is Told.VALUE else None

    def failed(self) -> Iterator[tuple[str, Answer]]:
        """The queries that ended in an error."""
        return ((query, a) for query, a in self.answers.items() if a.told is Told.ERROR)

    def unknown(self) -> tuple[str, ...]:
        """The queries that this device or driver does not support."""
        return tuple(query for query, a in self.answers.items() if a.told is Told.UNSUPPORTED)


def answers_to_json(answers: Mapping[str, Answer]) -> dict[str, list[Any]]:
    """For the prober's pipe."""
    return {query: [a.told.value, a.value, a.code, a.text] for query, a in answers.items()}


def answers_from_json(body: Mapping[str, list[Any]]) -> dict[str, Answer]:
    """What `answers_to_json` wrote."""
    return {query: Answer(told=Told(told), value=int(v), code=int(c), text=str(text)) for query, (told, v, c, text) in body.items()}
