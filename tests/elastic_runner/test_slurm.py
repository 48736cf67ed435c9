"""Slurm's variables become the options that nobody need give; a warning before the time limit saves, leaves, and asks for another start."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.errors import UsageError
from goodrun.elastic_runner.events import RunEnded
from goodrun.elastic_runner.options import parse
from goodrun.elastic_runner.reading import SUBCOMMANDS
from goodrun.elastic_runner.slurm import Step, expanded, options_for, step_of

LISTS = [
    ("gpu1", ("gpu1",)),
    ("gpu[01-03,7]", ("gpu01", "gpu02", "gpu03", "gpu7")),
    ("gpu[8-11]", ("gpu8", "gpu9", "gpu10", "gpu11")),
    ("a[1-2],b,c[3]", ("a1", "a2", "b", "c3")),
    ("r[1-2]n[01-02]", ("r1n01", "r1n02", "r2n01", "r2n02")),
    ("node[098-101]", ("node098", "node099", "node100", "node101")),
]
ENV = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[01-03]",
    "SLURM_STEP_NODELIST": "gpu[01-03]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1",
}
UNSAID = {
    "nnodes": "1:1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "rdzv_conf": "",
    "standalone": False,
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": None,
    "local_addr": None,
}
THREE = Step(job="12345", number=12345, step=0, nodes=("gpu01", "gpu02", "gpu03"), node=1, tasks=3, restarts=0)


@pytest.mark.parametrize(("text", "names"), LISTS)
def test_lists_of_nodes(text, names):
    """What Slurm writes in short is written out, leading zeros kept."""
    assert expanded(text) == names


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm's scontrol is not installed")
@pytest.mark.parametrize("text", [text for text, _ in LISTS])
def test_slurm_itself_reads_them_alike(text, tmp_path):
    """The oracle."""
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=x\nPartitionName=x Nodes=x\n")
    env = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    told = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=True, env=env, timeout=30)
    assert expanded(text) == tuple(told.stdout.split())


@pytest.mark.parametrize("text", ["", "gpu[1-3", "gpu1-3]", "gpu[a-b]", "gpu[]", "a,,b", "gpu[1-]"])
def test_what_is_no_list_is_refused(text):
    """A half-read list would be another set of nodes."""
    with pytest.raises(ValueError, match="is no list of nodes"):
        expanded(text)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, THREE),
        ({"SLURM_RESTART_COUNT": "2"}, Step(**{**vars(THREE), "restarts": 2})),
        ({"SLURM_ARRAY_JOB_ID": "12300", "SLURM_ARRAY_TASK_ID": "4"}, Step(**{**vars(THREE), "job": "12300_4"})),
        ({"SLURM_STEP_NODELIST": "gpu[02-03]", "SLURM_STEP_ID": "2"}, Step(**{**vars(THREE), "nodes": ("gpu02", "gpu03"), "step": 2})),
        ({"SLURM_STEP_ID": None}, None),  # the batch script
        ({"SLURM_STEP_ID": "4294967291"}, Step(**{**vars(THREE), "step": 4294967291})),
        ({"SLURM_JOB_ID": None}, None),
        ({"SLURM_NODEID": "3"}, None),
        ({"SLURM_STEP_NODELIST": "gpu[1"}, None),
    ],
)
def test_the_step_in_which_srun_started_us(change, expected):
    """None where anything is missing or odd: then goodrun is what it is without Slurm."""
    assert step_of({k: v for k, v in {**ENV, **change}.items() if v is not None}) == expected


MET = {
    "nnodes": "3",
    "rdzv_backend": "goodrun",
    "rdzv_endpoint": "gpu01.lan:22345,gpu02.lan:22345,gpu03.lan:22345",
    "rdzv_id": "slurm-12345.0.0",
    "local_addr": "gpu02.lan",
}


@pytest.mark.parametrize(
    ("given", "step", "expected"),
    [
        ({}, {}, MET),
        ({}, {"node": 0}, {**MET, "local_addr": "gpu01.lan"}),
        ({}, {"restarts": 1}, {**MET, "rdzv_id": "slurm-12345.0.1"}),
        ({}, {"step": 2}, {**MET, "rdzv_id": "slurm-12345.2.0", "rdzv_endpoint": MET["rdzv_endpoint"].replace("22345", "24345")}),
        ({}, {"nodes": ("gpu01", "gpu02", "gpu03", "gpu04", "gpu05"), "tasks": 5}, {**MET, "nnodes": "5"}),
        ({"nnodes": "2:3"}, {}, {**MET, "nnodes": "2:3"}),
        ({"local_addr": "10.0.0.2"}, {}, {**MET, "local_addr": "10.0.0.2"}),
        ({"nnodes": "1"}, {}, {}),
        ({"rdzv_endpoint": "other:29400", "rdzv_backend": "c10d"}, {}, {}),
        ({"standalone": True}, {}, {}),
        ({"node_rank": 1}, {}, {}),
        ({"master_port": 29500}, {}, {}),
        ({}, {"nodes": ("gpu01",), "node": 0, "tasks": 1}, {}),
        ({}, {"nodes": ("gpu01",), "node": 0, "tasks": 8}, {}),  # eight runs that know nothing of each other
    ],
)
def test_where_nodes_meet(given, step, expected):
    """All tasks of a step come to the same answer but for their own address; a word of the user's on the matter leaves all to the user."""
    assert options_for(Step(**{**vars(THREE), **step}), {**UNSAID, **given}, lambda node: f"{node}.lan") == expected


def test_slurm_nodes_on_one_machine_meet_at_ports_of_their_own():
    """Several slurmd on one host have one address."""
    found = options_for(THREE, UNSAID, lambda node: "here" if node != "gpu02" else "there")
    assert found["rdzv_endpoint"] == "here:22345,there:22345,here:22346"


def test_a_task_for_each_rank_is_refused():
    """As torchrun, goodrun starts the ranks of a node itself."""
    with pytest.raises(UsageError, match="--ntasks-per-node=1"):
        options_for(Step(**{**vars(THREE), "tasks": 24}), UNSAID, str)


def test_the_command_line_takes_them_up(tmp_path, monkeypatch):
    """Parsing under Slurm's variables."""
    for name in [n for n in os.environ if n.startswith(("PET_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in {**ENV, "SLURM_STEP_NODELIST": "localhost,ip6-localhost", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    (tmp_path / "train.py").touch()
    args, config = parse(["--requeue-signal", "USR1", str(tmp_path / "train.py")])
    assert (args.nnodes, args.rdzv_endpoint, config.max_nodes) == ("2", "localhost:22345,ip6-localhost:22345", 2)
    assert config.requeue_signal == "SIGUSR1"


@pytest.mark.parametrize(
    ("change", "script", "name"),
    [
        ({"node": 0}, "/a/train.py", "slurm-12345-train"),
        ({"node": 0, "restarts": 3}, "train.py", "slurm-12345-train"),
        ({}, "my train.py", "slurm-12345-my_train.node1"),
        ({"node": 0, "job": "12300_4", "step": 2}, "pkg.train", "slurm-12300_4-step2-pkg.train"),
        ({"tasks": 8}, "train.py", ""),
    ],
)
def test_the_lives_of_a_job_share_a_record(change, script, name):
    """By its number, its step, its script and the node's place in it; tasks that know nothing of each other have records of their own."""
    assert Step(**{**vars(THREE), **change}).record(script) == name


def test_the_warning_saves_leaves_and_asks_for_another_start(job, living):
    """SIGUSR1 with --requeue-signal USR1, to every process of the job as Slurm may send it: one step saved on all ranks, status 75."""
    j = job("--nproc-per-node", 2, "--requeue-signal", "USR1", "train.py", 100_000, env={"TEST_PAUSE": "0.02"})
    j.until(lambda: len(j.marks("samples.*")) == 2 and all((j.where / n).read_text().count("\n") > 2 for n in j.marks("samples.*")))
    for pid in living():
        os.kill(pid, signal.SIGUSR1)
    assert j.wait(40) == 75
    newest = found_in(j.where / "checkpoints")[0]
    assert newest.fault is None
    assert f"goodrun: step {newest.step} was saved on the way out" in j.err
    [ended] = j.events(RunEnded)
    assert (ended.outcome, ended.status, ended.reason) == ("stopped", 75, "stopped by SIGUSR1: to be started again")


@pytest.mark.parametrize("argv", [[], ["--nodes=1", "--gpus-per-node=0", "train.py", "--lr", "1 2"], ["--nodes=9", "--min-nodes=3"]])
def test_the_batch_file_is_one(argv, capsys):
    """bash reads it, and what is asked of Slurm and of goodrun fit each other: goodrun takes the command line as it stands."""
    assert SUBCOMMANDS["slurm-script"](argv) == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    line = text.split("    goodrun ", 1)[1].split("\n", 1)[0]
    line = line.replace("--nproc-per-node gpu", "--nproc-per-node 1").replace("train.py", shlex.quote(__file__))
    check = "import shlex, sys; from goodrun.elastic_runner.options import parse; parse(shlex.split(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", check, line], check=True, env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")})
    assert ("--nnodes" in line) is ("#SBATCH --nodes=1\n" not in text)


def test_two_lives_are_one_history_and_two_at_once_are_two(job, tmp_path):
    """Under Slurm's variables, a second start goes on in the record of the first; one beside it has a record of its own."""
    one = {**ENV, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    command = ("-m", "goodrun", "--no-python", "sh", "-c", "touch up; while [ -e wait ]; do sleep 0.01; done")
    env = {**one, "GOODRUN_HOME": str(tmp_path / "home")}
    job(*command, env=env, launcher=sys.executable).ok()
    first = job(*command, env=env, launcher=sys.executable, name="first")
    runs = tmp_path / "home" / "runs"
    assert [p.name for p in runs.iterdir()] == ["slurm-12345-sh"]
    first.ok()
    assert (runs / "slurm-12345-sh" / "events.jsonl").read_text().count('"run_started"') == 2
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "wait").touch()
    long = job(*command, env=env, launcher=sys.executable, name="long")
    long.until(lambda: (long.where / "up").exists())
    job(*command, env=env, launcher=sys.executable, name="beside").ok()
    (tmp_path / "long" / "wait").unlink()
    long.ok()
    assert len(list(runs.iterdir())) == 2


def test_a_sick_node_is_named_to_slurm(job):
    """Status 69 comes with the commands that keep the job's next life off this node."""
    env = {**ENV, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    j = job("--nproc-per-node", 1, "--chaos", "slot-lost:slot=0@1s", "--no-python", "sleep", 60, env=env)
    assert j.wait() == 69
    assert "scontrol update JobId=12345 ExcNodeList=localhost, or sbatch --exclude=localhost" in j.err


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_a_real_slurm(tmp_path):
    """Three nodes on this machine: a job at its time limit is requeued and goes on, and one that loses a node goes on without it."""
    goodrun = tmp_path / "goodrun"
    goodrun.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m goodrun "$@"\n')
    goodrun.chmod(0o755)
    script = Path(__file__).resolve().parents[2] / "scripts" / "test_slurm"
    done = subprocess.run([script], env={**os.environ, "GOODRUN": str(goodrun)}, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("== all is well\n")
