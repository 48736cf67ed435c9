"""Times what a failure costs under goodrun and its peers: the same job, the launchers in turn, medians and ranges in one table.

start      launcher's start to the end of the last rank's first step
kill       SIGKILL of one rank to the end of the last rank's first step in the next attempt
hang       SIGSTOP of one rank to the same
overhead   length of a step beside the same steps under torchrun, no fault
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
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


def time_faults(launcher: Launcher, nproc: int, times: dict[tuple[str, str, int], list[float | None]]) -> None:
    """One start, two kills, and for those that claim to see it one hang."""
    run = Run(launcher, nproc, FOREVER)
    try:
        if not run.wait(lambda now: all(len(done) >= 10 for done in now.values())):
            times["start", launcher.name, nproc].append(None)
            return
        times["start", launcher.name, nproc].append(max(done[0][2] for done in run.steps().values()) - run.begin)
        # not the same rank each time: goodrun would leave its slot out, and go on with fewer
        for what, sig, victim in (("kill", signal.SIGKILL, 1), ("kill", signal.SIGKILL, 0), ("hang", signal.SIGSTOP, 1)):
            if what == "hang" and not launcher.sees_hangs:
                continue
            _let_run(run, 40)
            took = run.fault(sig, victim)
            times[what, launcher.name, nproc].append(took)
            if took is None:
                return
    finally:
        run.close()


def _let_run(run: Run, steps: int) -> None:
    before = {rank: len(done) for rank, done in run.steps().items()}
    run.wait(lambda now: all(len(done) >= before[rank] + steps for rank, done in now.items()))


def step_seconds(launcher: Launcher, nproc: int, steps: int) -> float:
    """Mean length of a step from the twentieth on, without faults."""
    run = Run(launcher, nproc, steps)
    try:
        run.proc.wait()
        done = run.steps()[0]
        return (done[-1][2] - done[20][2]) / (len(done) - 21)
    finally:
        run.close()


@contextmanager
def lock() -> Iterator[None]:
    """Nobody else on this machine measures meanwhile."""
    with open(os.path.join(tempfile.gettempdir(), "goodrun-bench.lock"), "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def cell(values: list[float | None]) -> str:
    """Median and range; how many never came back."""
    came = [v for v in values if v is not None]
    if not values:
        return "–"
    lost = f"; {len(values) - len(came)} of {len(values)} never" if len(came) < len(values) else ""
    return f"{statistics.median(came):.2f} ({min(came):.2f}–{max(came):.2f}){lost}" if came else f"never ({len(values)} tries)"


def table(times: dict[tuple[str, str, int], list[float | None]], names: list[str], sizes: list[int]) -> str:
    """The markdown table of medians and ranges, and goodrun's share of torchrun's."""
    lines = ["| what, ranks | " + " | ".join(names) + " | goodrun / torchrun |", "|---|" + "---|" * (len(names) + 1)]
    for what in ("start", "kill", "hang"):
        for n in sizes:
            ours, theirs = ([v for v in times[what, name, n] if v is not None] for name in ("goodrun", "torchrun"))
            ratio = f"{statistics.median(ours) / statistics.median(theirs):.3f}" if ours and theirs else "–"
            cells = [cell(times[what, name, n]) if what != "hang" or name == "goodrun" else "not noticed¹" for name in names]
            lines.append(f"| {what} → first step, {n} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="rounds through all launchers; two kills in each (default: 4)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--peers", type=Path, help="the bin folder of an environment with nvidia-resiliency-ext and dlrover")
    parser.add_argument("--overhead-rounds", type=int, default=7)
    parser.add_argument("--overhead-steps", type=int, default=500)
    args = parser.parse_args()
    everyone = launchers(Path(sys.executable).parent, args.peers)
    times: dict[tuple[str, str, int], list[float | None]] = defaultdict(list)
    ratios, same, lengths = [], [], []
    with lock():
        for i in range(args.rounds):
            for n in args.ranks:
                for launcher in everyone[i % 2 :] + everyone[: i % 2]:
                    print(f"round {i + 1} of {args.rounds}: {launcher.name}, {n} ranks", file=sys.stderr, flush=True)
                    time_faults(launcher, n, times)
        print(table(times, [a.name for a in everyone], args.ranks), flush=True)
        good, torch = everyone[0], everyone[1]
        for i in range(args.overhead_rounds):
            print(f"overhead, round {i + 1} of {args.overhead_rounds}", file=sys.stderr, flush=True)
            a, b, c = (step_seconds(x, 2, args.overhead_steps) for x in (torch, good, torch))
            ratios.append(b / ((a + c) / 2) - 1)
            same.append(a / c - 1)
            lengths.append(c)
    if ratios:
        print(
            f"\nSteps of {1000 * statistics.median(lengths):.0f} ms, 2 ranks, {args.overhead_steps} steps a run: "
            f"goodrun against torchrun {statistics.median(ratios):+.2%} ({min(ratios):+.2%} … {max(ratios):+.2%}), "
            f"torchrun against itself {statistics.median(same):+.2%} ({min(same):+.2%} … {max(same):+.2%})."
        )


if __name__ == "__main__":
    main()
