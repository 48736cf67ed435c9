"""Which of an attempt's ranks died first, and what it left behind."""

from __future__ import annotations

import json
import re
import select
import time
from collections.abc import Sequence
from pathlib import Path

from .workers import Rank

_CONNECTION_LOST = re.compile(r"(gloo|nccl|Dist\w*Error).*(connect|closed|reset|refused|broken pipe|remote process)", re.IGNORECASE)
_DIES_WITHIN_S = 0.2
_ENDS_WITHIN_MS = 3000
"""How long an interpreter that has begun to end is waited for, where its status tells whose fault it was."""


def first_of(ranks: Sequence[Rank]) -> Rank:
    """Who was first: a rank that something killed brings its peers down with exceptions, hardly ever the other way round."""
    for r in ranks:
        r.look()
    dead = [r for r in ranks if r.code]
    first = min(dead, key=lambda r: ((r.code or 0) >= 0, r.ended_t))
    if (first.code or 0) < 0 or not lost_connection(first):
        return first
    # one that raises, or leaves, has said so before its connections close, and may take longer to end than a peer that misses it
    if raised := raised_in(ranks):
        return min(raised, key=lambda r: (r.code is None, r.ended_t))
    leaving = [r for r in ranks if (r.code or 0) >= 0 and r.page.read().leaving_t]
    if leaving and (left := min(leaving, key=lambda r: r.page.read().leaving_t)) is not first:
        _await_end(left)
        return left if left.code else first
    return _dying(ranks) or first


def raised_in(ranks: Sequence[Rank]) -> list[Rank]:
    """The ranks that have left an exception of their own behind; they may not have ended yet, and may never."""
    return [r for r in ranks if r.code != 0 and exception_of(r)[0] and not lost_connection(r)]


def lost_connection(r: Rank) -> bool:
    """Whether the exception that a rank left behind only says that a peer is gone."""
    return bool(_CONNECTION_LOST.search(exception_of(r)[0].partition("\n")[0]))


def exception_of(r: Rank) -> tuple[str, str]:
    """The exception a rank left behind (its line, then the traceback), and the file where more of it is."""
    where = r.stderr_file
    try:
        body = json.loads(Path(r.error_file).read_text())["message"]
        return (f"{body['message']}\n{body['extraInfo']['py_callstack']}", where) if isinstance(body, dict) else (str(body), where)
    except (OSError, ValueError, KeyError, TypeError):
        return "", where


def _dying(ranks: Sequence[Rank]) -> Rank | None:
    """A rank that a signal kills loses its connections a moment before it has ended; on a busy machine a peer may end in between."""
    end = time.monotonic() + _DIES_WITHIN_S
    while (left := end - time.monotonic()) > 0 and (alive := {r.pidfd: r for r in ranks if r.code is None}):
        poll = select.poll()
        for fd in alive:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(left * 1000):
            alive[fd].look()
            if (alive[fd].code or 0) < 0:
                return alive[fd]
    return None


def _await_end(r: Rank) -> None:
    poll = select.poll()
    poll.register(r.pidfd, select.POLLIN)
    poll.poll(_ENDS_WITHIN_MS)
    r.look()
