"""How long a save takes where one connection carries only so much: N ranks with goodrun beside torch.save by rank 0.

Storage is the tests' server of the Files API on loopback, in a process of its own. Each figure is a ratio to rank 0's torch.save of the
same state in the same minute; the law is 1/N, as far as all connections together carry it. The stall is compared with that of saves of the
same state to the local disk, in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


def serve(rate: float, total: float, told: Any) -> None:
    """The storage."""
    spec = importlib.util.spec_from_file_location("far", HERE.parents[1] / "tests" / "checkpoint" / "far.py")
    assert spec is not None and spec.loader is not None
    far = importlib.util.module_from_spec(spec)
    sys.modules["far"] = far
    spec.loader.exec_module(far)
    server = far.FilesApi()
    server.plan.connection_rate, server.plan.total_rate = rate, total
    told.put((server.url, server.token, server.volume))
    server.serve_forever()


def rank(mib: int, rounds: int, url: str) -> None:
    """One rank of the job: saves by rank 0 alone and by all, in turn."""
    import torch
    import torch.distributed as dist
    from databricks.sdk import WorkspaceClient

    from goodrun.checkpoint import DictCheckpoints

    torch.set_num_threads(1)
    me, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=me, world_size=world)
    state = {"w": torch.rand(mib << 18)}
    checkpoints, local = DictCheckpoints(url, keep=1), DictCheckpoints(f"{os.environ['STORE']}.local", keep=1)
    for each in (checkpoints, local):
        each.save(dict(state), 1).result()  # the client is imported, the slots are there
    files = WorkspaceClient().files
    alone, together, stalls, locally = [], [], [], []
    for step in range(2, 2 + rounds):
        dist.barrier()
        begin = time.monotonic()
        if me == 0:
            whole = io.BytesIO()
            torch.save(state, whole)
            files.upload(f"{url}/rank0.pt", whole, overwrite=True, use_parallel=False)
            alone.append(time.monotonic() - begin)
            files.delete(f"{url}/rank0.pt")
        dist.barrier()
        pending = checkpoints.save(dict(state), step)
        pending.result()
        together.append(pending.durable_s)
        stalls.append(pending.stall_s)
        dist.barrier()
        pending = local.save(dict(state), step)
        pending.result()
        locally.append(pending.stall_s)
    checkpoints.close()
    local.close()
    if me == 0:
        answer = {"rank0_s": statistics.median(alone), "goodrun_s": statistics.median(together)}
        print(json.dumps(answer | {"stall_s": statistics.median(stalls), "local_stall_s": statistics.median(locally)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Each world size in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=32, help="the state")
    parser.add_argument("--rate", type=float, default=8.0, help="MiB a second that a connection carries")
    parser.add_argument("--total", type=float, default=0.0, help="MiB a second that all connections carry together; 0 is no limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank(args.mib, args.rounds, args.rank_of)
        return
    told: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(args.rate * (1 << 20), args.total * (1 << 20), told), daemon=True)
    server.start()
    host, token, volume = told.get()
    print(f"{args.mib} MiB at {args.rate:g} MiB/s a connection")
    print("ranks  rank 0 (s)  goodrun (s)  ratio   1/N  stall (ms)  local stall (ms)")
    for world in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "DATABRICKS_HOST": host, "DATABRICKS_TOKEN": token, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
            env |= {"STORE": f"{folder}/store", "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])}
            words = [*sys.argv[1:], "--rank-of", f"{volume}/run-{world}"]
            command = [sys.executable, "-W", "ignore", str(HERE), *words]
            ranks = [subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(world)]
            out = [r.communicate()[0] for r in ranks]
            if any(r.returncode for r in ranks):
                sys.exit("a rank has failed")
        a = json.loads(out[0].splitlines()[-1])
        ratio = a["goodrun_s"] / a["rank0_s"]
        stalls = f"{a['stall_s'] * 1000:10.1f}  {a['local_stall_s'] * 1000:16.1f}"
        print(f"{world:5}  {a['rank0_s']:10.2f}  {a['goodrun_s']:11.2f}  {ratio:5.2f}  {1 / world:4.2f}  {stalls}", flush=True)
    server.terminate()


if __name__ == "__main__":
    main()
