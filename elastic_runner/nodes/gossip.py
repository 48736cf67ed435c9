"""One agent's part in passing the agents' records on: members tell their leader, the leader tells its members."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .link import Link
from .messages import Have, Lines, Message
from .tale import Line, Reader, Tale

_FRAME = 1 << 16
"""Bytes for one reader at a time, once it has read what was said before: a record must not delay the signs of life."""
_TURN = 1 << 19
"""Bytes for all of them in one turn of the loop."""


class Gossip:
    """Touched by the loop's thread alone."""

    def __init__(self) -> None:
        self.keep: Callable[[Sequence[Line]], object] = lambda lines: None
        """Is given what others have told; must not block."""
        self._tale = Tale()
        self._greeted: set[int] = set()
        self._readers: dict[int, Reader] = {}

    def own(self, lines: Sequence[Line]) -> None:
        """Our own record has grown."""
        for line in lines:
            self._tale.add(line)

    def greet(self, link: Link) -> None:
        """Begin to exchange what we know with the other side of a link."""
        if link.number not in self._greeted:
            self._greeted.add(link.number)
            link.say(Have(tuple(f"{agent} {n}" for agent, n in self._tale.newest.items())))

    def got(self, link: Link, message: Message) -> bool:
        """Take what is meant for us; False for all else."""
        if isinstance(message, Have):
            self.greet(link)
            numbers = (one.split(" ") for one in message.newest)
            self._readers[link.number] = Reader(had={agent: int(n) for agent, n in numbers})
        elif isinstance(message, Lines):
            had = self._readers[link.number].had if link.number in self._readers else {}
            lines = [_line(text) for text in message.lines]
            had.update((line.agent, line.n) for line in lines)
            self.keep([line for line in lines if self._tale.add(line)])
        return isinstance(message, Have | Lines)

    def pump(self, links: dict[int, Link]) -> None:
        """Say to each reader what is new to it, as far as there is room."""
        room = _TURN
        for number, reader in list(self._readers.items()):
            if number not in links:
                del self._readers[number]
                self._greeted.discard(number)
                continue
            if room <= 0 or not self._tale.is_news_for(reader) or links[number].connection.waits_to_write:
                continue
            if told := self._tale.tell(reader, min(room, _FRAME)):
                links[number].say(Lines(tuple(f"{x.agent} {x.n} {int(x.progress)} {x.text}" for x in told)))
                room -= sum(len(x.text) for x in told)


def _line(text: str) -> Line:
    agent, n, progress, event = text.split(" ", 3)
    return Line(agent, int(n), event, progress == "1")
