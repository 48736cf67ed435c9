"""When a checkpoint is saved: the pure rules, by table."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodrun.checkpoint import Keep
from goodrun.checkpoint.cadence import Cadence, failure_every_s, interval_of, optimum
from goodrun.checkpoint.retention import Dated, superfluous
from goodrun.checkpoint.vouching import Word, held_to, own_word, read_word, vouched, word_of
from goodrun.progress import Page


@pytest.mark.parametrize(("every", "is_"), [(7, 7), ("30s", 30.0), ("1.5m", 90.0), ("2h", 7200.0), ("auto", None)])
def test_what_every_may_be(every: int | str, is_: object) -> None:
    """Steps, times with a unit, or "auto"."""
    assert interval_of(every) == is_


@pytest.mark.parametrize("every", [0, -3, True, "30", "0s", "often", 2.5])
def test_what_every_may_not_be(every: object) -> None:
    """All else is refused with what can be given."""
    with pytest.raises(ValueError, match="every="):
        interval_of(every)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stall", "durable", "failure", "seconds"),
    [
        (9.0, 0.0, 49.5 * 3600, 1791.0),  # Young: the square root of 2 × 9 × 178200
        (0.1, 2.0, 100.0, 10.0),  # the square root would be 4.5 s: that is more than 1 % of the time
        (0.001, 60.0, 3600.0, 60.0),  # storage takes a minute for one
    ],
)
def test_optimum(stall: float, durable: float, failure: float, seconds: float) -> None:
    """Young's interval, never above one part in a hundred of the time, never faster than storage."""
    choice = optimum(stall, durable, failure)
    assert choice.seconds == pytest.approx(seconds, rel=1e-3)
    assert stall / choice.seconds <= 0.01 + 1e-9


def test_faults_outweigh_what_is_published() -> None:
    """A run that fails every ten minutes soon saves for that, not for what large fleets have published."""
    assert failure_every_s(8, 0, 0.0) == pytest.approx(365 * 24 * 3600 / (0.17 * 8))
    assert failure_every_s(8, 5000, 5000 * 600.0) < 2 * 600 * 4


def test_times_become_steps() -> None:
    """A time is turned into a number of steps by how long steps take; all else is counting."""
    cadence = Cadence(10.0)
    passed = [n for n in range(1, 8) if cadence.passed(n, n * 0.5)]
    assert passed[0] == 5
    assert not cadence.saves, "nothing is saved to learn how long steps take"
    assert cadence.steps_for(10.0) == 20
    cadence.next_at(25)
    assert [n for n in range(8, 27) if cadence.passed(n, n * 0.5)] == [25, 26]
    assert cadence.saves
    assert cadence.steps_for(10.0) == 20, "how long steps take is known right after a save, too"
    assert cadence.steps_beyond(10.1) == 21


def test_what_is_kept() -> None:
    """The newest, those at round steps, and one in so many hours; whatever is not kept is named."""
    whole = [Dated(f"s{n}", n, n * 1800.0) for n in range(12, 0, -1)]
    assert superfluous(whole, Keep(last=2)) == [f"s{n}" for n in range(10, 0, -1)]
    assert superfluous(whole, Keep(last=1, every_steps=4)) == ["s11", "s10", "s9", "s7", "s6", "s5", "s3", "s2", "s1"]
    assert superfluous(whole, Keep(last=1, every_hours=2)) == ["s11", "s10", "s8", "s7", "s6", "s4", "s3", "s2"]
    with pytest.raises(ValueError, match="at least one"):
        Keep(last=0)


def test_what_is_no_good_takes_no_good_ones_place() -> None:
    """Of the good ones the newest stay; the others go once as many good ones are newer, whatever their step."""
    whole = [Dated(f"s{n}", n, n * 1800.0, good=n not in (8, 7, 4)) for n in range(8, 0, -1)]
    assert superfluous(whole, Keep(last=2)) == ["s4", "s3", "s2", "s1"]
    assert superfluous(whole, Keep(last=2, every_steps=2)) == ["s4", "s3", "s1"]
    assert superfluous(whole[:2], Keep(last=1)) == []


def test_what_the_numbers_vouch_for_stays() -> None:
    """The newest that is good and no later than the step vouched for, and the oldest after it; nothing more where those stay anyway."""
    whole = [Dated(f"s{n}", n, n * 1800.0, good=n != 4) for n in range(8, 0, -1)]
    assert superfluous(whole, Keep(last=1), 5) == ["s7", "s4", "s3", "s2", "s1"]
    assert superfluous(whole, Keep(last=1), 3) == ["s7", "s6", "s4", "s2", "s1"]
    assert superfluous(whole, Keep(last=2), 7) == ["s6", "s5", "s4", "s3", "s2", "s1"]
    assert superfluous(whole, Keep(last=1), 0) == ["s7", "s6", "s5", "s4", "s3", "s2"]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 9))
def test_however_late_the_word_comes_there_is_one_to_go_back_to(late: int, every: int, last: int) -> None:
    """A save each `every` steps, vouched for `late` steps later: from the first such word on one is there, and never an old one."""
    kept: list[Dated] = []
    for step in range(every, 200, every):
        kept.insert(0, Dated(f"s{step}", step, 0.0))
        going = superfluous(kept, Keep(last=last), step - late)
        kept = [d for d in kept if d.name not in going]
        trusted = [d.step for d in kept if d.step <= step - late]
        if step - late >= every:
            assert max(trusted) > step - 2 * late - 2 * every
        assert len(kept) <= last + 2


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ([], None),
        ([Word(), Word()], None),
        ([Word(7), Word(5), Word()], 5),
        ([Word(7, (6, 1)), Word(7, (6, 1))], 6),
        ([Word(5, (6, 1)), Word(None, (6, 1))], 5),
        ([Word(7, (6, 1)), Word(7, (6, 2))], None),
        ([Word(7, (6, 1)), Word(7, (4, 1))], None),
        ([Word(7, (6, 1)), Word(7)], None),
    ],
)
def test_what_ranks_vouch_for_together(words: list[Word], step: int | None) -> None:
    """The oldest of their losses, and the step of the digests if they are one; nothing where replicas are not known to be equal."""
    assert vouched(words) == step
    assert [read_word(json.loads(json.dumps(word))) for word in words] == words


def test_no_rank_vouches_for_more_than_its_nodes_devices() -> None:
    """Where they are watched; a script that tells nothing has their word alone."""
    assert held_to(Word(7, (6, 1)), None) == Word(7, (6, 1))
    assert held_to(Word(7, (6, 1)), 5) == Word(5, (6, 1))
    assert held_to(Word(7), 9) == Word(7)
    assert held_to(Word(), 9) == Word(9)


def test_what_a_rank_vouches_for() -> None:
    """The step before its newest finite loss, or its first bad one; what it has restored in any case, once it has given a loss."""
    page, fd = Page.create()
    os.close(fd)
    assert own_word() == word_of(page.read()) == Word()
    page.restored(3, "")
    page.loss(9, 0.5)
    assert word_of(page.read()) == Word(8)
    page.loss(12, float("nan"))
    page.loss(15, 0.5)
    assert word_of(page.read()) == Word(11)
    page.replica(12, 5)
    page.beat(step=13)
    assert word_of(page.read()).replica == (12, 5)
