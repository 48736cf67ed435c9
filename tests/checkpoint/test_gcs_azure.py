"""Google Cloud Storage and Azure's blobs, through their fsspec packages, against the emulators that there are for them, with faults on.

`pip install 'goodrun[emulators]'` and `npm install -g azurite`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from goodrun import ObjectStoreReader, ObjectStoreWriter
from goodrun.checkpoint import DictCheckpoints
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.places import storage_at
from goodrun.elastic_runner.reading import checkpoints_main

from .far import Fault
from .stores import Store
from .test_far import load, relaunch
from .test_far_matrix import every
from .test_keeper import same, state_of

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("store", ["gcs", "azure"], indirect=True),
]


def test_saves_and_restores_with_faults_on(store: Store, keepers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Saves are committed, the manifest last, and pruned; what is damaged is gone around; a large shard comes back with every bit."""
    assert store.server is not None
    keepers.start()
    checkpoints = DictCheckpoints(store.url, keep=2)
    once = Fault(every(9), status=503, times=1)  # Azure's library pauses for 15 s then, before goodrun hears of it
    store.server.plan.faults = [once, Fault(every(11), status=429, retry_after="0.1"), Fault(every(13), cut=100)]
    for step in (1, 2, 3):
        checkpoints.save(state_of(step), step).result(120)
    assert [(f.step, f.fault) for f in found_in(store.place)] == [(3, None), (2, None)]
    assert checkpoints_main([store.url, "--verify"]) == 0
    relaunch(keepers)
    step, state = load(store)
    assert step == 3 and same(state, 3)
    storage_at(store.place).remove(found_in(store.place)[0].path / "values-0.json")
    step, state = load(store)
    assert step == 2 and same(state, 2)
    assert "values-0.json is missing" in capsys.readouterr().err
    big = torch.rand(12 << 20)
    DictCheckpoints(f"{store.url}-big").save({"w": big}, 1).result(120)
    relaunch(keepers)
    found = {"w": torch.zeros_like(big)}
    assert DictCheckpoints(f"{store.url}-big").load(found) == 1
    assert torch.equal(found["w"], big)
    assert {503, 429} <= {status for _, _, status in store.server.log}


def test_torchs_own(store: Store) -> None:
    """dcp saves to an address and loads from it."""
    state = {"w": torch.rand(1000)}
    dcp.save(state, storage_writer=ObjectStoreWriter(f"{store.url}/dcp"))
    found = {"w": torch.zeros(1000)}
    dcp.load(found, storage_reader=ObjectStoreReader(f"{store.url}/dcp"))
    assert torch.equal(found["w"], state["w"])
