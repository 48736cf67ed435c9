"""What gpud, an agent that watches a node's GPUs by itself, says of them; asked only where the health policy names it.

`GET /v1/states` gives a list of components, each with states: a health, a reason in words, and suggested actions. (So it describes itself,
github.com/leptonai/gpud: docs/INTEGRATION.md, docs/COMPONENTS.md, api/v1/types.go.) A state that says Unhealthy or Degraded speaks against
the GPUs whose UUIDs it names. What cannot be asked or read is said, and changes nothing: never is it taken for healthy.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from .findings import Finding

PATH = "/v1/states"
UNHEALTHY, CHECK = "gpud-unhealthy", "gpud-check"
_COMPONENTS = "accelerator-nvidia-"
_GPU = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_OF_THE_SCRIPT = frozenset({"CHECK_USER_APP_AND_GPU", "IGNORE_NO_ACTION_REQUIRED"})
_ANSWERS_WITHIN_S = 5.0
_MOST_BYTES = 8 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_WORDS = 200


@dataclass(frozen=True)
class Sick:
    """A component's state that is not well. `gpus` are the UUIDs that it names."""

    condition: str
    component: str
    gpus: frozenset[str]
    words: str = field(compare=False)


def read_states(body: bytes) -> frozenset[Sick]:
    """What is not well by one answer of gpud's. Raises ValueError where it is none, or tells of no GPU at all."""
    try:
        components = [(str(one["component"]), one["states"] or []) for one in json.loads(body)]
        ours = [(name, states) for name, states in components if name.startswith(_COMPONENTS)]
        sick = [_sick(name, state) for name, states in ours for state in states]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ValueError(f"its answer cannot be read ({type(e).__name__})") from None
    if not any(states for _, states in ours):
        raise ValueError("it says nothing of any GPU")
    return frozenset(one for one in sick if one is not None)


def _sick(component: str, state: dict[str, Any]) -> Sick | None:
    health = state.get("health", "")
    if health not in ("Unhealthy", "Degraded"):
        return None
    actions = (state.get("suggested_actions") or {}).get("repair_actions") or []
    hers = health == "Unhealthy" and not (actions and _OF_THE_SCRIPT.issuperset(actions))
    named = frozenset(uuid.lower() for uuid in _GPU.findall(json.dumps(state)))
    words = f"{component} is {health}: {state.get('reason') or state.get('error') or 'no reason given'}"
    suggests = f" (suggests {', '.join(map(str, actions))})" if actions else ""
    return Sick(UNHEALTHY if hers else CHECK, component, named, words[:_WORDS] + suggests)


class Gpud:
    """A thread that asks; `news` takes in what it has heard, and never waits."""

    def __init__(self, url: str, every_s: float, say: Callable[[str], None]) -> None:
        """Begin to ask."""
        self._url, self._every_s, self._say = url, every_s, say
        self._answers: SimpleQueue[frozenset[Sick] | str] = SimpleQueue()
        self._known: frozenset[Sick] = frozenset()
        self._trouble = ""
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="goodrun-gpud", daemon=True).start()

    def news(self, uuids: Collection[str]) -> list[Finding]:
        """What is against these GPUs and was not at the answer before; what names none is said, and so is an answer that never came."""
        found: list[Finding] = []
        while True:
            try:
                answer = self._answers.get_nowait()
            except Empty:
                return found
            if isinstance(answer, str):
                if not self._trouble:
                    self._say(f"gpud at {self._url} tells nothing of the GPUs: {answer}; what it thinks of them is not known")
                self._trouble = answer
                continue
            if self._trouble:
                self._say(f"gpud at {self._url} tells of the GPUs again")
            self._trouble = ""
            new, self._known = answer - self._known, answer
            for sick in sorted(new, key=lambda sick: sick.words):
                if not sick.gpus:
                    self._say(f"gpud: {sick.words}; it names no GPU: nothing is done")
                named = [uuid for uuid in uuids if uuid.lower() in sick.gpus]
                found += [Finding(device=uuid, condition=sick.condition, evidence=sick.words) for uuid in named]

    def close(self) -> None:
        """Ask no more; a question on its way is not waited for."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self._answers.put(read_states(_asked(self._url + PATH)))
            except (OSError, ValueError, http.client.HTTPException) as e:
                self._answers.put(str(getattr(e, "reason", "") or e) or type(e).__name__)
            self._over.wait(self._every_s)


def _asked(url: str) -> bytes:
    """The answer, all of it in time, and never through a proxy. gpud makes its certificate itself: on this machine none is asked for."""
    context = ssl.create_default_context()
    if urlsplit(url).hostname in _LOOPBACK:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    end, body = time.monotonic() + _ANSWERS_WITHIN_S, b""
    with opener.open(url, timeout=_ANSWERS_WITHIN_S) as answer:
        while some := answer.read1(1 << 16):
            body += some
            if time.monotonic() > end or len(body) > _MOST_BYTES:
                raise TimeoutError(f"its answer was not whole after {_ANSWERS_WITHIN_S:.0f} s and {len(body)} bytes")
    return body
