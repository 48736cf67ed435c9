"""Reads a record that is still being written, and what other nodes tell of theirs: what is there, then what comes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..events import Event, RoundFormed
from ..journal import FILE_NAME, OTHERS_NAME, parse_line, read_thinned
from ..merging import Part, Place, merged, others, own_parts, parse_told, placed

_OLD_PROGRESS_LINES = 6_000  # a record of months opens in a moment; what is added later is read in full


class Follower:
    """One reader of one record. It only reads: the run that is watched never waits for it."""

    def __init__(self, run_dir: Path) -> None:
        """Raises OSError if the record cannot be read."""
        self._run_dir = run_dir
        self._offset = _whole_lines(run_dir / FILE_NAME)
        self._others_offset = 0
        self._newest: dict[str, int] = {}
        self._parts: dict[str, Part] = {}
        """Of each agent what tells its place among the others."""
        self._places: dict[str, Place] = {}

    def so_far(self) -> list[Event]:
        """Everything that was there when the follower was made."""
        own, told = own_parts(read_thinned(self._run_dir, _OLD_PROGRESS_LINES, upto=self._offset)), others(self._told())
        for part in [*own, *told]:
            self._parts.setdefault(part.agent, Part(agent=part.agent, events=_telling(part.events), own=part.own))
        if not told:
            return [e for part in own for e in part.events]
        self._places = placed(self._parts.values())
        return merged([*own, *told])

    def news(self) -> list[Event]:
        """What has been added since; a line that is still being written comes next time."""
        added, self._offset = _added(self._run_dir / FILE_NAME, self._offset)
        events = [e for line in added if (e := parse_line(line)) is not None]
        for agent, _, event in self._told():
            if agent not in self._parts:
                self._parts[agent] = Part(agent=agent, events=[event])
                self._places = placed(self._parts.values()) | self._places
            if not self._parts[agent].own:
                events.append(self._places[agent].fit(event))
        return events

    def _told(self) -> Iterator[tuple[str, int, Event]]:
        """What other nodes have told since, each line once."""
        path = self._run_dir / OTHERS_NAME
        if not path.exists():
            return
        added, self._others_offset = _added(path, self._others_offset)
        for line in added:
            if (told := parse_told(line)) is not None and told[1] > self._newest.get(told[0], -1):
                self._newest[told[0]] = told[1]
                yield told


def _telling(events: list[Event]) -> list[Event]:
    return [events[0], *(e for e in events if isinstance(e, RoundFormed)), events[-1]]


def _added(path: Path, offset: int) -> tuple[list[bytes], int]:
    """The whole lines after `offset`, and where they end."""
    with open(path, "rb") as f:
        f.seek(offset)
        added = f.read()
    whole = added[: added.rfind(b"\n") + 1]
    return whole.splitlines(), offset + len(whole)


def _whole_lines(path: Path) -> int:
    """How many bytes the complete lines of a file take."""
    with open(path, "rb") as f:
        end = f.seek(0, os.SEEK_END)
        while end:
            begin = max(end - 65536, 0)
            f.seek(begin)
            cut = f.read(end - begin).rfind(b"\n")
            if cut >= 0:
                return begin + cut + 1
            end = begin
    return 0
