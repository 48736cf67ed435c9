"""Simulated GPUs, asked by the real prober through the real nvidia-ml-py."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from goodrun.elastic_runner.devices.asking import Heard, ProberProcess
from goodrun.elastic_runner.devices.health_policy import SHIPPED
from goodrun.fault_injection.simulated_gpus import SimulatedGpus


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What needs a real GPU is skipped where there is none."""
    if item.get_closest_marker("gpu") and not os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is no NVIDIA GPU here")


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    """Four healthy devices."""
    return SimulatedGpus.create(tmp_path / "gpus", 4)


@pytest.fixture
def gpus8(tmp_path: Path) -> SimulatedGpus:
    """Eight healthy devices, for a node that several jobs run on."""
    return SimulatedGpus.create(tmp_path / "gpus", 8)


@pytest.fixture
def prober(gpus: SimulatedGpus) -> Iterator[Callable[..., ProberProcess]]:
    """Start a prober that asks every 50 ms; ended after the test."""
    started: list[ProberProcess] = []

    def start(*uuids: str, deadline_s: float = 30.0, every_s: float = 0.05) -> ProberProcess:
        p = ProberProcess(every_s, deadline_s, {**os.environ, **gpus.env(os.environ)}, uuids)
        p.start()
        started.append(p)
        return p

    yield start
    for p in started:
        p.close()


@pytest.fixture
def hear() -> Callable[..., list[Heard]]:
    """Everything a prober says until one of it passes `test`, that one included."""

    unheard: list[Heard] = []

    def until(p: ProberProcess, test: Callable[[Heard], bool], timeout: float = 30) -> list[Heard]:
        heard: list[Heard] = []
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            unheard.extend(p.read())
            while unheard:
                heard.append(unheard.pop(0))
                if test(heard[-1]):
                    return heard
            time.sleep(0.005)
        raise AssertionError(f"not heard in {timeout} s; only {heard[-5:]}")

    return until


@pytest.fixture
def quick_policy(tmp_path: Path) -> Path:
    """The shipped policy in a hurry: rounds of 100 ms, terms of a second."""
    text = SHIPPED.read_text()
    for slow, quick in (("every: 2s", "every: 100ms"), ("settle: 5s", "settle: 500ms"), ("term: 10m", "term: 1s")):
        assert slow in text
        text = text.replace(slow, quick)
    path = tmp_path / "quick.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def consumed_once() -> Callable[[Path, int], None]:
    """Check what jobs/train.py trained on: every step's newest attempt counts, and every epoch of 8 steps used each of 96 samples once."""

    def check(where: Path, steps: int) -> None:
        used: dict[int, tuple[str, Counter[int]]] = {}
        for path in sorted(where.glob("samples.l0.g*.r*")):
            attempt = path.name.rpartition(".r")[0]
            for line in path.read_text().splitlines():
                step, _, *ids = map(int, line.split())
                if step not in used or used[step][0] < attempt:
                    used[step] = (attempt, Counter())
                if used[step][0] == attempt:
                    used[step][1].update(ids)
        assert sorted(used) == list(range(1, steps + 1))
        for first in range(1, steps - 6, 8):
            total = sum((used[s][1] for s in range(first, first + 8)), Counter())
            assert total == Counter(range(96)), f"epoch from step {first}"

    return check
