"""How history and runs are shown: complete at any width, the same as JSON, and one sentence when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from rich.console import Console

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.history import History, fold
from goodrun.elastic_runner.history_view import show_history
from goodrun.elastic_runner.journal import Journal, read_events
from goodrun.elastic_runner.reading import SUBCOMMANDS, history_as_dict

EXCEPTION = "rank 2 raised torch.distributed.checkpoint.api.CheckpointException: [slot] the shard [red]rank_2[/red] is not readable"
HANG = "rank 0 hung in all_reduce after step 31: it is stopped (state T) while its peers wait (slot 0)"


class Clock:
    """A clock that the story sets."""

    t = 1000.0

    def __call__(self) -> float:
        return self.t

    def wall(self) -> datetime:
        return datetime(2026, 11, 30, 6, 25, tzinfo=timezone.utc) + timedelta(seconds=self.t - 1000)


def tell(run_dir: Path, *, end: ev.RunEnded | None = None) -> Path:
    """A run of four attempts: a kill, an exception, a hang and a lost slot."""
    run_dir.mkdir(parents=True)
    clock = Clock()
    journal = Journal(run_dir, clock=clock, wall=clock.wall, node="n1")
    journal.write(ev.RunStarted(run_id=run_dir.name, script="train_gpt.py", slots=(0, 1, 2, 3)))
    steps = [
        ("signal", "rank 1 killed by SIGKILL (slot 1)", "restart", (0, 1, 2, 3), "strike 1 for slot 1"),
        ("exception", EXCEPTION, "restart", (0, 1, 2, 3), "first crash at this step"),
        ("hang", HANG, "restart without", (1, 2, 3), "slot 0 failed 3 times in a row: going on with 3 of 4"),
        ("", "", "", (), ""),
    ]
    slots: tuple[int, ...] = (0, 1, 2, 3)
    for number, (kind, cause, do, left, reason) in enumerate(steps):
        journal.attempt, begin, step = number, clock.t, number * 10
        journal.write(ev.AttemptStarted(world_size=len(slots), slots=slots, rendezvous_s=0.1))
        clock.t += 2
        if number:
            journal.write(ev.Restored(step=step, source=f"/scratch/checkpoints/step-{step:08d}.{number - 1}", seconds=0.05))
        boot, torch, init, reading, read = (begin + s for s in (0.08, 0.09, 0.4, 0.5, 0.58))
        marks = ev.FirstStep(step=step + 1, boot_t=boot, torch_t=torch, init_t=init, restore_begin_t=reading, restore_end_t=read)
        journal.write(dataclasses.replace(marks, first_step_t=begin + 0.9))
        clock.t += 11
        journal.write(ev.RankProgress(steps=(step + 11,) * len(slots)))
        if kind:
            if kind != "exception":
                journal.write(ev.ChaosFired(index=number, entry=f"{'kill' if number == 0 else 'hang'}:rank=1@step={step + 11}", rank=1))
            fault_t = clock.t - (0.62 if kind == "hang" else 0.02)
            journal.write(ev.Failed(kind=kind, rank=1, slot=1, best_step=step + 11, cause=cause, fault_t=fault_t))
            journal.write(ev.Decided(action=do, slots=left, reason=reason))
            journal.write(ev.Stopping(signal="SIGKILL", why="restart"))
            clock.t += 0.12
            journal.write(ev.Stopped(seconds=0.12))
            clock.t += 0.1
            slots = left
    if end is not None:
        journal.write(end)
    journal.close()
    return run_dir


def render(history: History, width: int) -> str:
    """What a terminal of that width without colours shows."""
    console = Console(width=width, highlight=False, markup=False, color_system=None)
    with console.capture() as caught:
        show_history(history, console, timezone.utc)
    return caught.get()


def column(text: str, title: str, following: str | None = None) -> str:
    """What stands in the column of that title, up to the `following` one, without the blanks at which lines may have been broken."""
    lines = text.splitlines()
    top = next(i for i, line in enumerate(lines) if title in line)
    left, right = lines[top].index(title), lines[top].index(following) if following else None
    rows = lines[top : next(i for i, line in enumerate(lines) if line.startswith("seconds from each fault"))]
    return "".join("".join(line[left:right].split()) for line in rows)


@pytest.mark.parametrize("width", [78, 80, 100, 120, 160])
def test_nothing_is_cut(tmp_path: Path, width: int) -> None:
    """At any usual width every cause and decision can be read in full, no line is too long and nothing ends in an ellipsis."""
    history = fold(read_events(tell(tmp_path / "r1", end=ev.RunEnded(outcome="succeeded", step=41))))
    text = render(history, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    wide = width >= 120
    for attempt in history.attempts:
        assert attempt.cause.replace(" ", "") in column(text, "how it ended", "what was decided" if wide else None)
        assert attempt.reason.replace(" ", "") in column(text, "what was decided" if wide else "how it ended")
        assert f"{attempt.started_wall[11:19]}" in text
    for word in ("r1", "train_gpt.py", "succeeded", "3 restarts", "detect", "rendezvous", "hang:rank=1@step=31"):
        assert "".join(word.split()) in "".join(text.split())
    for recovery in (a.recovery for a in history.attempts if a.recovery):
        assert re.search(rf"^ *[123] .* {recovery.total:.2f} *$", text, re.MULTILINE)


def test_no_shape_of_history_breaks_the_view(tmp_path: Path) -> None:
    """Empty, running, died, failed and two-lived histories all have a face that says which they are."""
    events = list(read_events(tell(tmp_path / "r1")))
    failed = [*events, ev.RunEnded(outcome="failed", status=1, reason="rank 0 gave up", chaos_unfired=("kill:rank=0@step=99",))]
    assert "no attempt was recorded" in render(fold([]), 80)
    assert "running" in render(fold(events), 80)
    assert "the launcher died" in render(fold(events, gone=True), 160)
    assert "failed: rank 0 gave up" in render(fold(failed), 80)
    assert "never fired: kill:rank=0@step=99" in render(fold(failed), 80)
    assert "in 2 lives" in render(fold([*events, *events]), 80)
    assert render(fold(events), 20)


def test_a_cause_cannot_take_over_the_terminal() -> None:
    """Control characters from a script's message are shown, not obeyed, and brackets are no markup."""
    story = [ev.AttemptStarted(world_size=1), ev.Failed(kind="exception", cause="\x1b[2J [bold]x[/bold] \udcff")]
    text = render(fold(story), 160)
    assert "\x1b" not in text
    assert "\\x1b[2J [bold]x[/bold] \\udcff" in text


def run_cli(
    command: str, *args: str, home: Path, env: dict[str, str] | None = None, check_import: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a sub-command as its own process, as the launcher's command line would."""
    code = "import sys\nfrom goodrun.elastic_runner.reading import SUBCOMMANDS\nstatus = SUBCOMMANDS[sys.argv[1]](sys.argv[2:])\n"
    code += "assert 'torch' not in sys.modules\n" if check_import else ""
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment |= {"GOODRUN_HOME": str(home), "TZ": "UTC", **(env or {})}
    return subprocess.run(
        [sys.executable, "-c", code + "sys.exit(status)", command, *args], capture_output=True, text=True, env=environment, timeout=60
    )


def test_json_is_the_fold(tmp_path: Path) -> None:
    """`--json` says exactly what the fold says, with each recovery's total, and importing torch is not needed for it."""
    run = tell(tmp_path / "runs" / "r1", end=ev.RunEnded(outcome="succeeded", step=41))
    done = run_cli("history", "r1", "--json", home=tmp_path, check_import=True)
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert told == json.loads(json.dumps(history_as_dict(fold(read_events(run)))))
    recovery = told["attempts"][3]["recovery"]
    assert recovery["total"] == pytest.approx(sum(v for k, v in recovery.items() if k not in ("total", "finished")))
    assert told["attempts"][3]["left_out"] == [0]


def test_piped_output_is_plain(tmp_path: Path) -> None:
    """Into a pipe go no colours, in an ASCII locale too; the newest run is the default."""
    tell(tmp_path / "runs" / "r1", end=ev.RunEnded(outcome="succeeded"))
    for env in ({}, {"PYTHONIOENCODING": "ascii"}):
        done = run_cli("history", home=tmp_path, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        assert "run r1" in done.stdout
    done = run_cli("runs", home=tmp_path)
    assert done.returncode == 0
    assert "r1" in done.stdout
    assert "2026-11-30 06:25" in done.stdout
    assert "\x1b" not in done.stdout
    listed = json.loads(run_cli("runs", "--json", home=tmp_path).stdout)
    assert [r["id"] for r in listed["runs"]] == ["r1"]
    assert listed["home"] == str(tmp_path / "runs")


def test_a_narrow_terminal_loses_nothing(tmp_path: Path) -> None:
    """On fewer columns than the table needs, its lines are left to the terminal to break, not cut."""
    tell(tmp_path / "runs" / "r1")
    assert (
        run_cli("history", home=tmp_path, env={"COLUMNS": "40"}).stdout == run_cli("history", home=tmp_path, env={"COLUMNS": "78"}).stdout
    )


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_on_a_terminal(tmp_path: Path, env: dict[str, str], coloured: bool) -> None:
    """A terminal gets colours, unless NO_COLOR asks for none."""
    tell(tmp_path / "runs" / "r1", end=ev.RunEnded(outcome="succeeded"))
    ours, theirs = os.openpty()
    code = "from goodrun.elastic_runner.reading import runs_main; runs_main([])"
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    environment |= {"GOODRUN_HOME": str(tmp_path), "TERM": "xterm-256color", **env}
    try:
        subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, timeout=60, check=True)
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "succeeded" in shown
    assert ("\x1b[32m" in shown) == coloured


def test_a_dead_launcher_is_noticed(tmp_path: Path) -> None:
    """A run whose launcher was killed does not go on 'running' for ever: history and list say that it died."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(60)
    (tmp_path / "runs" / "r1").mkdir(parents=True)
    journal = Journal(tmp_path / "runs" / "r1")
    journal.write(ev.RunStarted(run_id="r1", pid=child.pid))
    journal.write(ev.AttemptStarted(world_size=1, slots=(0,)))
    journal.close()
    told = json.loads(run_cli("history", "--json", home=tmp_path).stdout)
    assert (told["outcome"], told["attempts"][0]["cause"]) == ("died", "the launcher died")
    assert "died" in run_cli("runs", home=tmp_path).stdout


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    """A missing run and an unreadable record end with status 2 and one line on stderr, and nothing on stdout."""
    (tmp_path / "file").touch()
    for args in (["nosuch"], [], ["--json"]):
        done = run_cli("history", *args, home=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("goodrun history: ")
        assert done.stderr.count("\n") == 1
    assert run_cli("runs", home=tmp_path).stdout == f"no run in {tmp_path / 'runs'} yet\n"
    assert run_cli("runs", "--jso", home=tmp_path).returncode == 2


def test_an_unreadable_record_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A record that cannot be read is named with the system's reason; in the list it is 'unreadable'."""
    run = tell(tmp_path / "runs" / "r1")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(run / "events.jsonl"))

    monkeypatch.setenv("GOODRUN_HOME", str(tmp_path))
    monkeypatch.setattr("builtins.open", refuse)
    assert SUBCOMMANDS["history"](["r1"]) == 2
    assert capsys.readouterr().err == f"goodrun history: cannot read {run / 'events.jsonl'}: Permission denied\n"
    assert SUBCOMMANDS["runs"]([]) == 0
    assert "unreadable" in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """`goodrun history | head -1` is silent: a closed pipe is not worth a traceback."""
    for i in range(400):
        (tmp_path / "runs" / f"{i:03d}{'x' * 200}").mkdir(parents=True)
        (tmp_path / "runs" / f"{i:03d}{'x' * 200}" / "events.jsonl").touch()
    code = "import sys; from goodrun.elastic_runner.reading import runs_main; sys.exit(runs_main(['--json']))"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # with it, Python itself swallows the error
    env["GOODRUN_HOME"] = str(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(60) == 0
