"""A job under one launcher, begun, watched, struck and ended by a benchmark; and the lock under which benchmarks measure."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

JOB = Path(__file__).with_name("job.py")
CAP_S = 60.0
"""A recovery that takes longer counts as none."""
FOREVER = 10**6
PRODUCTS = 16
"""Of two 256 × 256 matrices, a step."""


@dataclass(frozen=True)
class Launcher:
    """A launcher's name in the table, the words before `N job.py …`, and whether it claims to notice hangs."""

    name: str
    words: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    sees_hangs: bool = False


def launchers(bin_dir: Path, peers: Path | None) -> list[Launcher]:
    """goodrun, torchrun with its store cured (the stock one often never comes back), and the peers that are installed in `peers`."""
    cured = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
    found = [
        Launcher("goodrun", (str(bin_dir / "goodrun"), "--nproc-per-node"), sees_hangs=True),
        Launcher("torchrun", (str(bin_dir / "torchrun"), "--standalone", "--max-restarts", "100", "--nproc-per-node"), cured),
    ]
    if peers and (peers / "ft_launcher").exists():
        words = (str(peers / "ft_launcher"), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "100")
        found.append(Launcher("ft_launcher", (*words, "--nproc-per-node")))
    if peers and (peers / "dlrover-run").exists():
        words = (str(peers / "dlrover-run"), "--standalone", "--max-restarts", "100", "--nproc_per_node")
        found.append(Launcher("dlrover-run", words, cured))
    return found


class Run:
    """One job under one launcher, with what its ranks have written."""

    def __init__(self, launcher: Launcher, nproc: int, steps: int) -> None:
        self.where = Path(tempfile.mkdtemp(prefix="bench-recovery-"))
        self.nproc = nproc
        env = {**os.environ, **dict(launcher.env), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(self.where / "state")}
        words = [*launcher.words, str(nproc), str(JOB), str(steps), str(PRODUCTS), str(self.where)]
        self.log = open(self.where / "log", "wb")  # noqa: SIM115  (close() closes it)
        self.begin = time.monotonic()
        self.proc = subprocess.Popen(words, env=env, cwd=self.where, stdout=self.log, stderr=self.log, start_new_session=True)

    def steps(self) -> dict[int, list[tuple[int, int, float]]]:
        """(pid, step, end) of every step so far, by rank."""
        found = {}
        for rank in range(self.nproc):
            path = self.where / f"steps.{rank}"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            found[rank] = [(int(p), int(s), float(t)) for p, s, t in (line.split() for line in lines)]
        return found

    def wait(self, test: Callable[[dict[int, list[tuple[int, int, float]]]], bool]) -> bool:
        """Whether `test` came true of the steps within the cap, the launcher alive."""
        end = time.monotonic() + CAP_S
        while time.monotonic() < end:
            if test(self.steps()):
                return True
            if self.proc.poll() is not None:
                return test(self.steps())
            time.sleep(0.02)
        return False

    def fault(self, sig: int, victim: int) -> float | None:
        """Seconds from `sig` to rank `victim` until every rank has made a step in a new process; None if that never came."""
        old = {rank: done[-1][0] for rank, done in self.steps().items()}
        t = time.monotonic()
        os.kill(old[victim], sig)
        if not self.wait(lambda now: all(done[-1][0] != old[rank] and len(_of(done)) >= 3 for rank, done in now.items())):
            return None
        return max(_of(done)[0][2] for done in self.steps().values()) - t

    def close(self) -> None:
        """End the job and everything it started."""
        if self.proc.poll() is None:
            self.proc.terminate()
            try:
                self.proc.wait(20)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                self.proc.wait()
        self.log.close()
        token = str(self.where).encode()
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if token in Path(f"/proc/{name}/cmdline").read_bytes():
                        os.kill(int(name), signal.SIGKILL)
                except OSError:
                    continue
        shutil.rmtree(self.where, ignore_errors=True)


def _of(done: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """The steps of the newest process."""
    return [d for d in done if d[0] == done[-1][0]]


@contextmanager
def lock() -> Iterator[None]:
    """Nobody else on this machine measures meanwhile."""
    with open(os.path.join(tempfile.gettempdir(), "goodrun-bench.lock"), "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
