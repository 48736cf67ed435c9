"""Starts the ranks of a job as real processes, and sees that none outlives its test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from goodrun.checkpoint.link import keeper_command
from goodrun.checkpoint.wire import ADDRESS_VARIABLE

from .stores import Store, azure, directory, gcs, moto, mount, s3, volume

FORKED = Path(__file__).with_name("forked.py")
FAULTY = Path(__file__).with_name("faulty_keeper.py")

Ended = Callable[[], list[tuple[int, str]]]
"""Waits for the ranks of a job: exit status and stderr of each."""


class Herd:
    """A process that has torch already and forks the ranks of one job after the other."""

    def __init__(self, folder: Path) -> None:
        """It lives until `close`. What ranks say is kept in `folder`."""
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(FORKED)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def begin(self, world: int, environ: dict[str, str], *args: str) -> Ended:
        """Start `world` ranks of a scenario of workers.py; what is returned waits for their exit statuses and stderr."""
        assert self._process.stdin is not None and self._process.stdout is not None
        unique = uuid.uuid4().hex
        said = str(self._folder / f"stderr-{unique}")
        environ = {**environ, "WORLD_SIZE": str(world), "STORE": str(self._folder / f"store-{unique}"), "OMP_NUM_THREADS": "1"}
        job = {"world": world, "environ": environ, "argv": ["workers.py", *args], "stderr": said}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answers = self._process.stdout
        answers.readline()

        def ended() -> list[tuple[int, str]]:
            codes = json.loads(answers.readline())
            return [(code, Path(f"{said}.r{rank}").read_text()) for rank, code in enumerate(codes)]

        return ended

    def close(self) -> None:
        """Kill it, and the ranks of a job that has not ended."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class Job:
    """Runs scenarios of workers.py under one root."""

    def __init__(self, root: Path, herd: Herd) -> None:
        """Results and checkpoints are kept under `root`."""
        self.root, self._herd = root, herd

    def begin(self, world: int, *args: str) -> Ended:
        """Start one scenario on `world` ranks; what is returned waits for the exit status and stderr of each."""
        return self._herd.begin(world, dict(os.environ), args[0], str(self.root), *args[1:])

    def run(self, world: int, *args: str) -> list[tuple[int, str]]:
        """One scenario to its end."""
        return self.begin(world, *args)()

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

    def dead_or(self, over: Callable[[], bool]) -> int | None:
        """Wait until the keeper has died, or there is nothing more for it to do; the exit status of one that died."""
        assert self.process is not None
        while not over():
            with suppress(subprocess.TimeoutExpired):
                status = self.process.wait(0.02)
                os.close(self._life)
                return status
        return None

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


@pytest.fixture(scope="session")
def herd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Herd]:
    """Where the ranks of this session's jobs come from."""
    found = Herd(tmp_path_factory.mktemp("herd"))
    yield found
    found.close()


@pytest.fixture
def job_in(herd: Herd) -> Callable[[Path], Job]:
    """Makes jobs."""

    def make(root: Path) -> Job:
        root.mkdir(exist_ok=True)
        return Job(root, herd)

    return make


@pytest.fixture
def job(job_in: Callable[[Path], Job], tmp_path: Path) -> Job:
    """One job under the test's own folder."""
    return job_in(tmp_path)
