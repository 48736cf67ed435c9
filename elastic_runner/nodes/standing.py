"""Which machines cost the job more than they bring: those that come and are lost, again and again, before a checkpoint was made with them.

Every round's proposal tells all members what its leader has counted, and they tell the next leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_IN_VAIN = 3
_SOON_S = 60.0


@dataclass(frozen=True)
class Counted:
    """What a leader has counted, in words for the network.

    `new`: "NODE STEP", nodes with which no checkpoint was made since they came, and the newest one then; `in_vain`: "N MACHINE", how often
    in a row a machine was lost like that.
    """

    new: tuple[str, ...] = ()
    in_vain: tuple[str, ...] = ()


NOTHING = Counted()


class Standing:
    """One leader's count."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}
        """The newest durable checkpoint when a node came, and when that was; of those that it is known of."""
        self._in_vain: dict[str, int] = {}

    def refuses(self, machine: str) -> str:
        """Why a machine is not to be taken in; empty if it may."""
        if self._in_vain.get(machine, 0) < _IN_VAIN:
            return ""
        return f"{machine} was lost {_IN_VAIN} times in a row before a checkpoint was made with it; the job goes on without it"

    def began(self, nodes: Iterable[str], durable: int, now: float) -> None:
        """A round of `nodes` is under way."""
        self._since = {n: self._since.get(n, (durable, now)) for n in nodes}

    def lost(self, node: str, machine: str, durable: int, heard_t: float, *, alone: bool) -> None:
        """A node is lost. `alone`: it was the only one of its machine, as always but in tests."""
        before, came_t = self._since.get(node, (-1, float("-inf")))
        in_vain = durable <= before if before >= 0 else heard_t - came_t < _SOON_S
        self._in_vain[machine] = self._in_vain.get(machine, 0) + 1 if in_vain and alone else 0

    def counted(self, nodes: Iterable[str], durable: int, now: float) -> Counted:
        """What is to be told with a round of `nodes`."""
        since = ((n, *self._since.get(n, (durable, now))) for n in nodes)
        return Counted(
            new=tuple(f"{n} {step}" for n, step, came_t in since if (step >= durable if step >= 0 else now - came_t < _SOON_S)),
            in_vain=tuple(f"{count} {machine}" for machine, count in self._in_vain.items() if count),
        )

    def learn(self, told: Counted, now: float) -> None:
        """Go on from what the last leader had counted."""
        self._since = {node: (int(step), now) for node, _, step in (x.rpartition(" ") for x in told.new)}
        self._in_vain = {machine: int(count) for count, _, machine in (x.partition(" ") for x in told.in_vain)}
