"""Puts together what watches the devices of a run, as far as this machine has any."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ...fault_injection.simulated_gpus import CannotSimulate, SimulatedGpus
from ..errors import UsageError
from ..events import Event
from ..policy import Slots
from .asking import ProberProcess
from .health_policy import load
from .ledger import Ledger, LedgerError
from .probation import Probation
from .ward import Ward
from .watch import DeviceWatch

_NVIDIA = ("/dev/nvidiactl", "/dev/dxg")
_AMD = "/dev/kfd"
_ANSWER_WITHIN_S = 30.0
_SIMULATED_EVERY_S, _SIMULATED_TERM_S = 0.5, 3.0


def open_ward(
    slots: Slots,
    *,
    policy_file: Path | None,
    simulated: SimulatedGpus | None,
    ledger: Ledger | None,
    run_id: str,
    record: Callable[[Event], object],
    say: Callable[[str], None],
    environ: Mapping[str, str],
) -> tuple[Ward, Slots]:
    """The run's ward, and the slots that the ledger (by default the node's) leaves it."""
    policy = load(policy_file)
    if simulated is not None and policy_file is None:
        policy = replace(policy, every_s=_SIMULATED_EVERY_S, term_s=_SIMULATED_TERM_S)  # nobody waits ten minutes for a rehearsal
    env = {**environ, **(simulated.env(environ) if simulated is not None else {})}
    watch, devices = None, None
    if simulated is not None or any(map(os.path.exists, _NVIDIA)):
        prober = ProberProcess(policy.every_s, policy.deadline_s, env)
        prober.start()
        watch = DeviceWatch(policy, prober, say)
        devices = watch.devices(_ANSWER_WITHIN_S)
        if devices is None:
            watch.close()
            watch = None
    elif os.path.exists(_AMD):
        say("AMD GPUs are not watched: goodrun asks NVIDIA's driver only; their health is not known")
    if devices and ledger is None:
        ledger = _ledger_of_node(environ, say)
    probation = Probation(policy, ledger, record=record, say=say, run_id=run_id, env=env)
    ward = Ward(policy, watch, probation, record=record, say=say, env=environ)
    return ward, ward.admit(slots, devices or ())


def simulate(folder: Path, count: int, environ: Mapping[str, str]) -> tuple[SimulatedGpus | None, Ledger | None]:
    """The run's simulated GPUs, if it has any, with a ledger of their own; or those of the environment, which are as real as any.

    Raises UsageError where they cannot be built.
    """
    if not count:
        return SimulatedGpus.from_env(environ), None
    try:
        return SimulatedGpus.create(folder, count), Ledger(folder / "quarantine.json")
    except CannotSimulate as e:
        raise UsageError(f"--simulate-gpus: {e}") from e


def _ledger_of_node(environ: Mapping[str, str], say: Callable[[str], None]) -> Ledger | None:
    try:
        return Ledger.of_node(environ)
    except LedgerError as e:
        say(f"{e}: sick GPUs are set aside in this run only")
        return None
