"""What of the shell and the machine around a run deserves a line: before it starts, or where it explains a failure."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, MutableMapping

_SHARED_MEMORY = re.compile(r"bus error|shared memory|/dev/shm|SIGBUS|unable to (write|open).*torch_", re.IGNORECASE)
_SMALL_SHM = 1 << 30


def choose_threads(nproc: int, env: MutableMapping[str, str], cores: int) -> str:
    """Set OMP_NUM_THREADS as torchrun would, unless the user did; returns the line that says so, or nothing.

    `cores` is how many the launcher may use; Slurm's own word for the task goes before it.
    """
    if "OMP_NUM_THREADS" in env or nproc == 1:
        return ""
    env["OMP_NUM_THREADS"] = "1"
    slurm = env.get("SLURM_CPUS_PER_TASK", "")
    cores, source = (int(slurm), "SLURM_CPUS_PER_TASK") if slurm.isdigit() else (cores, "cores here")
    better = f"; {cores} {source}, so OMP_NUM_THREADS={cores // nproc} would fit" if cores // nproc > 1 else ""
    return f"OMP_NUM_THREADS is unset: 1 thread for each of the {nproc} ranks, as torchrun does{better}"


def other_environment(env: Mapping[str, str], prefix: str, executable: str) -> str:
    """A line that names both interpreters where the shell's active environment is not the one that runs goodrun; else nothing."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = env.get(variable, "")
        if active and os.path.realpath(active) == os.path.realpath(prefix):
            return ""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if active := env.get(variable, ""):
            theirs = os.path.join(active, "bin", "python")
            return (
                f"the ranks will run {executable}, though {variable} is {active}; to use it: {theirs} -m goodrun"
            )
    return ""


def why_shared_memory(words: str, path: str = "/dev/shm") -> str:
    """What to say of the machine's shared memory after a failure described by `words`; nothing if it had no part in it."""
    if not _SHARED_MEMORY.search(words):
        return ""
    try:
        total, _, free = shutil.disk_usage(path)
    except OSError:
        return f"{path} does not exist, and DataLoader workers pass their batches through it; mount one, or use num_workers=0"
    if total >= _SMALL_SHM and free > total // 10:
        return ""
    size = f"{path} has {total / 2**20:.0f} MiB, {free / 2**20:.0f} free"
    return f"{size}, and DataLoader workers pass their batches through it; make it larger (docker run --shm-size=8g), or use num_workers=0"
