"""Copies of snapshots in another keeper's memory: what they are good for, what they cost, and who is not heard."""

from __future__ import annotations

import atexit
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from goodrun.checkpoint import DictCheckpoints, sending
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.copies import Parcel
from goodrun.checkpoint.fence import Token
from goodrun.checkpoint.keeper import Keeper, listen
from goodrun.checkpoint.retention import Keep
from goodrun.checkpoint.sealed import Broken, Connection, job_key, keepers_key
from goodrun.checkpoint.storage import Disk
from goodrun.checkpoint.wire import ADDRESS_VARIABLE, address_of, connect

KEY = keepers_key(job_key("secret", "run"))


class Down(Disk):
    """Storage that takes nothing."""

    def call(self, verb: str, path: Path, act: Callable[[], Any]) -> Any:
        """Refuse."""
        raise OSError(5, "Input/output error", str(path))


class Node:
    """A keeper in a thread, and where other nodes' keepers call it."""

    def __init__(self, disk: Disk | None = None) -> None:
        """It is up at once."""
        self.name, self.told = uuid.uuid4().hex, list[dict[str, Any]]()
        mine = listen(self.name)
        assert mine is not None
        parent, self._life = os.pipe()
        self.keeper = Keeper(mine, disk or Disk(), parent=parent)
        self.keeper.host.record = self.told.append
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._thread = threading.Thread(target=self.keeper.run)
        self._thread.start()
        self.sends_to()

    def sends_to(self, *ports: int) -> None:
        """As its launcher tells it."""
        line = connect(address_of(self.name))
        assert line is not None
        line.send({"op": "ring", "key": KEY.hex(), "next": [("127.0.0.1", p) for p in ports]}, fds=(self.listener.fileno(),))
        line.close()

    def until(self, test: Callable[[], Any]) -> Any:
        """Poll for what happens in other threads."""
        end = time.monotonic() + 20
        while not (value := test()):
            assert time.monotonic() < end, self.told
            time.sleep(0.005)
        return value

    def copied(self, step: int) -> dict[str, Any]:
        """What it told once the step was in other nodes' memory."""
        return self.until(lambda: next((m for m in self.told if m["op"] == "copied" and m["step"] == step), None))  # type: ignore[no-any-return]

    def notes(self) -> list[str]:
        """Its words for the record."""
        return [m["why"] for m in self.told if m["op"] == "note"]

    def close(self) -> None:
        """Its launcher ends."""
        os.close(self._life)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.listener.close()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """Makes nodes; the ranks of this process are the first one's."""
    made: list[Node] = []

    def make(disk: Disk | None = None) -> Node:
        made.append(Node(disk))
        if len(made) == 1:
            monkeypatch.setenv(ADDRESS_VARIABLE, made[0].name)
        return made[-1]

    monkeypatch.setenv("GOODRUN_RUN_STARTED", "1")
    monkeypatch.setenv("GOODRUN_GENERATION", "0")
    monkeypatch.setattr(sending, "_AGAIN_S", 0.1)
    monkeypatch.setattr(atexit, "register", lambda *_: None)  # a save that failed here must not end the tests with status 1
    yield make
    for node in made:
        node.close()


def state_of(step: int) -> dict[str, Any]:
    """Every bit follows from the step."""
    return {"w": torch.rand(1 << 19, generator=torch.Generator().manual_seed(step)), "b": torch.full((3,), float(step)), "step": step}


def restored(folder: Path, node: Node, monkeypatch: pytest.MonkeyPatch, generation: int) -> tuple[int | None, dict[str, Any]]:
    """What a new attempt's rank on that node restores."""
    monkeypatch.setenv(ADDRESS_VARIABLE, node.name)
    monkeypatch.setenv("GOODRUN_GENERATION", str(generation))
    state: dict[str, Any] = {"w": torch.zeros(1 << 19), "b": torch.zeros(3), "step": 0}
    return DictCheckpoints(folder).load(state), state


def test_a_copy_is_as_good_as_the_snapshot(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose storage takes nothing is lost: the next one gives its snapshot to the next attempt, bit for bit, and writes it."""
    lost, near = nodes(Down()), nodes()
    lost.sends_to(near.port)
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    for step in (4, 8):
        checkpoints.save(state_of(step), step)
        assert lost.copied(step)["nodes"] == 1
    step, state = restored(tmp_path / "ckpt", near, monkeypatch, 1)
    assert step == 8
    assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(v)) for name, v in state_of(8).items())
    near.until(lambda: any(m["op"] == "durable" and m["step"] == 8 for m in near.told))
    assert [(f.step, f.fault) for f in found_in(tmp_path / "ckpt")] == [(8, None)]


def test_what_was_restored_is_copied_on(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt loses a node before its first save: what it began from is on the node after that one."""
    first, second, third = nodes(Down()), nodes(Down()), nodes(Down())
    first.sends_to(second.port)
    DictCheckpoints(tmp_path / "ckpt").save(state_of(4), 4)
    first.copied(4)
    second.sends_to(third.port)
    assert restored(tmp_path / "ckpt", second, monkeypatch, 1)[0] == 4
    second.copied(4)
    step, state = restored(tmp_path / "ckpt", third, monkeypatch, 2)
    assert step == 4
    assert torch.equal(state["w"], state_of(4)["w"])


def test_copies_take_two_slots_of_a_rank(nodes: Any, tmp_path: Path) -> None:
    """However many snapshots come, the newest and the one before are kept."""
    one, other = nodes(), nodes()
    one.sends_to(other.port)
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    for step in range(1, 7):
        checkpoints.save(state_of(step), step).result()
        one.copied(step)
    [shelf] = other.keeper.host.shelves.values()
    [job] = shelf.jobs.values()
    [layout] = job.layouts.values()
    assert len(layout.slots) == 2
    assert sorted(s.step for s in shelf.intact()) == [5, 6]


def test_no_memory_is_said_once(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the control group does not leave is not taken; training and storage do not mind."""
    monkeypatch.setattr("goodrun.checkpoint.receiving.available", lambda: 1 << 20)
    one, other = nodes(), nodes()
    one.sends_to(other.port)
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    for step in (1, 2, 3):
        checkpoints.save(state_of(step), step).result()
    one.until(one.notes)
    [why] = one.notes()
    assert why.startswith(f"snapshots are not copied to 127.0.0.1:{other.port}: copies of 1 parts need 2 MiB of memory there and 1 MiB are")
    monkeypatch.setattr("goodrun.checkpoint.receiving.available", lambda: 1 << 40)
    one.copied(3)  # it tries again


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_node_that_takes_nothing_stops_nothing(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Nobody listens there, or does not answer: saves become durable, one line says it, and the node after it gets its copy."""
    monkeypatch.setattr(sending, "_SILENT_S", 0.3)
    one, other = nodes(), nodes()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if how == "dead":
            silent.close()
        one.sends_to(port, other.port)
        checkpoints = DictCheckpoints(tmp_path / "ckpt")
        for step in (1, 2):
            checkpoints.save(state_of(step), step).result()
        [shelf] = other.until(lambda: list(other.keeper.host.shelves.values()))
        other.until(lambda: [s.step for s in shelf.intact()][:1] == [2])
        [why] = one.until(one.notes)
        assert f"snapshots are not copied to 127.0.0.1:{port}: " in why
        assert ("refused" if how == "dead" else "no answer") in why


def test_one_that_is_lost_while_it_is_sent_to(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher tells that other nodes come next: nobody waits for the old one's answer."""
    monkeypatch.setattr(sending, "_SILENT_S", 1000.0)
    one, other = nodes(), nodes()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one.sends_to(silent.getsockname()[1])
        DictCheckpoints(tmp_path / "ckpt").save(state_of(1), 1)
        one.until(lambda: one.keeper.sender.running)
        one.sends_to(other.port)
        one.copied(1)


def said_to(port: int, key: bytes, *frames: bytes) -> bool:
    """Say something with that key; whether the other side closes the connection."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setblocking(False)
        connection = Connection(sock, key, accepted=False)
        with suppress(Broken):
            while True:
                if connection.trusted:
                    for frame in frames:
                        connection.send(frame)
                    frames = ()
                connection.flush()
                if not select.select([sock], [], [], 10)[0]:
                    return False
                list(connection.receive())
        return True


def overheard(port: int, act: Callable[[int], object]) -> bytes:
    """What is said to the port while `act` speaks to it through us."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as ear:
        thread = threading.Thread(target=act, args=(ear.getsockname()[1],))
        thread.start()
        near, _ = ear.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            ends = {near: far, far: near}
            while ends:
                for s in select.select(list(ends), [], [], 5)[0]:
                    data = s.recv(1 << 16)
                    heard += data if s is near else b""
                    if not data:
                        ends = {}
                        break
                    ends[s].sendall(data)
        thread.join(20)
    return bytes(heard)


def test_strangers_leave_it_untouched(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scan, random bytes, wrong keys, the agents' key, a conversation said again, nonsense from one who knows: copies still come."""
    one, other = nodes(), nodes()
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    many = [socket.create_connection(("127.0.0.1", other.port)) for _ in range(100)]
    for s in many[::2]:
        with suppress(OSError):
            s.sendall(os.urandom(1 << 12))
    for key in (keepers_key(job_key("guess", "run")), keepers_key(job_key("secret", "other")), job_key("secret", "run"), b""):
        assert said_to(other.port, key, b"7")

    def first_save(port: int) -> None:
        one.sends_to(port)
        checkpoints.save(state_of(1), 1)
        one.copied(1)
        one.sends_to()

    words = overheard(other.port, first_save)
    assert len(words) > 1 << 21
    with socket.create_connection(("127.0.0.1", other.port)) as again:
        with suppress(OSError):
            again.sendall(words)
        again.settimeout(10)
        with suppress(ConnectionError):
            while again.recv(1 << 16):
                pass
    for nonsense in ((b"x",), (b"-1",), (b"99999999999",), (b"4", b"null"), (b"2", b"{}"), (b"1", b"too long")):
        assert said_to(other.port, KEY, *nonsense)
    [shelf] = other.keeper.host.shelves.values()
    assert [s.step for s in shelf.intact()] == [1]
    one.sends_to(other.port)
    checkpoints.save(state_of(2), 2)
    one.copied(2)
    assert [s.step for s in shelf.intact()] == [2, 1]
    for s in many:
        s.close()
    step, state = restored(tmp_path / "ckpt", other, monkeypatch, 1)
    assert step == 2
    assert torch.equal(state["w"], state_of(2)["w"])


def test_a_parcel_of_an_attempt_that_was_replaced_is_refused(nodes: Any, tmp_path: Path) -> None:
    """A node that was left behind goes on sending: what the newer attempt has is not touched."""
    one, other = nodes(), nodes()
    one.sends_to(other.port)
    DictCheckpoints(tmp_path / "ckpt").save(state_of(1), 1)
    one.copied(1)
    [shelf] = other.keeper.host.shelves.values()
    shelf.claimed = Token(1, 1)
    DictCheckpoints(tmp_path / "ckpt").save(state_of(2), 2)
    assert "its attempt was replaced" in one.until(one.notes)[0]
    assert [s.step for s in shelf.intact()] == [1]


def test_a_description_there_and_back() -> None:
    """Whatever is in the blobs."""
    blobs = (("model",), b"\n{}\n", b"\x00\xff\n")
    parcel = Parcel("d", Token(1, 2), 3, 4, "l", 5, Keep(last=2), "2", -1, (), blobs)
    assert Parcel.from_bytes(parcel.to_bytes()) == parcel
