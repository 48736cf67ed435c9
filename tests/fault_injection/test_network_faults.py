"""Network faults of one process: what is sent to it is lost, or it sends too little; afterwards all of it arrives."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

ECHO = """
import socket, sys
from goodrun.fault_injection import network_faults

s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
exec(sys.argv[2])
s.sendall(b"!")
while data := s.recv(1 << 16):
    s.sendall(data)
"""


@pytest.fixture
def echo() -> Iterator[object]:
    """Starts a process that has done something to its connections and sends back what it gets; gives our end of the connection."""
    started: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    def start(does: str) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            process = subprocess.Popen([sys.executable, "-c", ECHO, str(server.getsockname()[1]), does])
            server.settimeout(30)
            ours = server.accept()[0]
            ours.settimeout(30)
        started.append((process, ours))
        assert ours.recv(1) == b"!"
        return ours

    yield start
    for process, ours in started:
        process.kill()
        process.wait(10)
        ours.close()


def back(ours: socket.socket, many: int) -> bytes:
    got = b""
    while len(got) < many:
        got += ours.recv(1 << 16)
    return got


def unacknowledged(ours: socket.socket) -> int:
    """Segments that were sent and not confirmed (tcpi_unacked)."""
    info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[24:28], sys.byteorder)


def test_nothing_arrives_while_a_partition_lasts(echo):
    """The sender sees no error, and no confirmation either; when it is over, what was sent arrives."""
    ours = echo("network_faults.lose(100, None)")
    ours.sendall(b"x" * 1000)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert unacknowledged(ours) == 1
    healed = echo("network_faults.lose(100, 1.0)")
    healed.sendall(b"y" * 1000)
    assert back(healed, 1000) == b"y" * 1000


def test_what_is_lost_is_sent_again(echo):
    """With half of the packets lost everything still arrives, in order, and has been sent more than once."""
    ours = echo("network_faults.lose(50, None)")
    sent = b"".join(n.to_bytes(4, "big") for n in range(20_000))
    for at in range(0, len(sent), 8000):
        ours.sendall(sent[at : at + 8000])
    assert back(ours, 80_000) == sent
    info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    assert int.from_bytes(info[100:104], sys.byteorder) > 0  # tcpi_total_retrans


def there_and_back_s(ours: socket.socket, many: int) -> float:
    begin = time.monotonic()
    threading.Thread(target=ours.sendall, args=(b"x" * many,), daemon=True).start()
    assert back(ours, many) == b"x" * many
    return time.monotonic() - begin


def test_what_is_delayed_is_there_so_much_later(echo):
    """Each message, small or larger than a packet, takes the given time, not the 200 ms after which the kernel would send it by itself."""
    ours = echo("network_faults.delay(80, None)")
    for many in (1, 1000, 1, 300_000):
        assert there_and_back_s(ours, many) >= 0.079
    assert min(there_and_back_s(ours, 100) for _ in range(5)) < 0.19


def test_a_delay_ends(echo):
    """When it is over, the way is as short as it was; nothing is held that was sent."""
    ours = echo("network_faults.delay(150, 0.4)")
    end = time.monotonic() + 10
    while there_and_back_s(ours, 10) > 0.1 and time.monotonic() < end:
        pass
    assert min(there_and_back_s(ours, 10) for _ in range(5)) < 0.1


def test_a_delay_does_not_keep_a_connection_open(echo):
    """A rank that hangs up is gone for its peer, though its connections are held."""
    ours = echo("network_faults.delay(50, None); s.sendall(b'!'); import time; time.sleep(0.1); s.close(); time.sleep(60)")
    assert ours.recv(1) == b""


def test_a_slow_network_takes_its_time(echo):
    """At 2 MiB a second 4 MiB take a second at least; the kernel lets the first packets of a connection go at once."""
    ours = echo("network_faults.slow(2048, None)")
    threading.Thread(target=ours.sendall, args=(bytes(4 << 20),), daemon=True).start()
    begin = time.monotonic()
    back(ours, 4 << 20)
    assert time.monotonic() - begin > 1.0
