"""Runs goodrun as its users do, in a process of its own, and checks that nothing is left behind after every test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from torch.distributed.nn.jit import instantiator

from goodrun.elastic_runner import events
from goodrun.elastic_runner.goodput.account import account
from goodrun.elastic_runner.journal import read_events

settings.register_profile("goodrun", deadline=None, database=None, derandomize=True)  # the same cases each time, and nothing left on disk
settings.load_profile("goodrun")
# the suite may have been started by `&` or nohup, and what is ignored is inherited
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

JOBS = Path(__file__).parent / "jobs"


class Job:
    """One `goodrun …` with its output in files."""

    def __init__(self, where: Path, argv: list[str], env: dict[str, str], pass_fds: tuple[int, ...]) -> None:
        self.where, self.run_dir = where, where / "run"
        self._out, self._err = where / "stdout", where / "stderr"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.proc = subprocess.Popen(
                argv,
                env=env,
                cwd=where,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    @property
    def out(self) -> str:
        """What was printed on stdout so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What was printed on stderr so far."""
        return self._err.read_text(errors="replace")

    def wait(self, timeout: float = 60) -> int:
        """The exit status; the output is shown when the time is up."""
        try:
            return self.proc.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.out[-3000:]}\n{self.err[-3000:]}") from None

    def ok(self, timeout: float = 100) -> Job:
        """Wait, and expect success."""
        status = self.wait(timeout)
        assert status == 0, f"status {status}\n{self.out[-3000:]}\n{self.err[-3000:]}"
        return self

    def events(self, *kinds: type[events.Event]) -> list[Any]:
        """The record so far, or those of its events that are of `kinds`."""
        if not (self.run_dir / "events.jsonl").exists():
            return []
        return [e for e in read_events(self.run_dir) if not kinds or isinstance(e, kinds)]

    def marks(self, pattern: str) -> list[str]:
        """Names of the marker files that the ranks made."""
        return sorted(p.name for p in self.where.glob(pattern))

    def until(self, test: Callable[[], Any], timeout: float = 40) -> Any:
        """Poll for what the job does in its own time."""
        end = time.monotonic() + timeout
        while not (value := test()):
            assert time.monotonic() < end, f"it did not happen in {timeout} s\n{self.out[-3000:]}\n{self.err[-3000:]}"
            assert self.proc.poll() is None or test(), f"the job ended first\n{self.out[-3000:]}\n{self.err[-3000:]}"
            time.sleep(0.01)
        return value


def alive(token: str) -> list[int]:
    """Living processes that carry `token` in their environment."""
    found = []
    for name in os.listdir("/proc"):
        try:
            ours = name.isdigit() and int(name) != os.getpid() and token.encode() in Path(f"/proc/{name}/environ").read_bytes()
            if ours and Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(int(name))
        except OSError:
            continue
    return found


def in_use(path: str) -> bool:
    """Whether a living process has the file open or mapped, or it is gone by now."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if f" {path}" in Path(f"/proc/{name}/maps").read_text() or path in map(os.readlink, Path(f"/proc/{name}/fd").iterdir()):
                return True
    return not os.path.exists(path)


def adds_up(j: Job) -> None:
    """Whatever a test does to a run: every slot-second of it is in one bucket."""
    goodput = account(j.events())
    assert round(sum(goodput.buckets.values()), 6) == round(goodput.slot_s, 6), goodput
    assert min(goodput.buckets.values()) >= 0 and 0 <= goodput.ettr <= goodput.time_goodput <= 1, goodput


@pytest.fixture
def token() -> str:
    return f"goodrun-test-{uuid.uuid4().hex}"


@pytest.fixture
def living(token: str) -> Callable[[], list[int]]:
    """What of this test's jobs lives at the moment of the call."""
    return lambda: alive(token)


@pytest.fixture
def job(tmp_path: Path, token: str) -> Iterator[Callable[..., Job]]:
    """Start a job: `job("--nproc-per-node", "2", "steps.py", …)`; scripts are looked for in jobs/."""
    shm = set(os.listdir("/dev/shm"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    short = Path(tempfile.gettempdir(), token)  # a socket's path has to be short
    short.symlink_to(temporary)
    jobs: list[Job] = []

    def start(
        *argv: object,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        launcher: str = "goodrun",
        name: str = "job",
        pass_fds: tuple[int, ...] = (),
    ) -> Job:
        where = tmp_path / name
        where.mkdir(exist_ok=True)
        words = [str(JOBS / a) if isinstance(a, str) and a.endswith(".py") and (JOBS / a).exists() else str(a) for a in argv]
        program = {
            "goodrun": ["-m", "goodrun.elastic_runner", "--run-dir", str(where / "run")],
            "torchrun": ["-m", "torch.distributed.run"],
        }
        full = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PET_", "GOODRUN_", "TORCHELASTIC_"))},
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "TMPDIR": str(short),
            "OMP_NUM_THREADS": "1",
            "TEST_TOKEN": token,
            "TEST_DIR": str(where),
            **(env or {}),
        }
        command = [sys.executable, *program[launcher]] if launcher in program else [launcher]
        started = Job(where, [*prefix, *command, *words], full, pass_fds)
        jobs.append(started)
        return started

    yield start
    end = time.monotonic() + 3
    while (left := alive(token)) and all(j.proc.poll() is not None for j in jobs) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for j in jobs:
        j.proc.wait(10)
        adds_up(j)
    short.unlink()
    assert not left, f"processes left behind: {left}"
    left_in_shm = {n for n in os.listdir("/dev/shm") if not n.startswith("sem.mp-")} - shm  # those are other programs' locks
    left_in_shm -= {n for n in left_in_shm if in_use(f"/dev/shm/{n}")}  # of a test beside this one
    assert not left_in_shm, f"left in /dev/shm: {left_in_shm}"
    # what torch makes when it is imported: a cache, and before 2.13 a folder
    torchs = ("torchinductor_", "tmp") if hasattr(instantiator, "_TEMP_DIR") else ("torchinductor_",)
    ours = [n for n in os.listdir(temporary) if not n.startswith(torchs)]
    assert not ours, f"left in the temporary folder: {ours}"
    shutil.rmtree(tmp_path / "state", ignore_errors=True)


@pytest.fixture
def both(job: Callable[..., Job], tmp_path: Path) -> Callable[..., tuple[Job, Job]]:
    """The same command line under torchrun and under goodrun, started together; `{port}` in a word is a free port for each."""
    rubbish = tmp_path / "torchruns"
    rubbish.mkdir()

    def start(*argv: object, env: dict[str, str] | None = None) -> tuple[Job, Job]:
        theirs, ours = ([a.replace("{port}", str(_free_port())) if isinstance(a, str) else a for a in argv] for _ in range(2))
        started = job(*theirs, launcher="torchrun", name="torchrun", env={**(env or {}), "TMPDIR": str(rubbish)})
        return started, job(*ours, name="goodrun", env=env)

    return start


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
