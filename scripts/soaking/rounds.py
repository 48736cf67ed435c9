"""Rounds of random chaos against the job of the demo, each drawn from its own seed and judged by `--chaos-verdict`."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "scripts" / "examples" / "train_gpt.py"
RANKS = 3
ROUND_WITHIN_S = 1200

ANY_MOMENT = ("kill", "segv", "abort", "hang")
"""What a rank can meet in any phase: a rank that sleeps in a save has half an hour."""
AFTER_A_STEP = ("stall", "gil", "deadlock", "peers-cut", "store-cut", "slow:factor=2", "net-loss", "net-partition", "net-delay", "net-slow")
ONCE = ("raise", "exit", "oom", "slot-lost")
"""A script that crashes twice at one step is not started again."""
STORAGE = ("enospc", "eio", "read-only", "slow-storage:ms=20", "torn-write", "bit-flip", "removed-file")
SILENT = ("torn-write", "bit-flip", "removed-file")
"""Not to the last checkpoint: there would be nothing left to compare."""
BESIDE = ("keeper-kill", "nursery-kill", "clock-jump:by=-1h", "clock-jump:by=2h")
ENDS = ("supervisor-kill", "preempt:grace=20s", "preempt:grace=1s")
GPUS = ("gpu-lost", "ecc", "throttle", "memory-held", "probe-hang", "probe-error", *(f"xid:code={n}" for n in (31, 79, 94)), "prober-kill")
FOR_A_WHILE = ("enospc", "eio", "read-only", "slow-storage", "net-loss", "net-delay", "net-slow", *GPUS[:6])


def plan_of(seed: int, steps: int) -> tuple[str, bool]:
    """A round's chaos, and whether it has simulated GPUs."""
    dice = random.Random(f"soak {seed}")
    gpus = dice.random() < 0.3
    pools = [*[ANY_MOMENT] * 4, *[AFTER_A_STEP] * 2, *[STORAGE] * 3, *[BESIDE] * 2, *([GPUS] * 4 if gpus else [])]
    kinds = [dice.choice(dice.choice(pools)) for _ in range(dice.randint(2, 5))]
    kinds += [dice.choice(ONCE)] * (dice.random() < 0.4) + [dice.choice(ENDS)] * (dice.random() < 0.4)
    dice.shuffle(kinds)
    if set(kinds) & set(SILENT):  # storage that is down would put the damage off to the last checkpoint
        kinds = [kind for kind in kinds if kind not in STORAGE or kind in SILENT]
    return "; ".join(entry(dice, kind, steps) for kind in kinds), gpus


def entry(dice: random.Random, kind: str, steps: int) -> str:
    """One fault with its target and its moment; all numbers are drawn, used or not, so that one kind does not move the others."""
    name, _, options = kind.partition(":")
    rank, slot, step, seconds = dice.randrange(RANKS), dice.randrange(RANKS), dice.randint(2, steps - 5), dice.uniform(0.5, 3.0)
    in_phase, phase, attempt = dice.random() < 0.4, dice.choice(("start", "save", "restore")), dice.randint(0, 2)
    target = [f"slot={slot}"] if name in (*GPUS[:6], "xid") else []
    target += [f"rank={rank}"] if name in (*ANY_MOMENT, *(k.partition(":")[0] for k in (*AFTER_A_STEP, *ONCE))) else []
    target += [f"for={seconds:.1f}s"] if name in FOR_A_WHILE else []
    if name in SILENT:
        step = min(step, steps - 15)
    moment = f"step={step}"
    if in_phase and name in (*ANY_MOMENT, "raise", "exit"):
        moment = f"phase=save,step={step}" if phase == "save" else f"phase={phase},attempt={attempt}"
    words = ",".join([*target, *([options] if options else [])])
    return f"{name}{':' if words else ''}{words}@{moment}"


def play(seed: int, steps: int, folder: Path) -> tuple[bool, str]:
    """One round: whether it passed, and what to say of it."""
    plan, gpus = plan_of(seed, steps)
    where, quiet = folder / f"seed-{seed}", folder / f"quiet-{steps}"
    shutil.rmtree(where, ignore_errors=True)
    words = [sys.executable, "-m", "goodrun", "--nproc-per-node", str(RANKS), "--chaos", plan, "--chaos-verdict", "--json"]
    words += ["--simulate-gpus", str(RANKS)] if gpus else []
    words += ["--run-dir", str(where), *(["--quiet-run", str(quiet)] if quiet.exists() else [])]
    begin = time.monotonic()
    try:
        script = [str(JOB), "--steps", str(steps), "--quiet"]
        done = subprocess.run([*words, *script], cwd=folder, capture_output=True, text=True, timeout=ROUND_WITHIN_S, check=False)
        told = json.loads(done.stdout) if done.stdout else {"verdict": "FAIL", "checks": [], "fired": []}
        reasons = [f"{c['name']}: {c['text']}" for c in told["checks"] if c["ok"] is False] or ([] if done.stdout else [done.stderr])
    except subprocess.TimeoutExpired:
        told, reasons = {"verdict": "FAIL", "fired": []}, [f"no verdict within {ROUND_WITHIN_S} s"]
    passed = told["verdict"] == "PASS"
    if not quiet.exists() and (where / "quiet").exists():
        shutil.copytree(where / "quiet", quiet, symlinks=True)
    if passed:
        shutil.rmtree(where)
    head = f"seed {seed}: {told['verdict']}  {len(told['fired'])} fired, {time.monotonic() - begin:.0f} s  {plan}"
    again = f"  replay: scripts/soak --rounds 1 --seed {seed} --steps {steps}; what it left: {where}"
    return passed, "\n".join([head, *(f"  {reason}" for reason in reasons), *([] if passed else [again])])


def main() -> int:
    """Rounds until the time is over; the first seed is given, the next ones follow it."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0, help="so many rounds, whatever the time")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=ROOT / ".soak")
    args = parser.parse_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    end, seed, failed = time.monotonic() + 60 * args.minutes, args.seed, []
    while seed < args.seed + args.rounds if args.rounds else time.monotonic() < end:
        passed, text = play(seed, args.steps, folder)
        print(text, flush=True)
        failed += [] if passed else [seed]
        seed += 1
    print(f"{seed - args.seed} rounds, {len(failed)} failed" + (f": seeds {', '.join(map(str, failed))}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
