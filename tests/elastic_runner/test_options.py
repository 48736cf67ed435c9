"""The command line: torchrun's meaning before the script, the script's own after it, goodrun's options beside both."""

import os
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from goodrun.elastic_runner.errors import UsageError
from goodrun.elastic_runner.options import UNCAPPED, build_parser, parse, split_at_script
from goodrun.elastic_runner.slots import first_slots, visible_devices
from goodrun.elastic_runner.surroundings import choose_threads


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with a script and a module, and an environment without torchrun's or our variables."""
    for name in [n for n in os.environ if n.startswith(("PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "GOODRUN_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*argv):
    """The sentence with which a command line is refused."""
    with pytest.raises(UsageError) as e:
        parse(argv)
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    "own",
    [
        [],
        ["--r", "16"],
        ["--", "--tee", "3"],
        ["--help"],
        ["-h"],
        ["--standalone", "--nproc-per-node", "4"],
        ["-m", "mixed", "-r3", "--run-dir=x"],
        ["--chaos", "kill:rank=0@step=1"],
        ["other.py", "--", "", " ", "a b", "ü", "${local_rank}"],
        ["--config", "missing.yaml"],
    ],
    ids=lambda o: " ".join(o) or "none",
)
@pytest.mark.parametrize("before", [[], ["--nnodes", "1"], ["--standalone"], ["--nproc-per-node=2", "-r3", "--"]], ids=" ".join)
def test_what_follows_the_script_is_the_scripts(before, own):
    """Byte for byte and in order, however much it looks like an option of ours."""
    head = [t for t in before if t != "--"]
    assert split_at_script(build_parser(), [*before, "train.py", *own]) == (head, "train.py", own)
    args, config = parse([*before, "train.py", *own])
    assert args.training_script_args == own
    assert args.training_script == config.script == "train.py"
    assert config.argv == (*before, "train.py", *own)


@pytest.mark.parametrize(
    "head",
    [
        ["--nproc-per-node", "2"],
        ["--nproc_per_node", "2"],
        ["--nproc-per-node=2"],
        ["--nproc_per_node=2"],
        ["-r", "3"],
        ["-r3"],
        ["-t=1"],
        ["--redirects", "0:1,1:2"],
        ["--redirect=3"],
        ["--redirect", "3"],
        ["--stand"],
        ["--nnode", "1"],
        ["--nnode=1"],
        ["--rol", "trainer"],
        ["--te", "1"],
        ["--rdzv-conf", "a=b,c=d"],
        ["--rdzv_backend=c10d", "--rdzv_id", "7", "--rdzv-endpoint=h:1"],
        ["--max-restarts", "3", "--monitor-interval", "5"],
        ["--master-addr", "::1", "--master_port", "0"],
        ["--local-ranks-filter", "0,1"],
        ["-mr", "3"],
        ["--modul", "-r", "1"],
        ["--virtual-local-rank"],
        ["--no-python", "--log-dir", "logs"],
        ["--run-path"],
        ["--signals-to-handle", "SIGTERM"],
    ],
    ids=" ".join,
)
def test_options_before_the_script_mean_what_torchrun_means(head):
    """Every spelling and abbreviation is split off and read as torchrun's own parser reads it."""
    theirs = get_args_parser().parse_args([*head, "train.py", "--x"])
    split, script, own = split_at_script(build_parser(), [*head, "train.py", "--x"])
    assert (split, script, own) == (head, "train.py", ["--x"])
    ours = vars(build_parser().parse_args([*split, "--", script]))
    given = {k: v for k, v in vars(theirs).items() if k != "training_script_args"}
    assert {k: ours[k] for k in given if k != "max_restarts"} == {k: v for k, v in given.items() if k != "max_restarts"}
    assert ours["max_restarts"] == (theirs.max_restarts if "--max-restarts" in head else None)


@pytest.mark.parametrize("word", ["--cha", "--spar", "--min", "--mi", "--world", "--hang", "--dry", "--conf", "--run-d", "--c", "--w"])
def test_our_options_have_no_abbreviations(word):
    """A shortened option of ours is as unknown as it is to torchrun."""
    assert word in refused(word, "1", "train.py")
    assert word in refused(f"{word}=1", "train.py")


@pytest.mark.parametrize("word", ["--s", "--r", "--run", "--m", "--no", "--nproc", "--d", "--n", "--l", "--rdzv"])
def test_abbreviations_are_ambiguous_only_where_torchruns_are(word, capsys):
    """Our options add no candidates: the complaint names torchrun's options and none of ours."""
    message = refused(word, "1", "train.py")
    with pytest.raises(SystemExit):
        get_args_parser().parse_args([word, "1", "train.py"])
    theirs = capsys.readouterr().err.rpartition("error: ")[2].strip()
    assert "ambiguous" in theirs
    assert message.startswith(theirs)


def test_every_option_of_torchruns_is_there():
    """The namespace that torch's own `run` gets has all of its names, with its defaults."""
    theirs, ours = vars(get_args_parser().parse_args(["train.py"])), vars(parse(["train.py"])[0])
    chosen = {"max_restarts": UNCAPPED, "local_addr": "127.0.0.1"}
    assert {k: ours[k] for k in theirs} == {**theirs, **chosen}


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "no training script given"),
        (["--standalone"], "no training script given"),
        (["--standalone", "--"], "no training script given"),
        (["--nproc-per-node"], "training_script"),
        (["--nonsense", "3"], "--nonsense"),
        (["--nonsense"], "--nonsense"),
        (["--nproc", "2", "train.py"], "--nproc"),
        (["--hang-detection", "maybe", "train.py"], "maybe"),
        (["missing.py"], "'missing.py'"),
        (["-m", "no_such_module.main"], "'no_such_module.main'"),
        (["--no-python", "no-such-program"], "'no-such-program'"),
        (["--nnodes", "0", "train.py"], "--nnodes 0"),
        (["--nnodes", "3:2", "train.py"], "--nnodes 3:2"),
        (["--nnodes", "x", "train.py"], "--nnodes x"),
        (["--nnodes", "1:2:3", "train.py"], "--nnodes 1:2:3"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node 0"),
        (["--nproc-per-node", "-1", "train.py"], "--nproc-per-node"),
        (["--nproc-per-node", "many", "train.py"], "--nproc-per-node many"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts"),
        (["--shutdown-timeout", "soon", "train.py"], "soon"),
        (["--shutdown-timeout", "-3", "train.py"], "--shutdown-timeout"),
        (["--snapshot-replicas", "1", "train.py"], "--snapshot-replicas needs other nodes"),
        (["--snapshot-replicas", "1", "--nnodes", "2", "--rdzv-backend", "c10d", "train.py"], "--snapshot-replicas needs other nodes"),
        (["--snapshot-replicas", "-1", "--nnodes", "2", "train.py"], "--snapshot-replicas -1"),
    ],
    ids=lambda v: " ".join(v) or "nothing" if isinstance(v, list) else None,
)
def test_a_command_line_that_cannot_work_is_one_sentence(argv, word):
    """The value that is wrong is named."""
    assert word in refused(*argv)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--min-nproc", "5"], "--min-nproc 5"),
        (["--min-nproc", "0"], "--min-nproc 0"),
        (["--world-size-multiple-of", "3"], "--world-size-multiple-of 3"),
        (["--world-size-multiple-of", "0"], "--world-size-multiple-of 0"),
        (["--world-size-multiple-of", "8"], "--world-size-multiple-of 8"),
        (["--spares", "-1"], "--spares -1"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)
def test_bounds_of_shrinking_must_fit(flags, word):
    """A bound that 4 workers cannot keep is refused at once, not at the first failure."""
    assert word in refused("--nproc-per-node", "4", *(f"{flags[0]}={v}" for v in flags[1:]), "train.py")


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        ([], first_slots(4, spares=0, min_nproc=1, multiple_of=1)),
        (["--min-nproc", "4"], first_slots(4, spares=0, min_nproc=4, multiple_of=1)),
        (["--world-size-multiple-of", "2"], first_slots(4, spares=0, min_nproc=2, multiple_of=2)),
        (["--world-size-multiple-of", "2", "--min-nproc", "1"], first_slots(4, spares=0, min_nproc=1, multiple_of=2)),
        (["--spares", "2"], first_slots(4, spares=2, min_nproc=1, multiple_of=1)),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)
def test_slots_at_the_start(flags, slots):
    """nproc slots in use, spares numbered after them, one multiple as the least unless said otherwise."""
    assert parse(["--nproc-per-node", "4", *flags, "train.py"])[1].slots == slots
    assert slots.active == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("slots", "env", "count", "devices"),
    [
        ((0, 1, 2, 3), {}, 4, ()),
        ((0, 2, 3), {}, 4, ("0", "2", "3")),
        ((0, 1), {}, 4, ()),
        ((0, 2), {"CUDA_VISIBLE_DEVICES": "4,5,7"}, 8, ("4", "7")),
        ((0, 2), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, 3, ("GPU-a", "GPU-c")),
        ((0, 2), {}, 0, ()),
        ((0, 9), {}, 4, ()),
    ],
)
def test_devices_of_a_shrunken_set(slots, env, count, devices):
    """Rank i drives slot i's device; the user's own choice of devices is what slots count in; without GPUs nothing is set."""
    assert visible_devices(slots, env, count) == devices


@pytest.mark.parametrize(
    ("env", "argv", "expected"),
    [
        ({"PET_NPROC_PER_NODE": "3"}, [], {"nproc_per_node": "3"}),
        ({"PET_NPROC_PER_NODE": "3"}, ["--nproc-per-node", "2"], {"nproc_per_node": "2"}),
        ({"PET_NNODES": "1:1", "PET_RDZV_ID": "job7"}, [], {"nnodes": "1:1", "rdzv_id": "job7"}),
        ({"PET_MODULE": "1"}, ["-m"], {"module": True}),
        ({"PET_REDIRECTS": "3"}, [], {"redirects": "3"}),
        ({"PET_STANDALONE": "1"}, [], {"standalone": True}),
        ({"PET_STANDALONE": "0"}, [], {"standalone": False}),
        ({"PET_MAX_RESTARTS": "2"}, [], {"max_restarts": 2}),
        ({"PET_MAX_RESTARTS": "2"}, ["--max-restarts", "5"], {"max_restarts": 5}),
        ({"PET_MAX_RESTARTS": "0"}, [], {"max_restarts": 0}),
    ],
)
def test_pet_variables_are_torchruns(monkeypatch, env, argv, expected):
    """Each is a default for its option; an argument beats it."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    args, config = parse([*argv, "json.tool" if "-m" in argv else "train.py"])
    assert {k: getattr(args, k) for k in expected} == expected
    if "max_restarts" in expected:
        assert config.budgets.max_restarts == expected["max_restarts"]


@pytest.mark.parametrize(("name", "value"), [("PET_STANDALONE", "true"), ("PET_NPROC_PER_NODE", "many"), ("PET_MAX_RESTARTS", "x")])
def test_a_bad_pet_variable_is_one_sentence(monkeypatch, name, value):
    """What torchrun answers with a traceback names the value here."""
    monkeypatch.setenv(name, value)
    assert value in refused("train.py")


def test_without_a_cap_the_budgets_decide():
    """torchrun's default of 0 restarts is not ours: None, unless the user said a number, 0 included."""
    assert parse(["train.py"])[1].budgets.max_restarts is None
    assert parse(["--max-restarts", "0", "train.py"])[1].budgets.max_restarts == 0


@pytest.mark.parametrize(
    ("argv", "pet", "config", "nproc"),
    [
        ([], None, None, "1"),
        ([], None, "4", "4"),
        ([], "3", "4", "3"),
        (["--nproc-per-node", "2"], "3", "4", "2"),
        (["--nproc-per-node", "2"], None, "4", "2"),
    ],
)
def test_argument_beats_environment_beats_file_beats_default(monkeypatch, place, argv, pet, config, nproc):
    """One order for every option."""
    if pet:
        monkeypatch.setenv("PET_NPROC_PER_NODE", pet)
    if config:
        (place / "c.yaml").write_text(f"nproc-per-node: {config}\n")
        argv = ["--config", "c.yaml", *argv]
    assert parse([*argv, "train.py"])[0].nproc_per_node == nproc


def test_a_configuration_file_may_set_any_option(place):
    """torchrun's and ours, spelt with - or _, as numbers, words and yes/no."""
    (place / "c.yaml").write_text(
        "nproc_per_node: 4\nspares: 1\nmin-nproc: 2\nstandalone: yes\nmax-restarts: 0\nredirects: 3\nrun-dir: here\n"
        "chaos: kill:rank=3@step=2\ndry-run-detectors: true\nhang-detection: off\n"
    )
    args, config = parse(["--config=c.yaml", "train.py"])
    assert (args.standalone, args.redirects, config.budgets.max_restarts) == (True, "3", 0)
    assert (config.slots, config.run_dir) == (first_slots(4, spares=1, min_nproc=2, multiple_of=1), Path("here"))
    assert (len(config.chaos), config.dry_run_detectors, config.hang_detection) == (1, True, False)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("nproc: 4\n", ["c.yaml", "'nproc'", "nproc-per-node"]),
        ("zebra: 4\n", ["c.yaml", "'zebra'"]),
        ("training_script: x.py\n", ["'training_script'"]),
        ("config: d.yaml\n", ["'config'"]),
        ("3: 4\n", ["3"]),
        ("- nproc-per-node\n", ["c.yaml", "name: value"]),
        ("", ["c.yaml"]),
        ("a: [\n", ["c.yaml", "not valid YAML"]),
        ("\0", ["c.yaml", "not valid YAML"]),
        ("spares: some\n", ["--spares", "some"]),
        ("hang-detection: maybe\n", ["maybe", "auto, off"]),
        ("hang-detection: on\n", ["'on'", "auto, off"]),
        ("standalone: maybe\n", ["standalone", "'maybe'"]),
        ("spares: true\n", ["--spares"]),
        ("nproc-per-node: 0\n", ["--nproc-per-node 0"]),
    ],
)
def test_a_bad_configuration_file_is_one_sentence(place, body, words):
    """The file and the key or value are named; an unknown key is never passed over."""
    (place / "c.yaml").write_text(body)
    message = refused("--config", "c.yaml", "train.py")
    assert all(word in message for word in words)


def test_a_missing_configuration_file_is_named():
    """With the system's own words."""
    assert "nowhere.yaml: No such file" in refused("--config", "nowhere.yaml", "train.py")


@pytest.mark.parametrize(
    ("argv", "script", "own", "python"),
    [
        (["train.py", "a"], "train.py", ["a"], True),
        (["folder", "a"], "folder", ["a"], True),
        (["-m", "json.tool", "a"], "json.tool", ["a"], True),
        (["--no-python", "sh", "-c", "true"], "sh", ["-c", "true"], False),
    ],
    ids=["script", "folder", "-m", "--no-python"],
)
def test_what_may_be_run(argv, script, own, python):
    """A script, a folder with a __main__, a module, a program."""
    args, config = parse(argv)
    assert (args.training_script, args.training_script_args, config.script_is_python) == (script, own, python)


def test_run_path_is_the_command_it_amounts_to():
    """Its ranks are ordinary Python workers, whose last words are the script's and its arguments."""
    args, config = parse(["--run-path", "train.py", "-m", "--x"])
    assert (args.no_python, args.run_path, args.module) == (True, False, False)
    assert args.training_script_args[-3:] == ["train.py", "-m", "--x"]
    assert (config.script, config.script_is_python) == ("train.py", True)


@pytest.mark.parametrize(
    ("env", "nproc", "value"),
    [
        ({}, 2, "1"),
        ({}, 1, None),
        ({"OMP_NUM_THREADS": "7"}, 2, "7"),
        ({"OMP_NUM_THREADS": ""}, 2, ""),
        ({"SLURM_CPUS_PER_TASK": "4"}, 2, "1"),
    ],
)
def test_threads_are_chosen_as_torchrun_chooses(env, nproc, value):
    """One thread each where there are several ranks and the user said nothing; the choice is told."""
    said = choose_threads(nproc, env, cores=8)
    assert env.get("OMP_NUM_THREADS") == value
    assert bool(said) is (value == "1")
    assert ("SLURM_CPUS_PER_TASK" in said) is ("SLURM_CPUS_PER_TASK" in env)


def test_chaos_is_checked_against_the_job():
    """A rank that the job does not have can never be hit: refused, with the ranks that there are."""
    assert "rank 9" in refused("--nproc-per-node", "4", "--chaos", "kill:rank=9@step=3", "train.py")
    assert "0 to 3" in refused("--nproc-per-node", "4", "--chaos", "kill:rank=9@step=3", "train.py")
    assert len(parse(["--nproc-per-node", "4", "--nnodes", "3", "--chaos", "kill:rank=9@step=3", "train.py"])[1].chaos) == 1
    assert len(parse(["--nproc-per-node", "4", "--spares", "1", "--chaos", "slot-lost:slot=4@step=3", "train.py"])[1].chaos) == 1
    assert "slot 5" in refused("--nproc-per-node", "4", "--spares", "1", "--chaos", "slot-lost:slot=5@step=3", "train.py")


def test_help_lists_both(capsys):
    """`--help` before the script shows torchrun's options and, apart from them, ours."""
    with pytest.raises(SystemExit) as e:
        parse(["--help"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    theirs, _, ours = out.partition("goodrun's own options")
    assert "--rdzv-backend" in theirs and "--chaos" in ours and "--min-nproc" in ours


@pytest.mark.parametrize(
    ("argv", "env", "backend"),
    [
        (["--nnodes", "2"], {}, "goodrun"),
        (["--nnodes", "1:4", "--rdzv-endpoint", "a:1,b:2"], {}, "goodrun"),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--master-port", "7"], {}, "goodrun"),
        (["--nnodes", "2", "--rdzv-backend", "static"], {}, "static"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h"], {}, "c10d"),
        (["--nnodes", "2"], {"PET_RDZV_BACKEND": "static"}, "static"),
        (["--nnodes", "1"], {}, "static"),
    ],
)
def test_several_nodes_meet_through_goodrun_unless_told_otherwise(monkeypatch, argv, env, backend):
    """The default is goodrun's own rendezvous for more than one node; a backend that was named, on the command line or by PET_, stays."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    args = parse([*argv, "train.py"])[0]
    assert args.rdzv_backend == backend
    if backend == "goodrun":
        assert args.rdzv_endpoint == {"1:4": "a:1,b:2"}.get(argv[1], "h:7" if "h" in argv else "127.0.0.1:29500")
