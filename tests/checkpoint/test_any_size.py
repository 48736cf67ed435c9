"""Saved at one world size, loaded at any other: random states, shardings and sizes, over real ranks."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from .far import Fault
from .stores import Store

WORLD = 6
POOL = Path(__file__).with_name("pool.py")

sizes = st.lists(st.integers(0, 7), max_size=3)
dtypes = st.sampled_from(["float32", "bfloat16", "int64", "uint8", "float8_e4m3fn"])
# How the tensor lies: whole on every rank, sharded by a dimension (if it has that one), or a replicated DTensor.
lies = st.sampled_from([None, 0, 1, -1])
tensors = st.lists(st.tuples(sizes, dtypes, lies), min_size=1, max_size=5)
C58 = [([6], "float32", 0), ([1], "float32", 0), ([0], "float32", 0), ([], "float32", None), ([6, 3], "float32", 0)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Six ranks that wait for cases."""
    folder = tmp_path_factory.mktemp("pool")
    ranks = []
    for rank in range(WORLD):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD), "STORE": str(folder / "store"), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen([sys.executable, "-W", "ignore", str(POOL)], env=env, stdin=pipe, stdout=pipe, text=True))
    yield ranks[0]
    first = ranks[0]
    assert first.stdin is not None and first.stdout is not None
    with suppress(BrokenPipeError):  # a rank has failed: the test has said so
        first.stdin.close()
    try:
        assert [r.wait(30) for r in ranks] == [0] * WORLD
    finally:
        for r in ranks:
            r.kill()
            r.wait()
        first.stdout.close()


SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None, derandomize=True)


def run(pool: subprocess.Popen[str], case: list[tuple[Any, ...]], worlds: list[int], folder: str, environ: dict[str, str]) -> None:
    """One case, from its beginning to its end."""
    sent(pool, case, worlds, folder, environ)
    told(pool)


def sent(pool: subprocess.Popen[str], case: list[tuple[Any, ...]], worlds: list[int], folder: str, environ: dict[str, str]) -> None:
    """Begin a case."""
    assert pool.stdin is not None
    pool.stdin.write(json.dumps({"tensors": case, "worlds": worlds, "folder": folder, "environ": environ}) + "\n")
    pool.stdin.flush()


def told(pool: subprocess.Popen[str]) -> None:
    """The ranks say what is wrong, or nothing."""
    assert pool.stdout is not None
    assert pool.stdout.readline() == "\n"


@pytest.mark.timeout(300)
@settings(SETTINGS, max_examples=25)
@given(case=tensors, before=st.integers(1, WORLD), after=st.integers(1, WORLD))
@example(case=C58, before=4, after=3)
@example(case=C58, before=4, after=2)
@example(case=C58, before=4, after=5)
def test_saved_at_one_size_loaded_at_another(
    pool: subprocess.Popen[str], tmp_path: Path, case: list[tuple[Any, ...]], before: int, after: int
) -> None:
    """Whatever the state, however it lies on the ranks, and whatever the two sizes from 1 to 6: every value comes back."""
    folder = tmp_path / "ckpt"
    shutil.rmtree(folder, ignore_errors=True)
    run(pool, case, [before, after], str(folder), {})


@pytest.mark.parametrize("store", ["s3", "volume", "mount"], indirect=True)
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@settings(SETTINGS, max_examples=10)
@given(case=tensors, before=st.integers(1, WORLD), after=st.integers(1, WORLD))
@example(case=C58, before=4, after=3)
def test_across_the_network(
    store: Store, pool: subprocess.Popen[str], case: list[tuple[Any, ...]], before: int, after: int
) -> None:
    """The same with faults on: every fifth request is refused for the moment; a mount has faults of its own."""
    count = itertools.count()
    if store.server is not None:
        store.server.plan.faults = [Fault(lambda method, path: next(count) % 5 == 4, status=503)]
    run(pool, case, [before, after], f"{store.url}/{uuid.uuid4().hex}", store.environ)
