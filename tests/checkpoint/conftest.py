"""Starts the ranks of a job as real processes, and sees that none outlives its test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from goodrun.checkpoint.link import keeper_command
from goodrun.checkpoint.wire import ADDRESS_VARIABLE

from .stores import Store, azure, directory, gcs, moto, mount, s3, volume

WORKERS = Path(__file__).with_name("workers.py")
FAULTY = Path(__file__).with_name("faulty_keeper.py")


class Job:
    """Runs scenarios of workers.py under one root."""

    def __init__(self, root: Path) -> None:
        """Results and checkpoints are kept under `root`."""
        self.root = root
        self.alive: list[subprocess.Popen[str]] = []

    def run(self, world: int, *args: str) -> list[tuple[int, str]]:
        """One scenario on `world` ranks: exit status and stderr of each."""
        store = self.root / f"store-{uuid.uuid4().hex}"
        for rank in range(world):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), STORE=str(store), OMP_NUM_THREADS="1")
            command = [sys.executable, str(WORKERS), args[0], str(self.root), *args[1:]]
            self.alive.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        ended = []
        for process in self.alive:
            _, err = process.communicate(timeout=60)
            ended.append((process.returncode, err))
        self.alive.clear()
        return ended

    def good(self, world: int, *args: str) -> str:
        """One scenario that has to end well; what it wrote to stderr."""
        ended = self.run(world, *args)
        assert [code for code, _ in ended] == [0] * world, "\n".join(err for _, err in ended)
        return "".join(err for _, err in ended)

    def told(self, name: str, rank: int = 0) -> Any:
        """What a rank left under this name."""
        return json.loads((self.root / f"{name}.r{rank}").read_text())


class Keepers:
    """Keepers as a launcher has them: one name, and one process after the other that answers to it."""

    def __init__(self, folder: Path) -> None:
        """`folder` is where a faulty one finds out that it is armed."""
        self.folder, self.name = folder, uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        self._life = -1

    def start(self, *fault: object, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """A keeper: a good one, or one whose storage has a `fault` (what, at which call, how)."""
        ours, self._life = os.pipe()
        wanted = (self.name, "--parent", str(ours), *options)
        command = [sys.executable, str(FAULTY), *map(str, fault), str(self.folder), *wanted] if fault else keeper_command(*wanted)
        self.process = subprocess.Popen(command, pass_fds=[ours], start_new_session=True)
        os.close(ours)
        return self.process

    def end(self) -> int:
        """The launcher is gone: the keeper finishes and leaves; its exit status."""
        assert self.process is not None
        os.close(self._life)
        status = self.process.wait(30)
        self.process = None
        return status

    def dies(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)
        os.close(self._life)
        self.process = None


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """moto's S3 server; its host and port."""
    pytest.importorskip("moto.server")
    with moto() as found:
        yield found


@pytest.fixture(params=["directory", "s3", "volume"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Each kind of storage in turn. Ask for it before `keepers`: they find it through the environment."""
    monkeypatch.setenv("GOODRUN_HOME", str(tmp_path / "home"))
    if request.param == "s3":
        with s3(request.getfixturevalue("s3_server"), monkeypatch) as found:
            yield found
    elif request.param in ("volume", "gcs", "azure"):
        with {"volume": volume, "gcs": gcs, "azure": azure}[request.param](monkeypatch) as found:
            yield found
    elif request.param == "mount":
        with mount(tmp_path / "mount", fail_every=150) as found:
            yield found
    else:
        with directory(tmp_path) as found:
            yield found


far = pytest.mark.parametrize("store", ["s3", "volume"], indirect=True)
one_of_far = pytest.mark.parametrize("store", ["volume", pytest.param("s3", marks=pytest.mark.exhaustive)], indirect=True)
"""Where the two hardly differ, one of them is enough for every day."""


@pytest.fixture
def keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keepers]:
    """Keepers for this test; its ranks find them as under a launcher."""
    found = Keepers(tmp_path)
    monkeypatch.setenv(ADDRESS_VARIABLE, found.name)
    monkeypatch.setenv("GOODRUN_RUN_STARTED", "1000")
    monkeypatch.setenv("GOODRUN_GENERATION", "0")
    yield found
    if found.process is not None:
        found.dies()


@pytest.fixture
def job_in() -> Iterator[Callable[[Path], Job]]:
    """Makes jobs; whatever of them still runs at the end of the test is killed."""
    jobs: list[Job] = []

    def make(root: Path) -> Job:
        root.mkdir(exist_ok=True)
        jobs.append(Job(root))
        return jobs[-1]

    yield make
    for process in (p for job in jobs for p in job.alive):
        process.kill()
        process.communicate()


@pytest.fixture
def job(job_in: Callable[[Path], Job], tmp_path: Path) -> Job:
    """One job under the test's own folder."""
    return job_in(tmp_path)
