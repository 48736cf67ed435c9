"""Times what a failure costs under goodrun and its peers: the same job, the launchers in turn, medians and ranges in one table.

start      launcher's start to the end of the last rank's first step
kill       SIGKILL of one rank to the end of the last rank's first step in the next attempt
hang       SIGSTOP of one rank to the same
overhead   what hooks and goodrun's own processes add to a step, no fault (overhead.py)
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import overhead
from running import FOREVER, Launcher, Run, launchers, lock


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
    parser.add_argument("--overhead-pairs", type=int, default=2000, help="of steps, with and without hooks (default: 2000; 0: none)")
    parser.add_argument("--overhead-blocks", type=int, default=120, help="pairs of half seconds without and with the launcher (120)")
    args = parser.parse_args()
    everyone = launchers(Path(sys.executable).parent, args.peers)
    times: dict[tuple[str, str, int], list[float | None]] = defaultdict(list)
    with lock():
        for i in range(args.rounds):
            for n in args.ranks:
                for launcher in everyone[i % 2 :] + everyone[: i % 2]:
                    print(f"round {i + 1} of {args.rounds}: {launcher.name}, {n} ranks", file=sys.stderr, flush=True)
                    time_faults(launcher, n, times)
        print(table(times, [a.name for a in everyone], args.ranks), flush=True)
        if args.overhead_pairs:
            print("overhead", file=sys.stderr, flush=True)
            print("\n" + overhead.measure(everyone[0], args.overhead_pairs, args.overhead_blocks))


if __name__ == "__main__":
    main()
