"""The command line: torchrun's own parser with goodrun's options added, a YAML file below it, and every check that can be made early."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..fault_injection import DEVICE_KINDS, ChaosError, Fault, check_plan, parse_plan
from ..fault_injection.simulated_gpus import STATE_VARIABLE
from ..fault_injection.telling import plan_told
from .config_file import apply_config_file
from .devices.health_policy import load as load_health_policy
from .errors import UsageError
from .meeting import NOT_SAID, check_rendezvous, choose_rendezvous
from .nursery import why_cold
from .own_options import add_to
from .policy import Budgets, Slots
from .preemption import ADDRESS, ADDRESS_VARIABLE
from .slots import first_slots
from .slurm import Step, fill_in

DEFAULT_SHUTDOWN_S = 30
UNCAPPED = 9999
"""What torch is told as --max-restarts when the user gave none: policy ends the job long before."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything goodrun adds to torchrun's options."""

    slots: Slots
    """The device slots of this node at the start."""
    budgets: Budgets
    chaos: tuple[Fault, ...] = ()
    chaos_text: str = ""
    verdict: bool = False
    """Play the job without and with its chaos, and compare."""
    verdict_as_json: bool = False
    quiet_take: Path | None = None
    """A quiet take of an earlier rehearsal, to compare with."""
    least_goodput: float = 0.0
    run_dir: Path | None = None
    log_dir: Path | None = None
    health_policy: Path | None = None
    """What is done about what GPUs say; None is the one that comes with goodrun."""
    simulate_gpus: int = 0
    wait_for_devices_s: float = 0.0
    """How long to wait for a device where too few are left."""
    keeper_bandwidth: float = 0.0
    """MiB per second that checkpoints may be written at; 0 is no limit."""
    snapshot_replicas: int = 0
    """To how many other nodes' memory snapshots are copied."""
    storage_patience_s: float = 60.0
    """How long an object store is asked again for one thing before the save has failed and begins anew."""
    restore_from: str = ""
    warm_start: bool = False
    preload: str = ""
    """Modules to import once for all ranks, separated by commas, or "auto"."""
    cold_because: str = ""
    """Why `--warm-start auto` came to no."""
    hang_detection: bool = True
    dry_run_detectors: bool = False
    shutdown_timeout_s: int = DEFAULT_SHUTDOWN_S
    """How long ranks get between being asked to stop and being killed."""
    restart_grace_s: float = 2.0
    """The same on the way to a restart, where survivors sit in collectives that cannot end; `--shutdown-timeout` sets both."""
    script_is_python: bool = True
    virtual_local_rank: bool = False
    min_nodes: int = 1
    max_nodes: int = 1
    local_addr: str | None = None
    spare_nodes: int | None = None
    """How many nodes beyond the most may wait in reserve; None is any number."""
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    requeue_signal: str = ""
    """The signal upon which all ranks save and leave, with the status that says: start the job again."""
    slurm: Step | None = None
    preemption_at: str = ""
    """Where the cloud's metadata service is asked for notices; empty: it is not."""
    metrics_at: tuple[str, int] | None = None
    """Host and port at which Prometheus may ask."""
    on_event: str = ""
    tensorboard: str = ""
    mlflow: bool = False
    status: bool = True
    """Whether a line at the bottom of the terminal says how the run stands."""
    argv: tuple[str, ...] = ()
    script: str = ""


class _Parser(argparse.ArgumentParser):
    """torch's parser, made ours by class: speaks in one sentence, and never takes one of goodrun's options for an abbreviation."""

    ours: frozenset[str]

    def _get_option_tuples(self, option_string: str) -> list[Any]:  # argparse's hook for abbreviations
        return [t for t in super()._get_option_tuples(option_string) if t[0].dest not in self.ours]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (goodrun --help lists the options)")


def build_parser() -> _Parser:
    """torchrun's parser as the installed torch has it, and goodrun's own options in a group of their own."""
    from torch.distributed.run import get_args_parser

    try:
        parser: Any = get_args_parser()
    except ValueError as e:  # PET_STANDALONE=true
        raise UsageError(f"a PET_ variable of a switch must be 0 or 1: {e}") from e
    parser.__class__ = _Parser
    before = {a.dest for a in parser._actions}
    parser.prog = "goodrun"
    parser.description = "torchrun's command line for jobs that survive. Sub-commands: top, goodput, history, report, runs, plan."
    add_to(parser)
    _add_later_options(parser, before)
    # None tells "not given" from torchrun's default of 0, which would forbid every restart
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=None)
    if "PET_RDZV_BACKEND" not in os.environ:
        parser.set_defaults(rdzv_backend=NOT_SAID)
    parser.ours = frozenset({a.dest for a in parser._actions} - before)
    return parser  # type: ignore[no-any-return]


def split_at_script(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """(options, script, the script's own arguments). What follows the script is never shown to a parser: it is the script's.

    Raises UsageError if there is no script.
    """
    i = 0
    while i < len(argv):
        token = argv[i]
        if token == "--" and i + 1 < len(argv):
            return list(argv[:i]), argv[i + 1], list(argv[i + 2 :])
        if not token.startswith("-") or token == "-":
            return list(argv[:i]), token, list(argv[i + 1 :])
        i += 2 if _takes_next(parser, token) else 1
    if any(t in ("-h", "--help") for t in argv):
        parser.print_help()
        raise SystemExit(0)
    parser.parse_args([*argv, "no-script"])  # an unknown or ambiguous option is the better complaint
    raise UsageError("no training script given: goodrun [options] train.py [arguments]")


def _takes_next(parser: argparse.ArgumentParser, token: str) -> bool:
    """Whether an option's value is the next word."""
    if "=" in token and token.startswith("--"):
        return False
    actions = parser._option_string_actions
    if token in actions:
        return actions[token].nargs != 0
    if token.startswith("--"):
        close = {a.dest: a for a, *_ in parser._get_option_tuples(token)}
        return len(close) == 1 and next(iter(close.values())).nargs != 0
    for i, letter in enumerate(token[1:], 2):  # -r3: the value is in the word; -mr 3: it is not
        found = actions.get(f"-{letter}")
        if found is None or found.nargs != 0:
            return found is not None and i == len(token)
    return False


def _add_later_options(group: Any, have: set[str]) -> None:
    """What later versions of torchrun take and goodrun does by itself: there with an older torch, too."""
    if "shutdown_timeout" not in have:
        group.add_argument("--shutdown-timeout", "--shutdown_timeout", help="seconds between asking ranks to stop and killing them")
    if "signals_to_handle" not in have:
        signals = ",".join(RunConfig.stop_signals)
        group.add_argument("--signals-to-handle", "--signals_to_handle", default=signals, help="signals that stop the job, with commas")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, RunConfig]:
    """torch's namespace and our configuration. Raises UsageError, with one sentence, before anything is written or started."""
    parser = build_parser()
    head, script, tail = split_at_script(parser, argv)
    apply_config_file(parser, head)
    args = parser.parse_args([*head, "--", script])
    args.training_script_args = tail
    slurm = fill_in(args, os.environ)
    _check_script(args)
    _check_logs(args)
    nproc, min_nodes, max_nodes = _sizes(args)
    choose_rendezvous(args, max_nodes)
    check_rendezvous(args)
    capped = args.max_restarts
    if capped is not None and capped < 0:
        raise UsageError(f"--max-restarts must be 0 or more, not {capped}")
    args.max_restarts = UNCAPPED if capped is None else capped
    slots = _slots(args, nproc)
    plan = _chaos(args.chaos, len(slots.active), slots, max_nodes)
    _check_devices(args, plan)
    if args.chaos_dry_run:
        print(plan_told(plan) or "there is no --chaos")
        raise SystemExit(0)
    own_grace = args.shutdown_timeout
    grace = _grace(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") if own_grace is None else own_grace)
    is_python = not args.no_python or bool(args.run_path)
    cold_because = why_cold(script, is_python=is_python and not args.run_path, env=os.environ) if args.warm_start == "auto" else ""
    config = RunConfig(
        slots=slots,
        budgets=Budgets(max_restarts=capped, waits=args.wait_for_devices is not None),
        wait_for_devices_s=_seconds("--wait-for-devices", args.wait_for_devices),
        chaos=plan,
        chaos_text=args.chaos or "",
        verdict=_verdict(args),
        verdict_as_json=args.json,
        quiet_take=args.quiet_run,
        least_goodput=args.min_goodput,
        run_dir=args.run_dir,
        log_dir=Path(args.log_dir) if args.log_dir else None,
        health_policy=args.health_policy,
        simulate_gpus=args.simulate_gpus,
        keeper_bandwidth=_bandwidth(args.keeper_bandwidth),
        snapshot_replicas=args.snapshot_replicas,
        storage_patience_s=_patience(args.storage_patience),
        restore_from=args.restore_from,
        hang_detection=args.hang_detection == "auto",
        dry_run_detectors=args.dry_run_detectors,
        shutdown_timeout_s=DEFAULT_SHUTDOWN_S if grace is None else grace,
        restart_grace_s=2.0 if grace is None else float(grace),
        script_is_python=is_python,
        warm_start=args.warm_start != "off" and not cold_because and is_python,
        cold_because=cold_because if is_python else "",
        preload=_preload(args),
        virtual_local_rank=bool(getattr(args, "virtual_local_rank", False)),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        local_addr=args.local_addr,
        spare_nodes=args.spare_nodes,
        stop_signals=tuple(s.strip() for s in args.signals_to_handle.split(",") if s.strip()),
        requeue_signal=f"SIG{args.requeue_signal}" if args.requeue_signal else "",
        slurm=slurm,
        preemption_at=os.environ.get(ADDRESS_VARIABLE, ADDRESS) if args.watch_preemption else "",
        metrics_at=_metrics_at(args.metrics_port),
        on_event=args.on_event,
        tensorboard=args.tensorboard,
        mlflow=args.mlflow,
        status=not args.no_status,
        argv=tuple(argv),
        script=script,
    )
    args.nproc_per_node = str(nproc)
    if max_nodes == 1 and args.local_addr is None:
        args.local_addr = "127.0.0.1"  # else torch looks up the machine's own name, which need not resolve
    if args.run_path:
        _run_path_as_command(args)
    return args, config


def _run_path_as_command(args: argparse.Namespace) -> None:
    """--run-path as the command it amounts to, so that its ranks are ordinary workers."""
    code = "import sys; from torch.distributed.run import run_script_path; run_script_path(*sys.argv[1:])"
    args.training_script_args = ["-u", "-c", code, args.training_script, *args.training_script_args]
    args.training_script, args.run_path, args.no_python, args.module = sys.executable, False, True, False


def _preload(args: argparse.Namespace) -> str:
    names = [n.strip() for n in args.preload.split(",") if n.strip()]
    if bad := [n for n in names if not all(part.isidentifier() for part in n.split("."))]:
        raise UsageError(f"--preload {bad[0]!r} is no module's name; give names separated by commas, or auto")
    if names and args.warm_start == "off":
        raise UsageError("--preload has nothing to preload into with --warm-start off; leave one of them out")
    return ",".join(names)


def _patience(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"--storage-patience must be a number of seconds, not {seconds}")
    return seconds


def _seconds(option: str, text: str | None) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)", text.strip()) if text is not None else None
    if text is not None and match is None:
        raise UsageError(f"{option} {text} is no time such as 90s, 30m or 12h")
    return 0.0 if match is None else float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _bandwidth(mib: float) -> float:
    if not 0 <= mib < float("inf"):
        raise UsageError(f"--keeper-bandwidth must be a number of MiB per second, 0 for no limit, not {mib}")
    return mib


def _grace(value: object) -> int | None:
    if value is None:
        return None
    try:
        seconds = int(str(value))
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise UsageError(f"--shutdown-timeout must be a whole number of seconds, 0 or more, not {value}")
    return seconds


def _check_script(args: argparse.Namespace) -> None:
    script = args.training_script
    if args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise UsageError(f"cannot find the program {script!r}: give its path, or put it on PATH and make it executable")
    elif args.module:
        top = script.partition(".")[0]
        if top not in sys.builtin_module_names and importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"cannot find the module {script!r} (-m): it is neither below {os.getcwd()} nor installed")
    else:
        try:
            if os.path.isdir(script):
                script = os.path.join(script, "__main__.py")
            open(script, "rb").close()
        except OSError as e:
            raise UsageError(f"cannot read the training script {args.training_script!r}: {e.strerror}") from e


def _check_logs(args: argparse.Namespace) -> None:
    from torch.distributed.elastic.multiprocessing import Std

    for name in ("redirects", "tee"):
        try:
            Std.from_str(getattr(args, name))
        except ValueError as e:
            given = getattr(args, name)
            raise UsageError(f"--{name} must be 0, 1, 2 or 3, or such numbers by local rank as in 0:1,1:2; not {given!r}") from e
    if args.log_dir and os.path.exists(args.log_dir) and not os.path.isdir(args.log_dir):
        raise UsageError(f"--log-dir {args.log_dir} is not a folder; name another")


def _sizes(args: argparse.Namespace) -> tuple[int, int, int]:
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        least, most = parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as e:
        raise UsageError(f"--nnodes {args.nnodes} is neither a number nor MIN:MAX") from e
    if not 0 < least <= most:
        raise UsageError(f"--nnodes {args.nnodes}: MIN must be 1 or more and not above MAX")
    try:
        nproc = determine_local_world_size(args.nproc_per_node)
    except ValueError as e:
        raise UsageError(f"--nproc-per-node {args.nproc_per_node}: {e}") from e
    if nproc < 1:
        raise UsageError(f"--nproc-per-node {nproc}: at least one worker is needed")
    return nproc, least, most


def _metrics_at(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--metrics-port {text!r} is neither a port nor HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def _slots(args: argparse.Namespace, nproc: int) -> Slots:
    k = args.world_size_multiple_of
    if k < 1 or nproc % k:
        raise UsageError(f"--world-size-multiple-of {k} does not divide --nproc-per-node {nproc}")
    if args.min_nproc is not None and not 1 <= args.min_nproc <= nproc:
        raise UsageError(f"--min-nproc {args.min_nproc} must be between 1 and --nproc-per-node {nproc}")
    if args.spares < 0:
        raise UsageError(f"--spares {args.spares} must be 0 or more")
    return first_slots(nproc, spares=args.spares, min_nproc=args.min_nproc, multiple_of=k)


def _check_devices(args: argparse.Namespace, plan: tuple[Fault, ...]) -> None:
    if args.simulate_gpus < 0:
        raise UsageError(f"--simulate-gpus {args.simulate_gpus} must be 0 or more")
    if args.health_policy is not None:
        load_health_policy(args.health_policy)
    if not args.simulate_gpus and STATE_VARIABLE not in os.environ and (harm := next((f for f in plan if f.kind in DEVICE_KINDS), None)):
        raise UsageError(f"chaos entry {harm.text!r} needs --simulate-gpus N: goodrun does no harm to a real GPU")


def _chaos(text: str | None, nproc: int, slots: Slots, max_nodes: int) -> tuple[Fault, ...]:
    if not text:  # the quiet take of a rehearsal overrides the plan with nothing
        return ()
    try:
        plan = parse_plan(text, nproc * max_nodes, slots.active)
        check_plan(plan, nproc * max_nodes, (*slots.active, *slots.spare))
    except ChaosError as e:
        raise UsageError(str(e)) from e
    return plan


def _verdict(args: argparse.Namespace) -> bool:
    if args.chaos_verdict and not args.chaos:
        raise UsageError("--chaos-verdict has nothing to judge without --chaos; give it a plan, as in --chaos 'kill:rank=1@step=20'")
    if not 0 <= args.min_goodput <= 1:
        raise UsageError(f"--min-goodput {args.min_goodput} must be a share between 0 and 1")
    return bool(args.chaos_verdict)
