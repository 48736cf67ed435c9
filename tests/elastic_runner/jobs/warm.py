"""Trains until killed in generation 0, two steps in the next; each generation writes down how it was started."""

import faulthandler
import gc
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import numpy
import torch


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").split(":")[0].replace(f"attempt_{os.environ['GOODRUN_GENERATION']}", "attempt")
    except OSError:
        return "/proc"


seen = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "main": sys.modules["__main__"].__file__,
    "loader": type(__loader__).__name__,
    "path": sys.path,
    "cwd": os.getcwd(),
    "unbuffered": sys.stdout.write_through,
    "leader": os.getsid(0) == os.getpid() == os.getpgrp(),
    "parent": Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[1:3],
    "thread": threading.main_thread().native_id == os.getpid() and threading.active_count(),
    "signals": [str(signal.getsignal(s)) for s in signal.valid_signals()],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "umask": os.umask(0o22),
    "limits": [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")],
    "nice": os.nice(0),
    "cores": sorted(os.sched_getaffinity(0)),
    "flags": list(sys.flags),
    "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
    "faulthandler": faulthandler.is_enabled(),
    "multiprocessing": (multiprocessing.current_process().name, str(multiprocessing.parent_process())),
    "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    "globals": sorted(n for n in globals() if n.startswith("__")),
    "cmdline": Path("/proc/self/cmdline").read_text().split("\0"),
    "environment": {k: v for k, v in sorted(os.environ.items())},
    "descriptors": sorted(_target(n) for n in os.listdir("/proc/self/fd")),
}
rank, generation = os.environ["RANK"], os.environ["GOODRUN_GENERATION"]
print(f"generation {generation}", flush=True)
Path(os.environ["TEST_DIR"], f"seen.r{rank}.g{generation}").write_text(json.dumps(seen))
Path(os.environ["TEST_DIR"], f"random.r{rank}.g{generation}").write_text(
    repr((random.random(), numpy.random.rand(), torch.initial_seed(), bytes(multiprocessing.current_process().authkey)))
)
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    weight.grad = torch.ones(1)
    optimizer.step()
    if generation != "0":
        break
    time.sleep(0.02)
