"""`goodrun devices`: what a person sees and does about a node's GPUs, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture
def devices(gpus, tmp_path):
    """Run `goodrun devices …` on a node with four simulated GPUs; returns status, stdout and stderr."""

    def run(*words, env=None):
        full = {**os.environ, **gpus.env(os.environ), "GOODRUN_HOME": str(tmp_path / "home"), **(env or {})}
        code = "import sys; from goodrun.elastic_runner.cli import console; sys.argv[0] = 'goodrun'; console()"
        done = subprocess.run([sys.executable, "-c", code, "devices", *words], env=full, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_list_tells_health_as_it_is_now(devices, gpus):
    """Each GPU with what its driver says now: nothing found, what is wrong, and what cannot be told is named, never called healthy."""
    gpus.set(1, "returns", 999)
    gpus.set(2, "DeviceGetTotalEccErrors.returns", 3)
    status, out, _ = devices("--json")
    assert status == 0
    by_index = {d["device"]["index"]: d for d in json.loads(out)["devices"]}
    assert by_index[0]["health"] == "nothing found"
    assert "driver-error" in by_index[1]["health"] and "Unknown Error" in by_index[1]["health"]
    assert by_index[2]["health"] == "nothing found"
    assert "ecc_uncorrected" in by_index[2]["unknown"] and "ecc_uncorrected" not in by_index[0]["unknown"]


def test_a_gpu_is_set_aside_and_let_back_in_by_hand(devices, gpus):
    """quarantine and release take a number or the beginning of a UUID; the list shows who did it, why and until when."""
    assert devices("quarantine", "2", "--reason", "smells", "--hours", "3")[0] == 0
    out = devices()[1]
    assert "SET ASIDE until" in out and "smells" in out
    gpus.set(2, "gone", 1)
    assert "not known: the driver does not find it" in devices()[1]  # what is set aside is listed even if it is gone
    assert devices("release", "gpu-00000002")[0] == 0
    assert "SET ASIDE" not in devices()[1]
    status, _, err = devices("release", "GPU-00000002")
    assert status == 2 and "not set aside" in err
    assert devices("quarantine", "GPU-")[0] == 2  # all of them begin so


def test_without_a_driver_nothing_is_called_healthy(devices, gpus):
    """No driver: that is said, and no GPU is listed as well."""
    gpus.set_driver("Init.returns", 9)
    status, out, _ = devices()
    assert status == 0
    assert "not watched" in out and "nothing found" not in out


@pytest.mark.parametrize(
    ("what", "said"),
    [("79", "SHED"), ("31", "RESTART"), ("45", "LOG"), ("9999", "not in the table"), ("query-hangs", "time 2 within 600 s")],
)
def test_explain_says_what_would_be_done_and_why(devices, what, said):
    """--explain names the action, its meaning and the file that says so."""
    status, out, _ = devices("--explain", what)
    assert status == 0
    assert said in out and "health_policy.yaml" in out


def test_explain_of_nonsense_lists_what_there_is(devices):
    """A word that is neither an XID nor a condition is an error that names the conditions."""
    status, _, err = devices("--explain", "bored")
    assert status == 2 and "query-hangs" in err
