"""`goodrun [options] train.py [arguments]`, `python -m goodrun.elastic_runner`, and the sub-commands."""

from __future__ import annotations

import logging
import os
import random
import secrets
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from .errors import GoodrunError, UsageError
from .nursery import Nursery, foreseen
from .signals import Interrupted, Signals

if TYPE_CHECKING:
    from .exporting.attach import Exporters
    from .journal import Journal
    from .options import RunConfig
    from .supervisor import Supervisor


_SAY_WITHIN_MS = 200
_PIPE_TAKES = 4000
"""Bytes that a pipe takes without blocking once it takes any (PIPE_BUF), with a little to spare."""


def say(text: str) -> None:
    """One line to the person at the terminal."""
    with suppress(OSError, ValueError):  # nobody reads stderr any more, or slower than we speak; the record has it
        poll = select.poll()
        poll.register(sys.stderr, select.POLLOUT)
        if poll.poll(_SAY_WITHIN_MS):
            print(f"goodrun: {text}"[:_PIPE_TAKES], file=sys.stderr, flush=True)


def _terminal() -> int | None:
    """The descriptor of the terminal at stderr, if that is one on which a cursor can be moved."""
    if os.environ.get("TERM", "dumb") == "dumb" or not os.isatty(2):
        return None
    return 2


def console() -> None:
    """The `goodrun` command: exits with the status a shell user expects."""
    from .reading import SUBCOMMANDS

    argv = sys.argv[1:]
    if argv and argv[0] in SUBCOMMANDS:
        sys.exit(SUBCOMMANDS[argv[0]](argv[1:]))
    if argv == ["--version"]:
        print(f"goodrun {__version__}")
        sys.exit(0)
    sys.exit(launch(argv))


def main(args: Sequence[str] | None = None) -> None:
    """Run a job as `torch.distributed.run.main` does: `args` is the command line, by default the process's own.

    Raises ChildFailedError for a failed job, SignalException for one that a signal stopped, SystemExit for a command line that cannot work,
    or where all ranks ended well and the last checkpoint was lost.
    """
    errors: list[BaseException] = []
    status = launch(sys.argv[1:] if args is None else [str(a) for a in args], errors.append)
    if errors:
        raise errors[0]
    if status:
        raise SystemExit(status)


def launch(argv: Sequence[str], on_error: Callable[[BaseException], object] = lambda error: None) -> int:
    """Run a job; returns its exit status: 0, 1 for a failed job, 2 for a command line that cannot work, 128+N when stopped by signal N.

    `on_error` is given torch's exception that ended the job, if there was one.
    """
    signals = Signals()
    signals.install()
    nursery = Nursery()
    try:
        if "--chaos-verdict" not in argv and (guess := foreseen(argv, os.environ)):
            nursery.foresee(*guess)
        with signals.waiting("torch to be imported"):
            from . import seams
            from .exporting.attach import exporting
            from .options import parse

            seams.check()
            args, config = parse(argv)
        if config.verdict:
            from .verdict.rehearsal import rehearse

            return rehearse(argv, config, signals, say)
        with exporting(config, _terminal() if config.status else None, say) as exporters:
            return _launch(args, config, signals, nursery, exporters, on_error)
    except GoodrunError as e:
        say(str(e))
        return 2
    except Interrupted as e:
        say(f"stopped by {signal.Signals(e.signum).name}")
        return 128 + e.signum
    finally:
        nursery.close()
        signals.restore()


def _launch(
    args: Any, config: RunConfig, signals: Signals, nursery: Nursery, exporters: Exporters, on_error: Callable[[BaseException], object]
) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    from . import ending, runs, surroundings
    from .preemption import PreemptionWatch
    from .seating import NoDevices

    signals.raises = lambda signum: SignalException(f"stopped by {signal.Signals(signum).name}", signal.Signals(signum))
    home, journal, fresh = _open_record(config)
    run_dir = journal.run_dir
    exporters.attach(journal)
    try:
        supervisor = _supervisor(config, journal, signals, nursery)
    except UsageError:
        journal.close()
        if fresh:  # it never was a run
            runs.forget(home, run_dir)
        raise
    supervisor.recorder.on_look = exporters.look
    signals.on_forced = lambda signum: ending.stopped(supervisor, signum, signals.broke_off)
    threads = surroundings.choose_threads(len(config.slots.active), os.environ, len(os.sched_getaffinity(0)))
    for line in (surroundings.other_environment(os.environ, sys.prefix, sys.executable), threads):
        if line:
            say(line)
    if not config.warm_start:
        nursery.close()
    elif config.preload == "auto":
        nursery.learns_from = run_dir / "modules.txt"
    else:
        nursery.preload = config.preload
    if config.cold_because:
        say(f"starts will be cold: {config.cold_because}; --warm-start=on overrules this")
    if args.log_dir is None:
        args.log_dir = str(run_dir / "logs")
    status = 1
    if config.preemption_at:
        supervisor.preemption = PreemptionWatch(config.preemption_at, say)
        supervisor.preemption.start()
    try:
        supervisor.seating.begin()
        record(_run)(args, config, supervisor, signals)  # for a launcher that is itself somebody's worker
        status = ending.succeeded(supervisor)
    except (ChildFailedError, NoDevices) as e:
        status = ending.failed(supervisor, e)
        on_error(e)
    except SignalException as e:
        status = ending.stopped(supervisor, int(e.sigval), signals.broke_off)
        on_error(e)
    except Exception as e:  # the launcher's outermost boundary: torch's rendezvous has errors of many kinds, and each must end the record
        status = ending.broken_launch(supervisor, args, e)
        on_error(e)
    finally:
        supervisor.close()
        journal.close()
    if status == 2 and fresh:  # it never was a run
        runs.forget(home, run_dir)
    return status


def _run(args: Any, config: RunConfig, supervisor: Supervisor, signals: Signals) -> None:
    from torch.distributed.run import run

    from . import agent, alone, seams
    from .nodes.handler import BACKEND, registered

    alone.instead_of_meeting(args, config.max_nodes)
    known = [s for s in (*config.stop_signals, config.requeue_signal) if hasattr(signal, s)]
    signals.install(tuple(int(getattr(signal, s)) for s in known))
    if "LOGLEVEL" not in os.environ:  # torch's agent announces what we say ourselves
        logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    signals.wait_for("the rendezvous")  # until the agent has formed its first group
    hint, args.node_rank = args.node_rank, 0 if args.rdzv_backend == BACKEND else args.node_rank
    record = supervisor.journal.run_dir, supervisor.journal.began
    with registered(hint, config.spare_nodes, record), seams.swapped(agent.bound_to(supervisor), agent.start_processes_for(supervisor)):
        try:
            run(args)
        finally:
            supervisor.settle()


def _open_record(config: RunConfig) -> tuple[Path, Journal, bool]:
    """Where runs live, the record with its first line, and whether its directory is new.

    Raises UsageError, leaving nothing, if that cannot be done.
    """
    import torch

    from . import runs
    from .events import RunStarted
    from .journal import Journal

    try:
        home = runs.runs_home(os.environ)
    except RuntimeError as e:  # no home directory
        place = config.run_dir or config.log_dir
        if place is None:
            raise UsageError("there is no home directory to keep the record in; name a folder with --run-dir") from e
        home = place / "runs"
    if config.run_dir is None and config.log_dir is not None and not runs.can_be_made(home):
        home = config.log_dir / "runs"
    lives_on = config.slurm.record(config.script) if config.slurm else ""
    run_id = lives_on or runs.new_run_id(datetime.now(), random.Random(secrets.randbits(64)))
    run_dir = (config.run_dir or home / run_id).absolute()
    fresh = not run_dir.exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        journal = Journal(run_dir)
        if not journal.lock():
            if lives_on and config.run_dir is None:  # the same script a second time in one step
                journal.close()
                return _open_record(replace(config, slurm=None))
            raise UsageError(f"another goodrun is keeping its record in {run_dir}; name another folder with --run-dir")
        journal.write(
            RunStarted(
                run_id=run_id,
                pid=os.getpid(),
                argv=config.argv,
                cwd=os.getcwd(),
                script=config.script,
                slots=config.slots.active,
                spares=config.slots.spare,
                torch=torch.__version__,
                version=__version__,
                chaos=config.chaos_text,
            )
        )
        if journal.lost:
            raise OSError(28, "no space left on it")
    except OSError as e:
        if fresh:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise UsageError(f"cannot keep the record in {run_dir}: {e.strerror}; name another folder with --run-dir") from e
    if config.run_dir is not None:
        runs.remember(home, run_dir, run_id)
    return home, journal, fresh


def _supervisor(config: RunConfig, journal: Journal, signals: Signals, nursery: Nursery) -> Supervisor:
    from ..checkpoint.wire import RESTORE_VARIABLE
    from ..fault_injection.device_faults import harm
    from .bootstrap import REQUEUE_VARIABLE
    from .devices.opening import open_ward, simulate
    from .inflicting import earlier_lives, keeper_env
    from .keeper import KeeperProcess
    from .recorder import Recorder
    from .supervisor import STARTED_VARIABLE, Supervisor

    env = {STARTED_VARIABLE: str(time.time_ns()), "GOODRUN_RUN_DIR": str(journal.run_dir)}
    recorder = Recorder(journal, config.chaos, say)
    started_t, recorder.fired = earlier_lives(journal.run_dir, config.chaos_text)
    simulated, ledger = simulate(journal.run_dir / "gpus", config.simulate_gpus, os.environ)
    ward, slots = open_ward(
        config.slots,
        policy_file=config.health_policy,
        simulated=simulated,
        ledger=ledger,
        run_id=journal.run_dir.name,
        record=journal.write,
        say=recorder.notice,
        environ=os.environ,
    )
    keeper = KeeperProcess(recorder.notice, recorder.saves.hear, config.keeper_bandwidth, config.storage_patience_s)
    if config.chaos:
        keeper.chaos = lambda: keeper_env(config.chaos, recorder.fired, started_t)
    keeper.start()
    env |= keeper.environment
    if config.requeue_signal:
        env[REQUEUE_VARIABLE] = config.requeue_signal
    if config.restore_from:
        env[RESTORE_VARIABLE] = config.restore_from
    supervisor = Supervisor(
        config=config,
        journal=journal,
        signals=signals,
        recorder=recorder,
        say=say,
        worker_env=env,
        started_t=started_t,
        nursery=nursery if config.warm_start else None,
        keeper=keeper,
        ward=ward,
        admitted=slots,
    )
    if simulated is not None:
        supervisor.chaos.harm = lambda fault, slot: harm(simulated, ward.bound[slot].index, fault)
    return supervisor
