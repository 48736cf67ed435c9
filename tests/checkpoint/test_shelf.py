"""What a keeper decides about the snapshots of a directory, without a keeper."""

from __future__ import annotations

import pytest

from goodrun.checkpoint.fence import Token
from goodrun.checkpoint.shelf import Shelf, Snapshot, State

OLD, NEW = Token(0, 1), Token(0, 2)


@pytest.mark.parametrize("token", [OLD, NEW])
def test_what_a_newer_durable_one_has_overtaken_is_not_written_after_it(token: Token) -> None:
    late = Snapshot(1, 2, OLD, "l", state=State.WAITING, not_before=1e9)
    after = Snapshot(3, 6, token, "l", state=State.WAITING)
    shelf = Shelf("d", snapshots=[late, Snapshot(2, 4, token, "l", state=State.WRITING), after])
    assert shelf.overtaken() == []
    shelf.snapshots[1].state = State.DURABLE
    assert shelf.overtaken() == [late]
