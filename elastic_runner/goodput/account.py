"""What the ledger comes to: time goodput, capacity goodput, ETTR, every bucket, and the last minutes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..events import Event
from .book import Book, Totals
from .buckets import GROUPS, Bucket
from .ledger import Ledger, fold_nodes

WINDOWS_S = (60, 300, 900)


@dataclass(frozen=True, kw_only=True)
class Window:
    """The goodput of the last so many seconds."""

    seconds: int
    time_goodput: float
    capacity_goodput: float


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the time of a run went. Shares are between 0 and 1; `buckets` are slot-seconds and sum to `slot_s`."""

    nodes: int
    wall_s: float
    """How long launchers were at work, of all nodes together."""
    between_s: float
    """How long none was, between two that were."""
    slot_s: float
    """The time of the clock times the slots: those in reserve and those set aside included."""
    time_goodput: float
    """The share of the time in which the slots in use did steps that were kept."""
    capacity_goodput: float
    """The share of the capacity asked for that did: a job that goes on with 7 of 8 slots has 7/8 at most."""
    ettr: float
    """As the time goodput, but of all the time since the job first began, between launchers too (Meta's effective training time ratio)."""
    buckets: dict[str, float]
    windows: tuple[Window, ...]
    uploading_s: float
    """How long checkpoints were on their way to storage while training went on: no loss."""
    redone_known: bool
    """False where an attempt does not tell whether it repeated earlier steps: then the redone work may be more."""

    straggler: str
    """Which rank held the others up, in words; empty where none did by what was measured."""
    straggling_s: float
    """The slot-seconds of productive steps in which ranks waited for it."""
    starved: str
    """What was measured of a loader that does not keep up; empty where none was caught at it."""

    def losses(self) -> list[tuple[Bucket, float]]:
        """What was not productive, largest first."""
        lost = [(Bucket(name), spent) for name, spent in self.buckets.items() if spent > 0 and name != Bucket.PRODUCTIVE]
        return sorted(lost, key=lambda item: -item[1])

    def groups(self) -> dict[str, float]:
        """Slot-seconds by group of buckets."""
        sums = dict.fromkeys(GROUPS, 0.0)
        for name, spent in self.buckets.items():
            sums[Bucket(name).group] += spent
        return {name: round(spent, 6) for name, spent in sums.items()}


def account(events: Iterable[Event]) -> Goodput:
    """The goodput that a run's events tell."""
    return balance(fold_nodes(events))


def balance(ledgers: Mapping[str, Ledger]) -> Goodput:
    """The goodput as it stands in the ledgers of all nodes."""
    books = [(ledger, ledger.settled()) for ledger in ledgers.values()]
    straggler, straggling = _straggler(ledgers)
    whole = _sum([book.totals() for _, book in books])
    between = sum(ledger.between_us for ledger, _ in books)
    return Goodput(
        nodes=len(books),
        wall_s=whole.wall / 1e6,
        between_s=between / 1e6,
        slot_s=sum(whole.spent.values()) / 1e6,
        time_goodput=_share(whole.productive, whole.wall),
        capacity_goodput=_share(whole.spent[Bucket.PRODUCTIVE], whole.asked),
        ettr=_share(whole.productive, whole.wall + between),
        buckets={bucket.value: amount / 1e6 for bucket, amount in whole.spent.items()},
        windows=tuple(_window(books, seconds) for seconds in WINDOWS_S),
        uploading_s=sum(ledger.uploading_us for ledger, _ in books) / 1e6,
        straggler=straggler,
        straggling_s=straggling,
        starved=next((ledger.starved for ledger, _ in books if ledger.starved), ""),
        redone_known=all(ledger.redone_known for ledger, _ in books),
    )


def _straggler(ledgers: Mapping[str, Ledger]) -> tuple[str, float]:
    """The rank that held its node up most, in words, and the slot-seconds that it took."""
    found = [
        (lag * ledger.stragglers.ranks, node, rank)
        for node, ledger in ledgers.items()
        for rank, lag in [ledger.stragglers.worst() or (-1, 0.0)]
    ]
    most, node, rank = max(found, default=(0.0, "", -1))
    if rank < 0:
        return "", 0.0
    where = f"local rank {rank}" + (f" of {node}" if len(ledgers) > 1 else "")
    return f"{where} is slower than its peers before each backward pass, and they wait for it", round(most, 6)


def _window(books: list[tuple[Ledger, Book]], seconds: int) -> Window:
    sums = _sum([book.totals(max(ledger.newest_us - seconds * 1_000_000, 0)) for ledger, book in books])
    return Window(
        seconds=seconds,
        time_goodput=_share(sums.productive, sums.wall),
        capacity_goodput=_share(sums.spent[Bucket.PRODUCTIVE], sums.asked),
    )


def _sum(parts: list[Totals]) -> Totals:
    return Totals(
        spent={bucket: sum(t.spent[bucket] for t in parts) for bucket in Bucket},
        wall=sum(t.wall for t in parts),
        asked=sum(t.asked for t in parts),
        productive=sum(t.productive for t in parts),
    )


def _share(part: float, whole: float) -> float:
    return min(part / whole, 1.0) if whole > 0 else 0.0
