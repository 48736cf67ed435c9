"""A notice of the cloud makes the job save and leave in time; the metadata service is a server of the test's, on loopback."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.events import RunEnded
from goodrun.elastic_runner.preemption import Aws, Azure, Gcp, asker, cloud_at

EVENTS = '{"DocumentIncarnation": 2, "Events": [%s]}'
OTHERS = '{"EventId": "1", "EventType": "Preempt", "Resources": ["vm-7"], "NotBefore": ""}'
HARMLESS = '{"EventId": "2", "EventType": "Freeze", "Resources": ["vm-1"], "NotBefore": ""}'
OURS = '{"EventId": "3", "EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": "Mon, 30 Nov 2026 18:29:47 GMT"}'
QUIET = {
    "AWS": {"/latest/meta-data/spot/instance-action": (404, "")},
    "GCP": {"/computeMetadata/v1/instance/preempted": (200, "FALSE"), "/computeMetadata/v1/instance/maintenance-event": (200, "NONE\n")},
    "Azure": {"/metadata/scheduledevents": (200, EVENTS % f"{OTHERS}, {HARMLESS}")},
}
NOTICES = {
    "AWS": {"/latest/meta-data/spot/instance-action": (200, '{"action": "terminate", "time": "2026-11-30T18:29:47Z"}')},
    "GCP": {"/computeMetadata/v1/instance/preempted": (200, "TRUE")},
    "Azure": {"/metadata/scheduledevents": (200, EVENTS % f"{OTHERS}, {OURS}")},
}
TOLD = {
    "AWS": "AWS takes this machine away: terminate at 2026-11-30T18:29:47Z",
    "GCP": "GCP takes this machine away: preempted",
    "Azure": "Azure takes this machine away: Preempt not before Mon, 30 Nov 2026 18:29:47 GMT",
}
CLOUDS = ["AWS", "GCP", "Azure"]


class Metadata(ThreadingHTTPServer):
    """One cloud's service: it wants the headers that the real one wants, and an AWS token is good for three questions."""

    daemon_threads = True

    def __init__(self, cloud):
        super().__init__(("127.0.0.1", 0), Handler)
        self.cloud, self.answers, self.token, self.left = cloud, dict(QUIET[cloud]), 0, 0
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_PUT(self):
        ours = self.server.cloud == "AWS" and self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        if ours:
            self.server.token, self.server.left = self.server.token + 1, 3
        self.answer(200 if ours else 405, f"token{self.server.token}")

    def do_GET(self):
        s, path = self.server, self.path.partition("?")[0]
        if s.cloud == "AWS":
            s.left -= 1
            if s.left < 0 or self.headers["X-aws-ec2-metadata-token"] != f"token{s.token}":
                return self.answer(401, "")
        elif s.cloud == "GCP" and self.headers["Metadata-Flavor"] != "Google":
            return self.answer(403, "")
        elif s.cloud == "Azure" and (self.headers["Metadata"] != "true" or "api-version=" not in self.path):
            return self.answer(400, "")
        elif s.cloud == "Azure" and path == "/metadata/instance/compute/name":
            return self.answer(200, "vm-1")
        return self.answer(*s.answers.get(path, (404, "")))

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        """Nothing."""


@pytest.fixture
def metadata():
    """Serve as a cloud does."""
    servers = []

    def serve(cloud):
        server = Metadata(cloud)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return server

    yield serve
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_each_cloud_is_known_by_its_answers(metadata, cloud):
    """Found out without being told; quiet however often it is asked; a notice is read; a service that fails for a while is no notice."""
    service = metadata(cloud)
    ask = asker(service.address)
    found = cloud_at(ask)
    assert type(found) is {"AWS": Aws, "GCP": Gcp, "Azure": Azure}[cloud]
    assert [found.notice(ask) for _ in range(9)] == [""] * 9
    quiet, service.answers = service.answers, {path: (500, "oops") for path in QUIET[cloud]}
    assert found.notice(ask) == ""
    service.answers = {path: (200, "{") for path in QUIET[cloud]}
    assert cloud == "AWS" or found.notice(ask) == ""
    service.answers = {**quiet, **NOTICES[cloud]}
    told = [found.notice(ask) for _ in range(2)]  # of AWS's one may only tell that the token has run out
    assert TOLD[cloud].partition(": ")[2] in told


def test_maintenance_that_only_moves_the_machine_is_no_notice(metadata):
    """Google moves machines without GPUs, and stops those with."""
    service = metadata("GCP")
    ask = asker(service.address)
    for event, notice in (("MIGRATE_ON_HOST_MAINTENANCE", ""), ("TERMINATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE")):
        service.answers["/computeMetadata/v1/instance/maintenance-event"] = (200, event)
        assert Gcp().notice(ask) == notice


def test_nobody_answers():
    """Neither a closed port nor a name that does not exist is a cloud, or an error."""
    assert cloud_at(asker("http://127.0.0.1:1")) is None


@pytest.mark.parametrize("cloud", CLOUDS[:1])
def test_a_notice_saves_and_leaves(job, metadata, cloud):
    """The job saves one step on all ranks, ends with 75, and its record says who took the machine."""
    service = metadata(cloud)
    env = {"TEST_PAUSE": "0.02", "GOODRUN_METADATA_ADDRESS": service.address, "http_proxy": "http://127.0.0.1:1"}
    j = job("--nproc-per-node", 2, "--watch-preemption", "train.py", 100_000, env=env)
    j.until(lambda: len(j.marks("samples.*")) == 2 and all((j.where / n).read_text().count("\n") > 2 for n in j.marks("samples.*")))
    service.answers |= NOTICES[cloud]
    assert j.wait(40) == 75
    newest = found_in(j.where / "checkpoints")[0]
    assert newest.fault is None
    assert f"goodrun: step {newest.step} was saved on the way out" in j.err
    assert j.events(RunEnded)[0].reason == f"{TOLD[cloud]}: to be started again"


def test_off_a_cloud_one_line_says_that_nothing_is_watched(job):
    """And the job runs as ever."""
    j = job("--watch-preemption", "--no-python", "true", env={"GOODRUN_METADATA_ADDRESS": "http://127.0.0.1:1"}).ok()
    assert "no metadata service of AWS, GCP or Azure answers here" in j.err
