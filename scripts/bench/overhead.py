"""What supervision costs a job that has no fault, in two parts, each by turns within one run, so that a noisy machine is noisy for both.

Hooks: CPU time of a step with goodrun's hooks against the next one without them (hooks.py).
Launcher: the length of the ranks' steps while goodrun's own processes (launcher, prober, standbys, keeper) run, against blocks of time in
which all of them are stopped by SIGSTOP. Both come with a 95 % interval of the median, from 2,000 resamples.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from bisect import bisect
from pathlib import Path

import psutil
from running import FOREVER, PRODUCTS, Launcher, Run

BLOCK_S = 0.5


def hooks(launcher: Launcher, pairs: int) -> tuple[list[float], float]:
    """What hooks cost in each of `pairs` steps, as a share of a step; and the step's length in seconds."""
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as where:
        out, job = Path(where, "hooks.json"), Path(__file__).with_name("hooks.py")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": where}
        words = [*launcher.words, "2", str(job), str(pairs), str(PRODUCTS), str(out)]
        subprocess.run(words, env=env, cwd=where, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = json.loads(out.read_text())
    return [us / 1e6 / found["step_s"] for us in found["differences_us"]], found["step_s"]


def processes(launcher: Launcher, blocks: int) -> tuple[list[float], float]:
    """How much longer a step is beside goodrun's own processes, in each pair of blocks; and the share of one core that they use."""
    run = Run(launcher, 2, FOREVER)
    try:
        if not run.wait(lambda now: all(len(done) >= 200 for done in now.values())):
            raise RuntimeError(f"the job did not come to 200 steps:\n{(run.where / 'log').read_text()}")
        ranks = {done[-1][0] for done in run.steps().values()}
        top = psutil.Process(run.proc.pid)
        own = [top, *(p for p in top.children(recursive=True) if p.pid not in ranks)]
        used, begin = sum(sum(p.cpu_times()[:2]) for p in own), time.monotonic()
        time.sleep(10)
        share = (sum(sum(p.cpu_times()[:2]) for p in own) - used) / (time.monotonic() - begin)
        spans = []
        for i in range(blocks):
            for stopped in (i % 2 == 0, i % 2 == 1):
                for p in own:
                    p.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)
                begin = time.monotonic()
                time.sleep(BLOCK_S)
                spans.append((stopped, begin, time.monotonic()))
        for p in own:
            p.send_signal(signal.SIGCONT)
        ends = [t for _, _, t in run.steps()[0]]
    finally:
        run.close()
    lengths = [(stopped, _step_length(ends, begin, end)) for stopped, begin, end in spans]
    pairs = [dict(lengths[i : i + 2]) for i in range(0, len(lengths), 2)]
    return [pair[False] / pair[True] - 1 for pair in pairs], share


def _step_length(ends: list[float], begin: float, end: float) -> float:
    """Mean length of the steps that ended between two moments."""
    i, j = bisect(ends, begin), bisect(ends, end) - 1
    return (ends[j] - ends[i]) / (j - i)


def median(values: list[float]) -> str:
    """The median with its 95 % bootstrap interval, in percent."""
    rng = random.Random(0)
    tries = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return f"{statistics.median(values):+.2%} ({tries[49]:+.2%} … {tries[1949]:+.2%})"


def measure(launcher: Launcher, pairs: int, blocks: int) -> str:
    """Both parts, as a sentence."""
    inside, step_s = hooks(launcher, pairs)
    beside, share = processes(launcher, blocks)
    return (
        f"Overhead without faults, 2 ranks, steps of {1000 * step_s:.1f} ms; median (95 % interval): hooks inside a step {median(inside)} "
        f"of it, {len(inside)} pairs of steps; goodrun's own processes beside it {median(beside)}, {len(beside)} pairs of {BLOCK_S} s, "
        f"{share:.2%} of one core."
    )
