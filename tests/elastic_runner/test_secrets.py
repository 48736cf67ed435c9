"""A job whose storage fails in every way, with the job's credentials in each of its answers: they are in no file and in no output."""

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.events import FirstStep, Notice
from goodrun.elastic_runner.reading import SUBCOMMANDS

from ..checkpoint.far import Fault
from ..checkpoint.stores import SECRET, moto, s3, volume

PASSWORD = "hunter22" + SECRET[::-1]
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


@pytest.fixture(params=["volume", "s3"])
def store(request, monkeypatch):
    """Storage across the network; the jobs find it through the environment."""
    monkeypatch.setenv("BACKUP_PASSWORD", PASSWORD)
    if request.param == "volume":
        with volume(monkeypatch) as found:
            monkeypatch.setenv("TEST_CHECKPOINTS", found.url)
            yield found
    else:
        pytest.importorskip("moto.server")
        with moto() as target, s3(target, monkeypatch) as found:
            monkeypatch.setenv("TEST_CHECKPOINTS", found.url)
            yield found


def telling(**words):
    """A fault whose answer tells everything it knows."""
    told = f"{SECRET} and {PASSWORD}, Authorization: Bearer {SECRET}, https://host/x?X-Amz-Signature={SECRET}"
    as_xml, as_json = f"<Error><Code>Some</Code><Message>{told}</Message></Error>", f'{{"error_code": "SOME_CODE", "message": "{told}"}}'
    return Fault(body=(as_json if words.pop("json") else as_xml).encode(), **words)


def test_no_secret_is_left_anywhere(job, store, tmp_path, capfd):
    """Faults that pass, ranks that raise and are killed, storage gone for good, restores that are refused, dcp, and every command after."""
    json, faults = store.kind == "volume", store.server.plan.faults
    options = ("--nproc-per-node", 2, "--storage-patience", 2, "--chaos", "raise:rank=1@step=8; kill:rank=0@step=14")
    first = job(*options, "train.py", 100, env={"TEST_PAUSE": "0.2"})
    first.until(lambda: any("manifest.json" in path for path in store.server.asked("PUT")), 100)
    faults += [telling(json=json, status=status, times=3) for status in (401, 503, 500, 429, 408)]
    faults += [Fault(lambda m, p: m == "PUT", cut=500, times=3), Fault(lambda m, p: m == "GET", cut=20, times=2)]
    first.until(lambda: not any(fault.times for fault in faults) and len(first.events(FirstStep)) == 3, 100)
    faults.append(telling(json=json, status=503))
    assert first.wait(200) == 1
    [kept] = {e.text for e in first.events(Notice) if "uploaded with" in e.text}
    command = kept.partition("uploaded with: goodrun ")[2].split()
    assert "503" in kept and [f.step for f in found_in((tmp_path / command[2]).parent)] == [100]

    faults[:] = [telling(json=json, status=403)]
    refused = job("--nproc-per-node", 2, "train.py", 60, name="refused")
    assert refused.wait(100) == 1
    faults[:] = [telling(json=json, of=lambda m, p: m in ("GET", "POST") and "manifest.json" in p, status=403)]
    unreadable = job("--nproc-per-node", 2, "train.py", 60, name="unreadable")
    assert unreadable.wait(100) == 1
    faults[:] = [telling(json=json, status=403)]
    dcp = job("--nproc-per-node", 2, "dcp_fails.py", name="dcp")
    assert dcp.wait(100) == 1
    for j in (refused, unreadable, dcp):
        assert "403" in j.err and "Traceback" in j.err

    assert SUBCOMMANDS[command[0]](command[1:]) == 2
    assert SUBCOMMANDS["checkpoints"]([store.url]) == 2
    for j in (first, refused, unreadable, dcp):
        for words in (["history"], ["history", "--json"], ["goodput"], ["top"], ["report", "-o", str(j.where / "report.html")]):
            assert SUBCOMMANDS[words[0]]([str(j.run_dir), *words[1:]]) == 0
    left = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"events.jsonl", "report.html", "stderr"} <= {path.name for path in left}
    said = "".join(capfd.readouterr())
    assert "403" in said
    for secret in (SECRET, PASSWORD):
        assert secret not in said
        assert [path for path, content in left.items() if secret.encode() in content] == []
