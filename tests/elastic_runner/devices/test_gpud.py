"""gpud's word on the GPUs, by a server that answers as gpud describes itself (github.com/leptonai/gpud: api/v1/types.go)."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from goodrun.elastic_runner.devices.gpud import CHECK, PATH, UNHEALTHY, Gpud, read_states
from goodrun.elastic_runner.devices.health_policy import SHIPPED, PolicyError, load
from goodrun.elastic_runner.events import AttemptStarted, DeviceVerdict, Notice

A, B = "GPU-00000001-5111-4ada-8000-000000000001", "GPU-00000002-5111-4ada-8000-000000000002"
XID, ECC = "accelerator-nvidia-error-xid", "accelerator-nvidia-ecc"


def component(name, health="Healthy", reason="", actions=(), **more):
    state = {"time": "2026-11-30T18:29:47Z", "component": name, "name": name, "health": health, "reason": reason, **more}
    if actions:
        state["suggested_actions"] = {"description": "", "repair_actions": list(actions)}
    return {"component": name, "states": [state]}


WELL = [component("cpu"), component(XID, reason="XIDComponent is healthy"), component(ECC), {"component": "disk", "states": None}]


def sick(gpu, *actions, health="Unhealthy"):
    return [*WELL[:1], component(XID, health, f"XID 79 (GPU has fallen off the bus) detected on GPU PCI:0000:0b:00 UUID:{gpu}", actions)]


class Agent(ThreadingHTTPServer):
    """gpud as far as it is asked here. `answer` is what it says; bytes are said as they are, and None is never said."""

    daemon_threads = True

    def __init__(self, certificate=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.over = WELL, 0, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = f"https://localhost:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.over.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        answer, self.server.asked = self.server.answer, self.server.asked + 1
        if answer is None:
            self.server.over.wait(60)
            return
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(200 if self.path == PATH else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def agent(request):
    started = []

    def start(*args):
        started.append(Agent(*args))
        return started[-1]

    yield start
    for one in started:
        one.close()


def until(test, timeout=30):
    end = time.monotonic() + timeout
    while not (found := test()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("body", "conditions"),
    [
        (WELL, set()),
        (sick(A), {(UNHEALTHY, A)}),
        (sick(A.upper(), "REBOOT_SYSTEM"), {(UNHEALTHY, A)}),
        (sick(A, "HARDWARE_INSPECTION", "CHECK_USER_APP_AND_GPU"), {(UNHEALTHY, A)}),
        (sick(A, "CHECK_USER_APP_AND_GPU"), {(CHECK, A)}),
        (sick(A, health="Degraded"), {(CHECK, A)}),
        (sick(A, health="Initializing"), set()),
        ([*WELL, component("disk", "Unhealthy", f"of {A}")], set()),
        ([component(ECC, "Unhealthy", "2 GPUs", error=f"{A}: lost", extra_info={"data": f"uuid {B}"})], {(UNHEALTHY, A), (UNHEALTHY, B)}),
        ([component(ECC, "Unhealthy", "NVML is gone")], {(UNHEALTHY, "")}),
    ],
)  # fmt: skip
def test_what_an_answer_says(body, conditions):
    """Of GPU components alone, by their health and what they suggest; the GPUs are those whose UUIDs stand anywhere in the state."""
    found = read_states(json.dumps(body).encode())
    assert {(one.condition, gpu) for one in found for gpu in one.gpus or ("",)} == {(c, gpu.lower()) for c, gpu in conditions}


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b"[]", b'[{"component": "cpu", "states": []}]', b"[7]", b"<html>", b'{"code": 1}'])
def test_what_is_no_answer_is_not_taken_for_healthy(body):
    """Nor is one that tells of no GPU, or of GPU components without a state."""
    with pytest.raises(ValueError, match=r"cannot be read|nothing of any GPU"):
        read_states(body)
    with pytest.raises(ValueError, match="nothing of any GPU"):
        read_states(json.dumps([{"component": XID, "states": None}]).encode())


def test_it_is_told_once_until_it_is_well_again_and_trouble_is_said_once(agent, monkeypatch):
    """Slow or garbage: said once, and takes nothing back. Well again and sick anew is told anew."""
    monkeypatch.setattr("goodrun.elastic_runner.devices.gpud._ANSWERS_WITHIN_S", 0.5)
    server, said = agent(), []
    gpud = Gpud(server.url, 0.02, said.append)

    def told(answer):
        """What the next two answers come to: the first may have been on its way."""
        server.answer, before = answer, server.asked
        found = []
        until(lambda: found.extend(gpud.news([A, B])) or (server.asked > before + 1 and gpud._answers.empty()))
        return [(f.condition, f.device) for f in found]

    try:
        assert told(WELL) == []
        assert told(sick(A, "REBOOT_SYSTEM")) == [(UNHEALTHY, A)]
        assert told(sick(A, "REBOOT_SYSTEM")) == []
        assert told(b"what?") == [] and told(None) == [] and told([]) == []
        assert len(said) == 1 and "tells nothing of the GPUs: its answer cannot be read" in said[0] and "not known" in said[0]
        assert told(sick(A, "REBOOT_SYSTEM")) == []
        assert said[1:] == [f"gpud at {server.url} tells of the GPUs again"]
        assert told(WELL) == []
        assert told(sick(A, "REBOOT_SYSTEM")) == [(UNHEALTHY, A)]
        assert told([component(ECC, "Unhealthy", "NVML is gone")]) == []
        assert said[2:] == [f"gpud: {ECC} is Unhealthy: NVML is gone; it names no GPU: nothing is done"]
    finally:
        gpud.close()


def test_one_that_is_not_there_is_said(agent):
    """And it is asked on and on, for it may come."""
    server, said = agent(), []
    server.close()
    gpud = Gpud(server.url, 0.02, said.append)
    until(lambda: gpud.news([A]) or said)
    gpud.close()
    assert len(said) == 1 and "Connection refused" in said[0]


@pytest.mark.parametrize("fault", ["url: ftp://here", "every: often", "unhealthy: {do: HEAL}", "also: 1"])
def test_its_part_of_the_policy_is_as_strict_as_the_rest(tmp_path, fault):
    """And none need be there: then nobody is asked."""
    assert load().gpud is None
    path = tmp_path / "policy.yaml"
    given = {"url": "https://localhost:15132", "every": "10s", "unhealthy": "{do: SHED}", "check": "{do: LOG}"}
    path.write_text(policy_with(given))
    assert load(path).gpud.url == given["url"] and load(path).conditions["gpud-unhealthy"].do.name == "SHED"
    key, _, value = fault.partition(": ")
    path.write_text(policy_with(given | {key: value}))
    with pytest.raises(PolicyError, match=f"gpud.*{key}"):
        load(path)


def policy_with(gpud, text=None):
    return (text or SHIPPED.read_text()) + "gpud:\n" + "".join(f"  {key}: {value}\n" for key, value in gpud.items())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate")
def test_a_gpu_that_gpud_calls_sick_is_set_aside(job, agent, quick_policy, tmp_path):
    """A run on four GPUs, with the agent's own certificate: GPU 2 is set aside with the agent's reason, and the run goes on with three."""
    pem = tmp_path / "gpud.pem"
    words = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=gpud"]
    subprocess.run([*words, "-keyout", pem, "-out", tmp_path / "cert.pem"], check=True, capture_output=True)
    pem.write_text(pem.read_text() + (tmp_path / "cert.pem").read_text())
    server, policy = agent(pem), tmp_path / "asks.yaml"
    asks = {"url": server.url, "every": "50ms", "unhealthy": "{do: SHED}", "check": "{do: LOG}"}
    policy.write_text(policy_with(asks, quick_policy.read_text()))
    options = ["--warm-start", "off", "--simulate-gpus", 4, "--health-policy", policy]
    j = job("--nproc-per-node", 4, *options, "visible.py", env={"TEST_LAST": "1"})
    j.until(lambda: len(j.marks("g0.l*")) == 4)
    server.answer = [*sick(B, "REBOOT_SYSTEM"), component(ECC, "Degraded", f"one of {A}")]
    j.ok()
    assert [a.slots for a in j.events(AttemptStarted)] == [(0, 1, 2, 3), (0, 1, 3)]
    verdicts = {v.condition: (v.index, v.verdict) for v in j.events(DeviceVerdict)}
    assert verdicts == {"gpud-unhealthy": (2, "SHED"), "gpud-check": (1, "LOG")}
    assert "fallen off the bus" in next(v.evidence for v in j.events(DeviceVerdict) if v.index == 2)
    assert not [n.text for n in j.events(Notice) if "tells nothing" in n.text]
