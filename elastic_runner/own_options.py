"""The options that goodrun adds to torchrun's; what they mean together is checked in options.py."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add them, in a group of their own."""
    g = parser.add_argument_group("goodrun's own options")
    g.add_argument("--chaos", metavar="SPEC", help="inject faults, e.g. 'kill:rank=1@step=20; hang:rank=2@40s', or a YAML file of them")
    g.add_argument("--chaos-dry-run", action="store_true", help="check the command line, say what --chaos would do, and start nothing")
    g.add_argument(
        "--chaos-verdict",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="run the job twice, without and with --chaos, in folders of their own, and say PASS or FAIL with reasons",
    )
    g.add_argument("--quiet-run", type=Path, metavar="DIR", help="with --chaos-verdict: compare with this quiet take, made before")
    g.add_argument("--min-goodput", type=float, default=0.0, metavar="SHARE", help="with --chaos-verdict: the share that must be kept")
    g.add_argument("--json", action="store_true", help="with --chaos-verdict: say it as JSON")
    g.add_argument("--min-nproc", type=int, metavar="N", help="never go on with fewer workers on this node; N = nproc forbids shrinking")
    g.add_argument("--world-size-multiple-of", type=int, default=1, metavar="K", help="shrink to multiples of K only (tensor parallelism)")
    g.add_argument("--spares", type=int, default=0, metavar="N", help="keep N more slots in reserve; one takes the place of a lost slot")
    g.add_argument("--spare-nodes", type=int, metavar="N", help="at most N nodes beyond --nnodes' MAX wait in reserve (default: any)")
    g.add_argument("--wait-for-devices", metavar="TIME", help="where too few slots are left, wait so long for one to come back (30m)")
    g.add_argument("--run-dir", type=Path, metavar="DIR", help="where the record and the logs go (default: a fresh folder)")
    g.add_argument(
        "--warm-start",
        choices=["auto", "on", "off"],
        default="auto",
        help="keep a process with torch imported for each rank, for quick restarts (auto: unless the script would notice)",
    )
    g.add_argument(
        "--preload",
        default="",
        metavar="MODULES",
        help="modules to import once for all ranks, besides torch, as in transformers,datasets; auto: what the first start has imported",
    )
    g.add_argument("--hang-detection", choices=["auto", "off"], default="auto", help="find ranks that hang (default: auto)")
    g.add_argument("--dry-run-detectors", action="store_true", help="only record what the hang detection would have done")
    g.add_argument("--keeper-bandwidth", type=float, default=0.0, metavar="MIB", help="write checkpoints at no more than MIB per second")
    g.add_argument("--snapshot-replicas", type=int, default=0, metavar="N", help="copy snapshots to the memory of the N next nodes (0)")
    g.add_argument("--storage-patience", type=float, default=60.0, metavar="SECONDS", help="ask an object store again for so long (60)")
    g.add_argument("--restore-from", default="", metavar="STEP|PATH", help="begin from this checkpoint instead of the newest one")
    g.add_argument("--no-status", action="store_true", help="no line at the bottom of the terminal that says how the run stands")
    g.add_argument("--requeue-signal", choices=["USR1", "USR2"], default="", help="on it all ranks save and leave (status 75)")
    g.add_argument("--watch-preemption", action="store_true", help="save and leave when AWS, GCP or Azure takes the machine away")
    g.add_argument("--metrics-port", metavar="[HOST:]PORT", help="serve Prometheus metrics there (HOST: 127.0.0.1; PORT 0: any)")
    g.add_argument("--on-event", default="", metavar="CMD", help="run a shell command for each event, which it gets as JSON on stdin")
    g.add_argument("--tensorboard", default="", metavar="DIR", help="write step times, waits, goodput as scalars for TensorBoard there")
    g.add_argument("--mlflow", action="store_true", help="log the same to MLflow: to the run of MLFLOW_RUN_ID, else a new one")
    g.add_argument("--health-policy", type=Path, metavar="FILE", help="what to do about what GPUs report (YAML; default: the one shipped)")
    g.add_argument("--simulate-gpus", type=int, default=0, metavar="N", help="watch N simulated GPUs, for --chaos (the script sees none)")
    g.add_argument("--config", type=Path, metavar="FILE", help="YAML with options by their long names; the command line and PET_* win")
