"""`goodrun slurm-script`: a batch file to start from."""

from __future__ import annotations

import argparse
import shlex

_HEAD = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1            # one goodrun on each node; it starts the ranks
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --time={time}
#SBATCH --signal={signal}@{warning}           # seconds before the time limit: all ranks save and leave (Slurm may send it a minute early)
#SBATCH --requeue
#SBATCH --no-kill                      # a node that is lost ends neither the job nor, below, the step
#SBATCH --open-mode=append             # the lives of the job write into one file
#SBATCH --output=%x-%j.out

# Where nodes meet, and under which id, goodrun takes from SLURM_*. When one is lost, it goes on with the others.
srun --no-kill --kill-on-bad-exit=0 \\
    goodrun {nnodes}--nproc-per-node {nproc} --requeue-signal {signal} {command}
status=$?

# 75: every rank has left with its checkpoint written, because time was up or the machine is to be taken away
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def slurm_script_main(argv: list[str]) -> int:
    """Print a batch file for `sbatch`."""
    parser = argparse.ArgumentParser(prog="goodrun slurm-script", description="Print a batch file for sbatch, to start from.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--min-nodes", type=int, default=1, help="go on as long as so many nodes are left")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="0: one rank on the CPU of each node")
    parser.add_argument("--time", default="24:00:00")
    parser.add_argument("--warning", type=int, default=120, metavar="SECONDS", help="how long before the time limit ranks save and leave")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="train.py [arguments]")
    args = parser.parse_args(argv)
    if not 1 <= args.min_nodes <= args.nodes:
        parser.error(f"--min-nodes {args.min_nodes} must be between 1 and --nodes {args.nodes}")
    print(script(args), end="")
    return 0


def script(args: argparse.Namespace) -> str:
    """The batch file's text."""
    command = [word for word in args.command if word != "--"] or ["train.py"]
    text = _HEAD.format(
        name=command[0].rpartition("/")[2].removesuffix(".py"),
        nodes=args.nodes,
        gpus=args.gpus_per_node,
        time=args.time,
        signal="USR1",
        warning=args.warning,
        nnodes=f"--nnodes {args.min_nodes}:{args.nodes} " if args.nodes > 1 else "",
        nproc="gpu" if args.gpus_per_node else 1,
        command=shlex.join(command),
    )
    return text if args.gpus_per_node else text.replace("#SBATCH --gpus-per-node=0\n", "")
