"""Storage across the network: what is put there, in which order, what is asked for again, and what becomes of a run that loses it."""

from __future__ import annotations

import shlex
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from goodrun.checkpoint import Checkpointer, CheckpointError, DictCheckpoints, StorageUnreachable
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.manifest import first_fault
from goodrun.checkpoint.places import located, storage_at
from goodrun.checkpoint.remote.objects import persistence_at
from goodrun.elastic_runner.reading import checkpoints_main

from .conftest import Keepers, far, one_of_far
from .far import Fault
from .stores import SECRET, Store
from .test_keeper import same, state_of


def load(store: Store, source: Any = None) -> tuple[int | None, dict[str, Any]]:
    """What a new process of the job would get."""
    state: dict[str, Any] = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for name, v in state_of(0).items()}
    checkpoints = DictCheckpoints(store.url)
    return checkpoints.load(state, source=source), state


def relaunch(keepers: Any) -> None:
    """The next launch of the job: nothing is in memory any more."""
    assert keepers.end() == 0
    keepers.start()


def names(paths: list[str]) -> list[str]:
    """The last parts of the paths of objects."""
    return [path.split("?")[0].rpartition("/")[2] for path in paths]


@far
def test_what_is_put_and_in_which_order(store: Store, keepers: Any, tmp_path: Path) -> None:
    """Saves, prunes and restores; of each checkpoint the manifest is put last, after everything that it names."""
    keepers.start()
    checkpoints = DictCheckpoints(store.url, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(state_of(step), step).result(60)
    assert [(f.step, f.fault) for f in found_in(store.place)] == [(3, None), (2, None)]
    relaunch(keepers)
    step, state = load(store)
    assert step == 3
    assert same(state, 3)
    for name in (storage := storage_at(store.place)).entries(newest := found_in(store.place)[0].path):
        (tmp_path / newest.name).mkdir(exist_ok=True)
        (tmp_path / newest.name / name).write_bytes(storage.read(newest / name))
    copy = {name: torch.zeros_like(value) for name, value in state_of(0).items() if isinstance(value, torch.Tensor)}
    dcp.load(copy, checkpoint_id=tmp_path / newest.name)
    assert same({**copy, "step": 3}, 3), "torch's own reader takes a copy"
    assert store.server is not None
    for name in {f.path.name for f in found_in(store.place)}:
        put = names([path for path in store.server.asked("PUT") if name in path and "/directories/" not in path])
        assert put[-1] == "manifest.json"
        assert sorted(put[:-1]) == sorted(n for n in storage_at(store.place).entries(store.place / name) if n != "manifest.json")
    assert checkpoints_main([store.url, "--verify"]) == 0
    assert checkpoints_main([store.url, "--prune", "1"]) == 0
    assert [f.step for f in found_in(store.place)] == [3]
    assert len(storage_at(store.place).entries(store.place)) == 2, "the fence and one checkpoint"


@far
def test_faults_that_pass(store: Store, keepers: Any) -> None:
    """Whatever fails for a while is asked for again: the save is durable, the restore has every bit, and no failure is told."""
    assert store.server is not None
    keepers.start()
    checkpoints = DictCheckpoints(store.url)
    checkpoints.save(state_of(1), 1).result(60)
    plan = store.server.plan
    plan.faults = [
        Fault(status=503, times=3),
        Fault(status=500, times=2),
        Fault(status=429, retry_after="0.2", times=2),
        Fault(status=401, times=2),
        Fault(lambda m, p: m == "PUT" and "distcp" in p, cut=1000, times=2),
    ]
    checkpoints.save(state_of(2), 2).result(60)
    assert [f.times for f in plan.faults] == [0] * 5, "all faults were met"
    relaunch(keepers)
    plan.faults = [Fault(status=503, times=3), Fault(lambda m, p: m == "GET" and "distcp" in p, cut=1000, times=2)]
    step, state = load(store)
    assert step == 2
    assert same(state, 2)
    assert [f.times for f in plan.faults] == [0] * 2


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_parts(store: Store, keepers: Any) -> None:
    """A large shard goes in parts; one that is refused or cut is put again, alone; the restore has every bit."""
    assert store.server is not None
    keepers.start()
    big = {"w": torch.rand(10 << 20), "step": 1}
    plan = store.server.plan
    plan.faults = [
        Fault(lambda m, p: m == "PUT" and "partNumber=2" in p, status=503, times=2),
        Fault(lambda m, p: m == "PUT" and "partNumber=3" in p, cut=1 << 20, times=1),
    ]
    DictCheckpoints(store.url).save(dict(big), 1).result(60)
    assert [f.times for f in plan.faults] == [0, 0]
    parts = [path.partition("partNumber=")[2][0] for path in store.server.asked("PUT") if "partNumber=" in path]
    assert sorted(parts) == ["1", "2", "2", "2", "3", "3"]
    assert len([path for path in store.server.asked("POST") if path.endswith("?uploads")]) == 1, "the upload was not begun anew"
    relaunch(keepers)
    state = {"w": torch.zeros(10 << 20), "step": 0}
    assert DictCheckpoints(store.url).load(state) == 1
    assert torch.equal(state["w"], big["w"])  # type: ignore[arg-type]


@one_of_far
def test_listings_in_pages(store: Store, keepers: Any) -> None:
    """Pages, short and empty ones too, are turned until there is none; a listing that does not have the newest yet is no error."""
    assert store.server is not None
    keepers.start()
    checkpoints = DictCheckpoints(store.url, keep=4)
    store.server.plan.page, store.server.plan.holes = 2, True
    for step in (1, 2, 3, 4):
        checkpoints.save(state_of(step), step).result(60)
    assert [f.step for f in found_in(store.place)] == [4, 3, 2, 1]
    relaunch(keepers)
    store.server.plan.stale = {found_in(store.place)[0].path.name}
    step, state = load(store)
    assert step == 3
    assert same(state, step)


@one_of_far
def test_damage_is_gone_around(store: Store, keepers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """An object that is missing, cut or changed: the checkpoint is skipped with one line, the one before is restored."""
    keepers.start()
    checkpoints = DictCheckpoints(store.url, keep=5)
    for step in (1, 2, 3, 4):
        checkpoints.save(state_of(step), step).result(60)
    relaunch(keepers)
    storage, (four, three, two, _) = storage_at(store.place), found_in(store.place)
    storage.remove(four.path / "values-0.json")
    whole = storage.read(three.path / "__0_0.distcp")
    storage.write(three.path / "__0_0.distcp", [whole[:-5]])
    storage.write(two.path / "__0_0.distcp", [whole[:9000], b"x", whole[9001:]])
    assert load(store)[0] == 1
    said = capsys.readouterr().err
    for found, why in ((four, "values-0.json is missing"), (three, f"bytes instead of {len(whole)}"), (two, "does not match its checksum")):
        assert f"{found.path.name} is skipped" in said
        assert why in said


@one_of_far
def test_storage_that_does_not_answer_is_no_fresh_start(store: Store, keepers: Any) -> None:
    """Where storage is down at a restore, nothing older is taken for the newest: it is an error that says so."""
    assert store.server is not None
    keepers.start()
    checkpoints = DictCheckpoints(store.url)
    for step in (1, 2):
        checkpoints.save(state_of(step), step).result(60)
    newest = found_in(store.place)[0].path.name
    relaunch(keepers)
    store.server.plan.faults = [Fault(lambda m, p: newest in p, status=503)]
    persistence_at(store.place).patience_s = 0.3  # type: ignore[arg-type]
    with pytest.raises(StorageUnreachable, match="503"):
        load(store)


@one_of_far
def test_outage_that_passes(store: Store, keepers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Storage is down for several saves: training is not held up, the ranks are told, and the newest is durable in the end."""
    assert store.server is not None
    keepers.start(options=("--patience", "2"))
    checkpoints = DictCheckpoints(store.url)
    checkpoints.save(state_of(1), 1).result(60)
    store.server.plan.faults = [Fault(status=503)]
    for step in (2, 3, 4, 5):
        last = checkpoints.save(state_of(step), step)
    store.server.plan.faults = []
    last.result(60)
    step, state = load(store)
    assert step == 5
    assert same(state, 5)
    assert "step 2 was not saved" in capfd.readouterr().err


@far
def test_storage_gone_for_good(store: Store, keepers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last snapshot is kept on this node's disk; the command that the error names brings it to storage once that is well again."""
    assert store.server is not None
    keepers.start(options=("--patience", "0.2"))
    checkpoints = DictCheckpoints(store.url)
    checkpoints.save(state_of(1), 1).result(60)
    store.server.plan.faults = [Fault(status=503)]
    checkpoints.save(state_of(2), 2)
    with pytest.raises(CheckpointError, match="503") as failed:
        checkpoints.wait()
    store.server.plan.faults = []
    command = str(failed.value).partition("uploaded with: ")[2].split()
    assert command[:3] == ["goodrun", "checkpoints", "upload"]
    assert command[3].startswith(str(tmp_path / "home" / "kept"))
    assert first_fault(Path(command[3]), found_in(Path(command[3]).parent)[0].manifest.files.items()) is None  # type: ignore[union-attr]
    assert checkpoints_main(command[2:]) == 0
    relaunch(keepers)
    step, state = load(store)
    assert step == 2
    assert same(state, 2)
    checkpoints.save(state_of(3), 3).result(60)
    assert not list((tmp_path / "home" / "kept").glob("*/step-*")), "a newer one is durable: what was kept is gone"
    assert SECRET not in str(failed.value) + capsys.readouterr().err


@one_of_far
@pytest.mark.parametrize("home", ["one each", pytest.param("shared", marks=pytest.mark.exhaustive)])
def test_gone_for_good_on_several_nodes(
    store: Store, keepers: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: str
) -> None:
    """Each node keeps its part, and names a command; when all were typed, in any order, the checkpoint is whole and in its place."""
    assert store.server is not None
    keepers.start(options=("--patience", "0.2"))
    if home == "one each":
        monkeypatch.setenv("GOODRUN_HOME", str(tmp_path / "other home"))
    other = Keepers(tmp_path)
    other.start(options=("--patience", "0.2"))
    running = threading.Thread(target=job.good, args=(2, "parted", store.url, keepers.name, other.name))
    running.start()
    while not (tmp_path / "ready.r1").exists() or not (tmp_path / "ready.r0").exists():
        assert running.is_alive()
        time.sleep(0.02)
    store.server.plan.faults = [Fault(status=503)]
    (tmp_path / "gone").touch()
    running.join(100)
    assert (keepers.end(), other.end()) == (0, 0)
    store.server.plan.faults = []
    commands = [shlex.split(job.told("parted", rank).partition("uploaded with: ")[2])[2:] for rank in (1, 0)]
    assert "(ranks 1; each node has its part" in job.told("parted", 1)
    assert (commands[0] == commands[1]) is (home == "shared")
    assert checkpoints_main(commands[0]) == 0
    if home == "one each":
        assert "it is whole once the parts of ranks 0 are there" in capsys.readouterr().out
        assert [f.step for f in found_in(store.place) if f.manifest] == [1]
        assert checkpoints_main(commands[1]) == 0
    newest = found_in(store.place)[0]
    assert newest.step == 2 and newest.manifest is not None and newest.manifest.world_size == 2
    assert first_fault(newest.path, newest.manifest.files.items()) is None
    state: dict[str, Any] = {"w": torch.zeros(1 << 16, dtype=torch.int64), "who": -1}
    keepers.start()
    assert DictCheckpoints(store.url).load(state) == 2
    assert state["who"] == 0 and torch.equal(state["w"], torch.arange(1 << 16))


@one_of_far
def test_only_what_is_needed_is_read(store: Store, keepers: Any) -> None:
    """A restore that takes one of several large tensors asks for its range and no more."""
    assert store.server is not None
    keepers.start()
    big = {f"t{n}": torch.full((1 << 20,), float(n)) for n in range(4)}
    DictCheckpoints(store.url).save(dict(big), 1).result(60)
    relaunch(keepers)
    store.server.log.clear()
    state: dict[str, Any] = {"t2": torch.zeros(1 << 20)}
    assert DictCheckpoints(store.url).load(state, strict=False) == 1
    assert torch.equal(state["t2"], big["t2"])
    assert len([path for path in store.server.asked("GET") if "distcp" in path]) == 1


@one_of_far
def test_cache(store: Store, keepers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache the tensors come from storage once; what was changed in it, or is of another checkpoint, is read from storage again."""
    server: Any = store.server
    keepers.start()
    checkpoints = DictCheckpoints(store.url)
    checkpoints.save(state_of(1), 1).result(60)
    relaunch(keepers)
    monkeypatch.setenv("GOODRUN_RESTORE_CACHE", str(tmp_path / "cache"))

    def asked(step: int) -> int:
        server.log.clear()
        found, state = load(store)
        assert found == step and same(state, step)
        return len([path for path in server.asked("GET") if "distcp" in path])

    assert (asked(1), asked(1)) == (1, 0)
    [piece] = [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    for content in (piece.read_bytes()[:-1], piece.read_bytes()[:-1] + b"x", b""):
        piece.write_bytes(content)
        assert (asked(1), asked(1)) == (1, 0)
    checkpoints.save(state_of(2), 2).result(60)
    relaunch(keepers)
    assert (asked(2), asked(2)) == (1, 0)
    assert not piece.exists()


@pytest.mark.parametrize("store", ["volume"], indirect=True)
def test_newest_of_thousands(store: Store, keepers: Any) -> None:
    """Among 10,000 steps the newest is found with one listing, page by page, and one manifest."""
    server: Any = store.server
    keepers.start()
    DictCheckpoints(store.url).save(state_of(20_000), 20_000).result(60)
    relaunch(keepers)
    for step in range(10_000):
        name = f"{store.url}/step-{step:010d}.g0-abcdef"
        server.folders.add(name)
        server.files[f"{name}/manifest.json"] = b"{}"
    server.log.clear()
    assert load(store)[0] == 20_000
    assert len([path for path in server.asked("GET") if "/directories/" in path]) <= 2 * 11 + 2, "the directory is looked at twice"
    assert len([path for path in server.asked("GET", "POST") if "manifest.json" in path]) == 1


@far
def test_secrets_stay_where_they_are(store: Store, job: Any, tmp_path: Path) -> None:
    """A job whose storage refuses it, with its credentials in the answer, leaves them in no file and on no terminal."""
    assert store.server is not None
    store.server.plan.faults = [Fault(status=403, body=f"<Error><Code>AccessDenied</Code><Message>{SECRET}</Message></Error>".encode())]
    ended = job.run(1, "refused", store.url)
    assert ended[0][0] != 0
    assert "403" in ended[0][1]
    left = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in what for what in [*left, ended[0][1].encode()])


def test_addresses(tmp_path: Path) -> None:
    """What is not installed, not known or not wise is refused in one sentence that holds no secret."""
    for address, why in (
        ("s3://AKIA:hunter22@bucket/run", "must not hold a password"),
        ("abfs://c@a.dfs.core.windows.net/run?sig=hunter22", "must not hold a query"),
        ("nothing://bucket/run", "nothing:// is no address that fsspec knows"),
        ("memory://run", "memory:// lives in one process"),
        (Path("s3://bucket/run"), r"lost a slash, as in Path\('s3://…'\): give 's3://bucket/run', a str"),
    ):
        with pytest.raises(CheckpointError, match=why) as refused:
            Checkpointer(address, model=nn.Linear(1, 1))
        assert "hunter22" not in str(refused.value)
    assert located("file:///a/b") == Path("/a/b")
    assert str(located("/Volumes/a/b/c/run/")) == "/Volumes/a/b/c/run"


