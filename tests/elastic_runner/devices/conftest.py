"""Simulated GPUs, asked by the real prober through the real nvidia-ml-py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from goodrun.elastic_runner.devices.asking import Heard, ProberProcess
from goodrun.fault_injection.simulated_gpus import SimulatedGpus


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    """Four healthy devices."""
    return SimulatedGpus.create(tmp_path / "gpus", 4)


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
