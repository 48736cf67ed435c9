"""A rank without torch that does what its first argument says; leaves marker files in TEST_DIR."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

rank, generation = int(os.environ["RANK"]), os.environ["GOODRUN_GENERATION"]
here = Path(os.environ["TEST_DIR"])


def mark(name: str, text: object = "") -> None:
    temporary = here / f".{name}.{os.getpid()}"
    temporary.write_text(str(text))
    temporary.rename(here / name)


def wait_for(name: str, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not (here / name).exists():
        if time.monotonic() > end:
            sys.exit("gave up waiting")
        time.sleep(0.01)


def up() -> None:
    mark(f"up.r{rank}.g{generation}", os.getpid())


what = sys.argv[1]
if what == "wait":  # until told; says which signals came
    hits: list[int] = []

    def came(signum: int, _: object) -> None:
        hits.append(signum)
        mark(f"{signal.Signals(signum).name}.r{rank}.x{hits.count(signum)}")

    for s in sys.argv[2:]:
        signal.signal(getattr(signal, s), came)
    up()
    wait_for("finish")
elif what == "stubborn":  # ignores SIGTERM; rank 1 dies at the first attempt
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    up()
    if rank == 1 and generation == "0":
        wait_for("up.r0.g0")
        os.kill(os.getpid(), signal.SIGKILL)
    if generation == "0":
        time.sleep(300)
elif what == "helper":  # each rank has a helper process; rank 1 dies at the first attempt
    helper = subprocess.Popen(["sleep", "300"], preexec_fn=os.setpgrp)
    mark(f"helper.r{rank}.g{generation}", helper.pid)
    if generation == "0":
        if rank == 1:
            wait_for("helper.r0.g0")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
elif what == "exit":  # rank 1 ends with the given status, the others wait
    up()
    if rank == 1:
        sys.exit(int(sys.argv[2]))
    time.sleep(300)
elif what == "raise":
    up()
    if rank == 1:
        wait_for(f"up.r0.g{generation}")
        raise ValueError("data shard 17 has no rows")
    time.sleep(300)
elif what == "print":
    print(f"hello from generation {generation}", flush=True)
    up()
    if generation == "0" and rank == 1:
        wait_for("up.r0.g0")
        os.kill(os.getpid(), signal.SIGKILL)
    if generation == "0":
        time.sleep(300)
elif what == "die-in-slot":  # the slot named kills its worker, always
    up()
    if os.environ["GOODRUN_SLOT"] == sys.argv[2]:
        for r in range(int(os.environ["WORLD_SIZE"])):
            wait_for(f"up.r{r}.g{generation}")
        os.kill(os.getpid(), signal.SIGKILL)
    if any((here / f"up.r{r}.g{generation}").exists() for r in range(9)) and int(os.environ["WORLD_SIZE"]) == int(sys.argv[3]):
        mark(f"done.r{rank}.w{os.environ['WORLD_SIZE']}")
        if "spare" not in sys.argv or os.environ["GOODRUN_SLOT"] == "2" or rank == 0:
            sys.exit(0)
    time.sleep(300)
elif what == "environment":
    import json

    names = sys.argv[2].split(",")
    mark(f"environment.r{rank}", json.dumps({n: os.environ.get(n) for n in names}))
elif what == "argv":
    import json

    mark("argv", json.dumps(sys.argv[2:]))
