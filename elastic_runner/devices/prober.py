"""The prober: a process that asks the driver about every device, round after round, and says on its output what it is about to ask.

It holds no deadline itself. A driver call that hangs cannot be interrupted, so whoever reads the output sees which question was the last.
One JSON list a line: ["devices", driver, [[uuid, name, index, [MIG UUIDs]], …]], ["ask", uuid, query], ["report", uuid, answers],
["xid", uuid, code, recovery answer], ["ports", {port: state}], ["idle"], ["cannot", why]. A JSON list of UUIDs on its input is answered by
a thread of its own, without delay: ["held", {uuid: [bytes in use, [pid, …]]}].
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, TextIO

from . import ports
from .answers import Answer, Told, answers_to_json
from .kernel_log import KernelLog, Place
from .nvml import Nvml

LISTEN = "xid events"
_IDLE_EVERY_S = 1.0


class Prober:
    """Asks about `uuids` for ever; about all devices that there are, if none is given."""

    def __init__(self, nvml: Nvml, uuids: Sequence[str], every_s: float, out: TextIO) -> None:
        self._nvml, self._every_s, self._out = nvml, every_s, out
        self._speaking = Lock()
        devices = nvml.devices()
        self._say("devices", nvml.driver(), [[d.uuid, d.name, d.index, d.instances] for d in devices])
        self._uuids = list(uuids or [d.uuid for d in devices])
        self._listening: dict[str, Answer] = {}
        self._log: KernelLog | None = None
        self._places: dict[str, Place | None] = {}
        with suppress(OSError):  # not for this user: the driver's own events are the other road
            self._log = KernelLog()

    def answer(self, questions: TextIO) -> None:
        """Answer what comes in until the other end is closed."""
        for line in questions:
            held = {uuid: self._nvml.held(uuid) for uuid in json.loads(line)}
            self._say("held", {uuid: [h.used, h.pids] for uuid, h in held.items() if h is not None})

    def rounds(self, many: int) -> None:
        """So many rounds (0: for ever), listening for XIDs in between."""
        done = 0
        while True:
            begin = time.monotonic()
            for uuid in self._uuids:
                self._say("report", uuid, answers_to_json(self._report(uuid)))
                self._tell_xids(0.0)  # an event does not wait for a slow round
            self._say("ask", "the network's ports", "state")
            self._say("ports", ports.states())
            done += 1
            if done == many:
                return
            self._listen_until(begin + self._every_s)

    def _report(self, uuid: str) -> dict[str, Answer]:
        self._say("ask", uuid, "present")
        present, handle = self._nvml.handle(uuid)
        answers = {"present": present}
        if handle is None:
            self._listening.pop(uuid, None)  # a device that comes back is a new one to the driver
            return answers
        if self._log is not None and uuid not in self._places:
            self._say("ask", uuid, "place")
            self._places[uuid] = self._nvml.place(handle)
        for query in self._nvml.queries:
            self._say("ask", uuid, query)
            answers[query] = self._nvml.ask(query, handle)
        if uuid not in self._listening:
            self._say("ask", uuid, LISTEN)
            self._listening[uuid] = self._nvml.listen(handle)
        return {**answers, LISTEN: self._listening[uuid]}

    def _listen_until(self, end: float) -> None:
        while (left := end - time.monotonic()) > 0:
            self._say("idle")
            self._tell_xids(min(left, _IDLE_EVERY_S))

    def _tell_xids(self, wait_s: float) -> None:
        """Tell the XIDs that have come, waiting so long for the first."""
        for place, code in self._log.xids() if self._log is not None else ():
            for uuid in [uuid for uuid, at in self._places.items() if at == place]:
                self._xid(uuid, code)
        if not any(a.told is Told.VALUE for a in self._listening.values()):
            time.sleep(wait_s)  # no device tells of XIDs: there is nothing else to wait for
            return
        try:
            while (event := self._nvml.next_xid(wait_s)) is not None:
                self._xid(*event)
                wait_s = 0.0
        except Exception as e:  # no more events from this driver: the next reports say so, and the other questions go on
            lost = Answer(told=Told.ERROR, code=getattr(e, "value", 0), text=str(e))
            self._listening = dict.fromkeys(self._listening, lost)

    def _xid(self, uuid: str, code: int) -> None:
        """An XID, with what the driver itself wants done about the device, asked after the event."""
        self._say("ask", uuid, "recovery_action")
        present, handle = self._nvml.handle(uuid)
        answer = self._nvml.ask("recovery_action", handle) if handle is not None else present
        self._say("xid", uuid, code, answers_to_json({"recovery_action": answer}))

    def _say(self, *words: Any) -> None:
        with self._speaking:
            self._out.write(json.dumps(words) + "\n")
            self._out.flush()


def main(argv: Sequence[str]) -> int:
    """`PARENT EVERY_S ROUNDS [UUID…]`: asks for that many rounds (0: for ever) on standard output; dies with process PARENT."""
    from ..tied import die_with_parent

    die_with_parent(int(argv[0]))
    every_s, rounds, uuids = float(argv[1]), int(argv[2]), argv[3:]
    try:
        prober = Prober(Nvml(), uuids, every_s, sys.stdout)
        Thread(target=prober.answer, args=(sys.stdin,), daemon=True).start()
        prober.rounds(rounds)
    except BrokenPipeError:  # the supervisor is gone, or has replaced us
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as e:  # the process's outermost boundary: no library, no driver, no right to ask; each is said, none is "healthy"
        print(json.dumps(["cannot", why_not(e)]), flush=True)
        return 1
    return 0


def why_not(error: Exception) -> str:
    """Why NVIDIA's library cannot be asked, in words."""
    if isinstance(error, ImportError):
        return "nvidia-ml-py is not installed (pip install 'goodrun[gpu]')"
    return f"NVIDIA's driver does not answer: {error}"
