"""What listens for agents: who does not know the job's secret is not heard, and nothing that was overheard can be said again."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

import pytest

from goodrun.checkpoint.sealed import MAGIC, Broken, Connection, job_key
from goodrun.elastic_runner.errors import UsageError
from goodrun.elastic_runner.nodes.handler import resolve
from goodrun.elastic_runner.nodes.messages import Garbled, Leave, Ready, decode, encode
from goodrun.elastic_runner.nodes.node import Formed, Job, Loop, Node


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def agents(port):
    """Two agents in one round, on loopback."""
    loop = Loop()
    job = Job(key=job_key("secret", "run"), endpoints=(("127.0.0.1", port),), nnodes=(2, 2))
    nodes = [Node(loop, job, f"n{i}", f"n{i}") for i in range(2)]
    for node in nodes:
        loop.call(node.start)
        loop.call(lambda node=node: node.member.ready(Ready(0, 1, "127.0.0.1", 1, 1, "", 0)))
    loop.start()
    for node in nodes:
        with node.changed:
            assert node.changed.wait_for(lambda node=node: any(isinstance(n, Formed) for n in node.notes), 20)
    yield nodes
    assert loop.failed is None
    loop.stop()


def undisturbed(agents, seconds=2.5):
    """Longer than any silence is borne: still one round, and both in it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert [type(n) for node in agents for n in node.notes] == [Formed, Formed]
        select.select([], [], [], 0.1)


def closed(s: socket.socket) -> bool:
    """Whether the other side closes the connection within its time for strangers."""
    s.settimeout(10)
    try:
        while s.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_port_scan_and_random_bytes(agents, port):
    """Connections that say nothing, that say nonsense, and far too many of both."""
    many = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    for s in many[:100]:
        s.sendall(os.urandom(1 << 12))
    for s in many[:100]:
        assert closed(s)
    undisturbed(agents)
    assert all(closed(s) for s in many[100:])
    for s in many:
        s.close()


def greeting(port, key):
    """A connection that has shaken hands with `key`, as far as the other side lets it; (its end, whether it is trusted)."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    c = Connection(sock, key, accepted=False)
    try:
        while not c.trusted:
            if not select.select([sock], [], [], 10)[0]:
                raise TimeoutError
            list(c.receive())
            c.flush()
    except Broken:
        pass
    return c


@pytest.mark.parametrize("key", [job_key("guess", "run"), job_key("secret", "other run"), job_key("", "run")])
def test_a_wrong_secret(agents, port, key):
    """Another secret, another run, no secret: closed before a word is heard."""
    c = greeting(port, key)
    assert not c.trusted
    assert closed(c.sock)
    c.sock.close()
    undisturbed(agents)


def test_what_was_overheard_is_of_no_use(agents, port):
    """A whole conversation of an agent that left, recorded on the wire and said again: not even its greeting is believed."""
    heard = bytearray()
    ear = socket.create_server(("127.0.0.1", 0))

    def relay():
        near, _ = ear.accept()
        far = socket.create_connection(("127.0.0.1", port))
        ends = {near: far, far: near}
        while ends:
            for s in select.select(list(ends), [], [], 5)[0]:
                data = s.recv(4096)
                if s is near:
                    heard.extend(data)
                if not data:
                    ends = {}
                    break
                ends[s].sendall(data)
        near.close()
        far.close()

    thread = threading.Thread(target=relay)
    thread.start()
    c = greeting(ear.getsockname()[1], job_key("secret", "run"))
    assert c.trusted
    c.send(encode(Leave("closes the job", closes=True)))  # ignored: it never said hello
    c.flush()
    c.sock.shutdown(socket.SHUT_WR)
    assert closed(c.sock)
    thread.join(10)
    c.sock.close()
    ear.close()
    again = socket.create_connection(("127.0.0.1", port))
    again.sendall(bytes(heard))
    assert closed(again)
    again.close()
    undisturbed(agents)


def test_a_changed_frame_ends_the_connection():
    """One bit of what a trusted side says, flipped on the way; a frame said twice; frames in another order."""
    key = job_key("secret", "run")
    for harm in ("flip", "twice", "swap"):
        a, b = socket.socketpair()
        for s in (a, b):
            s.setblocking(False)
        server, client = Connection(a, key, accepted=True), Connection(b, key, accepted=False)
        while not (server.trusted and client.trusted):
            for one in (server, client):
                one.flush()
                list(one.receive())
        sent = []
        for word in (b"one", b"two"):
            client.send(word)
            sent.append(bytes(client._out))
            client._out.clear()
        one, two = sent
        b.sendall({"flip": one[:-1] + bytes([one[-1] ^ 1]), "twice": one + one, "swap": two + one}[harm])
        with pytest.raises(Broken, match="wrong seal"):
            list(server.receive())
        a.close()
        b.close()


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"null", b"[]", b"\xff", b"[" * 9999, b'["Ready", {}]', b'["NoSuch", {}]'),
        *(b'["Change", {"reason": 3}]', b'["Ack", {"generation": true}]', b'["Propose", {"round": [1, "a b"]}]'),
        b'["Hello", {"node": "a", "name": "a", "held": 0, "known": [null, [[1]]], "gone": [], "lost": []}]',
    ],
    ids=range(11),
)
def test_what_is_no_message_is_garbled(raw):
    """Whatever bytes come, there is a message or this error."""
    with pytest.raises(Garbled):
        decode(raw)


def test_it_listens_on_the_jobs_address_only(agents, port):
    """Not on all addresses of the machine."""
    with open("/proc/net/tcp") as f:
        listening = [line.split()[1] for line in f.read().splitlines()[1:] if line.split()[3] == "0A"]
    assert [where for where in listening if where.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    assert MAGIC


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:7", (("127.0.0.1", 7),)),
        ("127.0.0.1", (("127.0.0.1", 29500),)),
        ("127.0.0.1:7, 127.0.0.2:8", (("127.0.0.1", 7), ("127.0.0.2", 8))),
        ("[::1]:7,::1", (("::1", 7), ("::1", 29500))),
    ],
)
def test_endpoints(text, found):
    """One or several, with a port or torchrun's own."""
    assert resolve(text) == found


@pytest.mark.parametrize("text", ["127.0.0.1:0", "127.0.0.1:x", "127.0.0.1:7,127.0.0.1:7", ":7", ""])
def test_endpoints_that_are_none(text):
    """Said in one sentence that names the words."""
    with pytest.raises(UsageError, match="rdzv-endpoint"):
        resolve(text)
