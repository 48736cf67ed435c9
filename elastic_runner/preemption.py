"""Asks the cloud's metadata service whether this machine is to be taken away, and has the job save and leave before it is."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ADDRESS_VARIABLE = "GOODRUN_METADATA_ADDRESS"
"""Where the metadata service is, if not where the clouds have it: for tests and proxies."""
ADDRESS = "http://169.254.169.254"
_EVERY_S = 2.0
_ANSWERS_WITHIN_S = 2.0
_AWS_TOKEN_TTL_S = 21600

Ask = Callable[[str, str, Mapping[str, str]], tuple[int, str]]
"""(method, path, headers) -> (status, body); status 0 where nobody answers."""


@dataclass
class Aws:
    """EC2, with the session tokens of IMDSv2; the notice comes two minutes before."""

    name: str = "AWS"
    _token: str = ""

    def is_here(self, ask: Ask) -> bool:
        """Whether it gives us a token."""
        status, self._token = ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_TTL_S)})
        return status == 200

    def notice(self, ask: Ask) -> str:
        """What is to be done with a spot instance, and when; 404 is nothing."""
        status, body = ask("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})
        if status == 401:  # the token has run out
            self.is_here(ask)
        if status != 200:
            return ""
        told = _json(body)
        return f"{told.get('action', 'terminate')} at {told.get('time', 'once')}"


@dataclass
class Gcp:
    """Google Compute Engine; a preemption leaves 30 seconds, host maintenance of a machine with GPUs an hour."""

    name: str = "GCP"

    def is_here(self, ask: Ask) -> bool:
        """Whether it knows what Google's do."""
        return self._value(ask, "preempted") in ("TRUE", "FALSE")

    def notice(self, ask: Ask) -> str:
        """Preempted, or its host is to be stopped."""
        if self._value(ask, "preempted") == "TRUE":
            return "preempted"
        event = self._value(ask, "maintenance-event")
        return event if event.startswith("TERMINATE") else ""

    def _value(self, ask: Ask, name: str) -> str:
        status, body = ask("GET", f"/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"})
        return body.strip() if status == 200 else ""


@dataclass
class Azure:
    """Azure's scheduled events; a preemption leaves 30 seconds."""

    name: str = "Azure"
    _me: str = ""
    _ends: frozenset[str] = field(default=frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"}))

    def is_here(self, ask: Ask) -> bool:
        """Whether it tells us our own name, by which events name their machines."""
        status, self._me = ask("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"})
        return status == 200

    def notice(self, ask: Ask) -> str:
        """The first event that ends this machine; others of its set may have theirs."""
        status, body = ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        events = _json(body).get("Events", []) if status == 200 else []
        mine = [e for e in events if e.get("EventType") in self._ends and self._me in e.get("Resources", [])]
        return f"{mine[0]['EventType']} not before {mine[0].get('NotBefore') or 'now'}" if mine else ""


Cloud = Aws | Gcp | Azure


def cloud_at(ask: Ask) -> Cloud | None:
    """Whose machine this is, by who answers."""
    clouds: tuple[Cloud, ...] = (Aws(), Gcp(), Azure())
    return next((cloud for cloud in clouds if cloud.is_here(ask)), None)


class PreemptionWatch:
    """A thread that asks; on a notice it says so and sends this process SIGTERM, once."""

    def __init__(self, address: str, say: Callable[[str], object]) -> None:
        """Nothing is asked before `start`."""
        self._ask = asker(address)
        self._say = say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="goodrun-preemption", daemon=True)
        self.notice = ""
        """What the cloud has said, once it has."""

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2 * _ANSWERS_WITHIN_S)

    def _watch(self) -> None:
        cloud = cloud_at(self._ask)
        if cloud is None:
            self._say("--watch-preemption: no metadata service of AWS, GCP or Azure answers here, so nothing is watched")
            return
        while not self._over.is_set():
            if told := cloud.notice(self._ask):
                self.notice = f"{cloud.name} takes this machine away: {told}"
                self._say(self.notice)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self._over.wait(_EVERY_S)


def asker(address: str) -> Ask:
    """Questions over HTTP to `address`, never through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        request = urllib.request.Request(address + path, method=method, headers=dict(headers))
        try:
            with opener.open(request, timeout=_ANSWERS_WITHIN_S) as answer:
                return int(answer.status), answer.read().decode(errors="replace")
        except urllib.error.HTTPError as e:
            with e:
                return e.code, ""
        except OSError:
            return 0, ""

    return ask


def _json(body: str) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
