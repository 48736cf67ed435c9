"""A loader that cannot keep up is noticed from the ranks' own timings, and nothing is said that was not measured."""

from __future__ import annotations

import dataclasses

import pytest

from goodrun.elastic_runner.events import DataStarved
from goodrun.elastic_runner.starving import Starving, StarvingWatch
from goodrun.progress import Page, Progress


def pages(*seen: tuple[int, float], workers: int = 0) -> dict[int, Progress]:
    """Pages of ranks that finished so many steps and waited so many seconds in all."""
    page, _ = Page.create()
    blank = page.read()
    page.close()
    return {r: dataclasses.replace(blank, steps_done=n, step=n, data_wait_s=w, workers=workers) for r, (n, w) in enumerate(seen)}


def seen(cores: int = 8, *, steps: int = 100, waited: float = 5.0, seconds: float = 10.0, workers: int = 0) -> Starving | None:
    """What two looks, `seconds` apart, make of a pair of ranks of which the second waits."""
    watch = StarvingWatch(cores)
    assert watch.look(0.0, pages((1, 0.5), (1, 0.5))) is None
    return watch.look(seconds, pages((1 + steps, 0.6), (1 + steps, 0.5 + waited), workers=workers))


def test_the_rank_that_waits_most_is_named_with_what_was_measured() -> None:
    """Half of each step waiting, without workers: one worker loads a batch while the step computes."""
    told = seen()
    assert told is not None
    assert (told.rank, told.steps, told.waited_s, told.enough) == (1, 100, 5.0, 1)
    assert told.text == (
        "rank 1 waits for data 50 % of the time: of each step 0.05 s, against 0.05 s of work; its loader has no workers: "
        "num_workers=1 would keep up"
    )


@pytest.mark.parametrize(("workers", "waited", "enough"), [(0, 8.0, 4), (2, 5.0, 4), (1, 7.5, 4), (-1, 5.0, 0)])
def test_how_many_workers(workers: int, waited: float, enough: int) -> None:
    """The number that would keep up follows from how long a batch takes and how many load at once; unknown workers tell nothing."""
    told = seen(workers=workers, waited=waited)
    assert told is not None
    assert told.enough == enough
    assert ("would keep up" in told.text) == (enough > 0)


def test_more_workers_than_cores_are_not_advised() -> None:
    """Where the cores would not do, it says so in place of a number that cannot help."""
    told = seen(cores=4, waited=9.0)
    assert told is not None
    assert "num_workers=" not in told.text and "9, and there are 2 cores for each rank" in told.text


@pytest.mark.parametrize("few", [{"steps": 19}, {"seconds": 9.0}, {"waited": 2.4}])
def test_too_little_says_nothing(few: dict[str, float]) -> None:
    """A few slow steps, a short time, or a small share are no evidence."""
    assert seen(**few) is None  # type: ignore[arg-type]


def test_it_is_said_once() -> None:
    """The same attempt hears of it once; ranks that have not begun to step are not looked at."""
    watch = StarvingWatch(8)
    assert watch.look(0.0, pages((0, 9.0))) is None
    assert watch.look(100.0, pages((50, 99.0))) is None  # the first look that counts: the window begins here
    assert watch.look(200.0, pages((100, 149.0))) is not None
    assert watch.look(300.0, pages((150, 199.0))) is None


def test_a_run_says_it(job) -> None:  # type: ignore[no-untyped-def]
    """A real job with a slow loader gets one line on the terminal and one event."""
    run = job("--nproc-per-node", "2", "slow.py", "400", "data=0.05").ok()
    [event] = run.events(DataStarved)
    assert event.workers == 0 and event.enough >= 1 and event.waited_s > 5
    assert run.err.count("waits for data") == 1 and "its loader has no workers" in run.err
