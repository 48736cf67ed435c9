"""A rank does to itself what the plan says, says so first, and does it once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from goodrun.fault_injection import CHAOS_VARIABLE, RUN_STARTED_VARIABLE, SLOT_VARIABLE, parse_plan, to_env
from goodrun.fault_injection.injectors import Armed, ChaosRaised
from goodrun.progress import PAGE_FD_VARIABLE, Page

RANK = """
import os
from goodrun import progress
from goodrun.fault_injection import injectors

page = progress.attach(int(os.environ["GOODRUN_PAGE_FD"]))
armed = injectors.arm(os.environ, page)
for step in range(1, 11):
    page.beat(step=step)
    armed.after_step(step)
"""


@dataclass(frozen=True)
class Rank:
    """A child process that takes ten steps with a plan in its environment, and its page as the supervisor sees it."""

    process: subprocess.Popen[str]
    page: Page


@pytest.fixture
def start() -> Iterator[object]:
    """Starts ranks; none is left afterwards."""
    ranks: list[Rank] = []

    def start_rank(plan: str, *, rank: int = 1, slot: int | None = None, run_started: float | None = None) -> Rank:
        page, fd = Page.create()
        env = os.environ | {
            CHAOS_VARIABLE: to_env(parse_plan(plan)),
            RUN_STARTED_VARIABLE: repr(time.monotonic() if run_started is None else run_started),
            PAGE_FD_VARIABLE: str(fd),
            "RANK": str(rank),
        }
        if slot is not None:
            env[SLOT_VARIABLE] = str(slot)
        process = subprocess.Popen([sys.executable, "-c", RANK], env=env, pass_fds=[fd], stderr=subprocess.PIPE, text=True)
        os.close(fd)
        ranks.append(Rank(process, page))
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()
        rank.page.close()


@pytest.mark.parametrize(
    ("plan", "slot", "code", "step", "fired"),
    [
        ("kill:rank=1@step=5", None, -signal.SIGKILL, 5, 0b1),
        ("segv:rank=1@step=5", None, -signal.SIGSEGV, 5, 0b1),
        ("abort:rank=1@step=5", None, -signal.SIGABRT, 5, 0b1),
        ("gpu-lost:slot=7@step=5", 7, 0, 10, 0b1),
        ("kill:rank=0@step=5; kill:rank=1@step=3", None, -signal.SIGKILL, 3, 0b10),
        ("slot-lost:rank=1@step=5", None, -signal.SIGKILL, 5, 0b1),
        ("slot-lost:slot=7@step=5", 7, -signal.SIGKILL, 5, 0b1),
        ("slot-lost:slot=7@step=5", 6, 0, 10, 0),
        ("raise:rank=1@step=5", None, 1, 5, 0b1),
        ("raise:rank=1@0s", None, 1, 1, 0b1),
        ("exit:rank=1@step=5", None, 1, 5, 0b1),
        ("exit:rank=1,code=7@step=5", None, 7, 5, 0b1),
        ("exit:rank=1,code=7@0ms", None, 7, 1, 0b1),
        ("kill:rank=0@step=5", None, 0, 10, 0),
        ("kill:rank=1@0s", None, 0, 10, 0),
        ("raise:rank=1@2m", None, 0, 10, 0),
    ],
)
def test_a_rank_ends_as_planned(start, plan: str, slot: int | None, code: int, step: int, fired: int) -> None:  # type: ignore[no-untyped-def]
    """The exit status, the step reached, and the mark on the page that outlives the rank."""
    rank = start(plan, slot=slot)
    _, err = rank.process.communicate(timeout=30)
    seen = rank.page.read()
    assert (rank.process.returncode, seen.step, seen.chaos_fired) == (code, step, fired)
    assert ("ChaosRaised: chaos: " in err) is plan.startswith("raise") if fired else err == ""


def test_a_hung_rank_is_stopped_and_goes_on_when_continued(start) -> None:  # type: ignore[no-untyped-def]
    """SIGSTOP is a hang from which SIGCONT brings the rank back, past its fault."""
    rank = start("hang:rank=1@step=4")
    _, status = os.waitpid(rank.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    assert (rank.page.read().step, rank.page.read().chaos_fired) == (4, 0b1)
    os.kill(rank.process.pid, signal.SIGCONT)
    assert rank.process.wait(timeout=30) == 0
    assert rank.page.read().step == 10


@pytest.mark.parametrize("kind", ["stall", "gil"])
def test_a_rank_that_hangs_in_python_or_native_code_makes_no_step_more(start, kind: str) -> None:  # type: ignore[no-untyped-def]
    """It lives, uses no CPU, and stays at its step; without the interpreter's lock none of its handlers runs either."""
    rank = start(f"{kind}:rank=1@step=4")
    before = -1.0
    while rank.page.read().chaos_fired != 1 or (now := sum(psutil.Process(rank.process.pid).cpu_times()[:2])) != before:
        assert rank.process.poll() is None
        before = now if rank.page.read().chaos_fired == 1 else -1.0
        with pytest.raises(subprocess.TimeoutExpired):
            rank.process.wait(0.1)
    assert rank.page.read().step == 4
    rank.process.kill()
    assert rank.process.wait(timeout=30) == -signal.SIGKILL


def test_a_rank_runs_out_of_memory_and_the_machine_does_not(start) -> None:  # type: ignore[no-untyped-def]
    """Its own limit ends it with a MemoryError, after a quarter of a GiB."""
    rank = start("oom:rank=1@step=4")
    _, err = rank.process.communicate(timeout=30)
    assert (rank.process.returncode, rank.page.read().step) == (1, 4)
    assert "MemoryError" in err


def test_a_slow_rank_takes_its_factor_of_time() -> None:
    """From its step on each step lasts `factor` times as long as it would have."""
    page, fd = Page.create()
    armed = Armed(parse_plan("slow:rank=0,factor=4@step=2"), page, 0.0)
    armed.after_step(2)
    began = time.monotonic()
    while time.monotonic() - began < 0.05:  # the step's own work
        pass
    armed.after_step(3)
    assert 0.2 <= time.monotonic() - began < 1.0
    page.close()
    os.close(fd)


def test_a_fault_missed_by_its_step_fires_at_the_next() -> None:
    """Steps may be counted in leaps, and a restart may go on beyond the step named."""
    page, fd = Page.create()
    armed = Armed(parse_plan("raise:rank=0@step=5"), page, 0.0)
    armed.after_step(4)
    with pytest.raises(ChaosRaised, match=r"chaos: 'raise:rank=0@step=5' fired after step 9"):
        armed.after_step(9)
    armed.after_step(10)
    assert page.read().chaos_fired == 1
    page.close()
    os.close(fd)


def test_a_time_counts_from_the_start_of_the_run() -> None:
    """On the clock of the run, not of the attempt."""
    page, fd = Page.create()
    now = 100.0
    armed = Armed(parse_plan("exit:rank=0,code=4@40s"), page, 90.0, clock=lambda: now)
    armed.after_step(1)
    now = 130.0
    with pytest.raises(SystemExit) as caught:
        armed.after_step(2)
    assert caught.value.code == 4
    page.close()
    os.close(fd)
