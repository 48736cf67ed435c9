"""How requests are made again, what an error means, what of it is said, and how a file is cut into parts; without a server."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodrun.checkpoint.errors import StorageTrouble
from goodrun.checkpoint.remote.persistence import Persistence
from goodrun.checkpoint.remote.ranges import Ahead, Span
from goodrun.checkpoint.remote.trouble import Kind, judged, scrubbed
from goodrun.checkpoint.remote.windows import Windows


class Answer(Exception):
    """What a client library raises."""

    def __init__(self, status: int, code: str = "", **headers: str) -> None:
        """As botocore has it."""
        super().__init__(f"An error occurred ({code or status})")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers}}


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        """The beginning."""
        self.now, self.pauses = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        """Let it pass."""
        self.pauses.append(seconds)
        self.now += seconds


def asked(errors: list[Exception], **words: Any) -> tuple[Clock, Persistence, Any]:
    """Ask for something that fails so often before it is there."""
    clock = Clock()
    persistence = Persistence(clock=lambda: clock.now, sleep=clock.sleep, draw=lambda low, high: high, **words)
    coming = iter(errors)
    renewed: list[float] = []

    def act() -> str:
        for error in coming:
            raise error
        return "there"

    try:
        return clock, persistence, (persistence.ask(act, lambda: renewed.append(clock.now), "s3://b/k"), len(renewed))
    except OSError as e:
        return clock, persistence, e


def test_pauses_grow_and_end() -> None:
    """Twice as long each time up to a limit; after the patience it is a failure, in words."""
    clock, _, answer = asked([Answer(503)] * 5)
    assert answer == ("there", 0)
    assert clock.pauses == [0.1, 0.2, 0.4, 0.8, 1.6]
    clock, _, answer = asked([Answer(503, "SlowDown")] * 99, patience_s=20)
    assert isinstance(answer, StorageTrouble)
    assert "503 SlowDown" in str(answer)
    assert clock.now <= 20


def test_the_server_is_left_alone_as_long_as_it_asks() -> None:
    """Retry-After is honoured, and is a failure where it is longer than the patience."""
    assert asked([Answer(429, **{"retry-after": "7"})])[0].pauses == [7.0]
    assert isinstance(asked([Answer(429, **{"retry-after": "3600"})])[2], StorageTrouble)


def test_what_is_not_asked_again() -> None:
    """What is not there, or not allowed; a token is renewed three times."""
    assert isinstance(asked([Answer(404)])[2], FileNotFoundError)
    for error in (Answer(403, "AccessDenied"), Answer(404, "NoSuchBucket"), Answer(400)):
        clock, _, answer = asked([error])
        assert isinstance(answer, StorageTrouble)
        assert not clock.pauses
    assert asked([Answer(401)] * 3)[2] == ("there", 3)
    assert isinstance(asked([Answer(401)] * 4)[2], StorageTrouble)


def test_hurry() -> None:
    """Where something better waits, storage that has been down for a while is not waited for; one failure is no reason to give up."""
    assert asked([Answer(503)], hurried=True)[2] == ("there", 0)
    clock, persistence, answer = asked([Answer(503)] * 99, hurried=True)
    assert isinstance(answer, StorageTrouble)
    assert clock.now <= 5
    before = clock.now
    with pytest.raises(StorageTrouble):
        persistence.ask(lambda: (_ for _ in ()).throw(Answer(503)), lambda: None, "")
    assert clock.now - before <= 5 - before


def test_down_and_back_are_told_once() -> None:
    """Not each failure, but that it has lasted, and that it is over."""
    told: list[str] = []
    asked([Answer(503)] * 12, tell=told.append)
    assert [text.split(" for ")[0].split(" after ")[0] for text in told] == ["storage has not answered", "storage answers again"]


def test_no_secret_is_said() -> None:
    """Query strings, authorizations, user names and values of variables that are named like secrets."""
    environ = {"AWS_SECRET_ACCESS_KEY": "hunter222", "DATABRICKS_TOKEN": "dapi-123456", "HOME": "/home/someone"}
    text = "https://me:pw@host/x?X-Amz-Signature=abc of hunter222 with Authorization: Bearer dapi-987 dapi-123456 in /home/someone\nmore"
    said = scrubbed(text, environ)
    for secret in ("pw@", "abc", "hunter222", "dapi-987", "dapi-123456", "more"):
        assert secret not in said
    assert "/home/someone" in said
    assert judged(Answer(403, "AccessDenied")).kind is Kind.REFUSED


@given(parts=st.lists(st.binary(max_size=9), max_size=9), size=st.integers(1, 7), read=st.integers(1, 11))
def test_windows(parts: list[bytes], size: int, read: int) -> None:
    """Cut into pieces or read as a stream, from the middle or again: the bytes are those that came."""
    whole = b"".join(parts)
    pieces = [b"".join(piece) for piece in Windows(parts).pieces(itertools.repeat(size))]
    assert b"".join(pieces) == whole
    assert all(len(piece) == size for piece in pieces[:-1])
    stream = Windows(parts)
    assert b"".join(iter(lambda: stream.read(read) or b"", b"")) == whole
    stream.seek(len(whole) // 2)
    assert stream.read() == whole[len(whole) // 2 :]
    assert io.BufferedReader(stream.again()).read() == whole
    assert Windows(parts).size == len(whole)


@given(spans=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3000), st.integers(0, 900)), max_size=12), data=st.data())
def test_ahead(spans: list[tuple[str, int, int]], data: st.DataObject) -> None:
    """Whatever is asked for, in whatever order: each span gets its bytes."""
    files = {"a": bytes(i % 251 for i in range(4000)), "b": bytes(i % 13 for i in range(4000))}
    wanted = [Span(*span) for span in spans]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("goodrun.checkpoint.remote.ranges.RANGE", 256)
        patch.setattr("goodrun.checkpoint.remote.ranges._GAP", 20)
        ahead = Ahead(lambda file, at, n: files[file][at : at + n], wanted)
    for span in data.draw(st.permutations(wanted)):
        into = bytearray(span.nbytes)
        ahead.take(span, memoryview(into))
        assert into == files[span.file][span.at : span.end]
