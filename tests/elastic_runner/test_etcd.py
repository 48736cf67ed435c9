"""etcd as the rendezvous backend, where a site has it: goodrun leaves it as torch has it."""

import importlib.util
import os
import shutil
import signal
import subprocess
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from elastic_runner.test_nodes import attempts, free_port

from goodrun.elastic_runner.events import FirstStep, WorkersSpawned

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)"),
    pytest.mark.skipif(importlib.util.find_spec("etcd") is None, reason="torch wants python-etcd for it, which is not installed"),
]


@pytest.fixture
def etcd(tmp_path):
    """A server of one, on loopback; its address."""
    ours, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    where = ["--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", ours, "--advertise-client-urls", ours]
    where += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
    with open(tmp_path / "etcd.log", "wb") as log:
        server = subprocess.Popen(["etcd", "--enable-v2", *where], stdout=log, stderr=log)
    try:
        while not _answers(ours):
            assert server.poll() is None, (tmp_path / "etcd.log").read_text()
        yield ours.removeprefix("http://")
    finally:
        server.kill()
        server.wait(20)


def _answers(address):
    try:
        return urlopen(f"{address}/health", timeout=5).status == 200
    except (URLError, ConnectionError, TimeoutError):
        return False


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_two_nodes_meet_at_etcd_and_restart_together(job, etcd, backend):
    """As with the other backends: a rank is killed on one node, and both come back in the same new generation."""
    flags = ["--nnodes", 2, "--rdzv-backend", backend, "--rdzv-endpoint", etcd, "--rdzv-id", "together", "--local-addr", "127.0.0.1"]
    a, b = (job(*flags, "--nproc-per-node", 1, "allreduce.py", 60, name=name, env={"TEST_PAUSE": "0.05"}) for name in "ab")
    a.until(lambda: a.events(FirstStep) and b.events(FirstStep), 90)
    os.kill(b.events(WorkersSpawned)[0].pids[0], signal.SIGKILL)
    a.ok(200)
    b.ok(200)
    assert attempts(a) == attempts(b)
    assert [world for _, world in attempts(b)][:2] == [2, 2]
