"""The report is one page that needs nothing else, tells the whole story, and cannot be broken by what a run says."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.journal import FILE_NAME
from goodrun.elastic_runner.reading import report_main
from goodrun.elastic_runner.report.command import report


def at(t: float, event: ev.Event, attempt: int = 0, node: str = "n1") -> ev.Event:
    """The event as the journal would have stamped it."""
    return dataclasses.replace(event, t=t, wall=f"2026-11-30T06:{int(t) // 60 % 60:02}:{t % 60:06.3f}+00:00", node=node, attempt=attempt)


def story(cause: str = "rank 1 lost its slot", node: str = "n1") -> list[ev.Event]:
    """Four slots, one of them lost at 30 s; the others starve for data."""
    slots, left = (0, 1, 2, 3), (0, 2, 3)
    marks = ev.FirstStep(step=16, boot_t=34, torch_t=36, init_t=37, restore_begin_t=37.5, restore_end_t=38, first_step_t=40)
    told = [
        at(0, ev.RunStarted(run_id="r1", script="jobs/train.py", argv=("train.py", "--lr", "1"), slots=slots, torch="2.13"), -1),
        at(1, ev.AttemptStarted(world_size=4, slots=slots)),
        at(10, ev.FirstStep(step=1, first_step_t=10)),
        at(30, ev.RankProgress(steps=(20,) * 4, step_t=30, durable_step=15)),
        at(31, ev.Failed(kind="slot-lost", rank=1, slot=1, step=20, best_step=20, cause=cause, message=cause, fault_t=30.5)),
        at(31, ev.Decided(action="restart without", slots=left, reason="slot 1 is lost")),
        at(32, ev.Stopped(seconds=1)),
        at(33, ev.AttemptStarted(world_size=3, slots=left), 1),
        at(40, ev.Restored(step=15), 1),
        at(40, marks, 1),
        at(80, ev.RankProgress(steps=(56,) * 3, data_wait_s=(20.0,) * 3, step_t=80, durable_step=50), 1),
        at(81, ev.DataStarved(rank=2, text="rank 2 waits for data 50 % of the time: num_workers=1 would keep up"), 1),
        at(90, ev.RunEnded(outcome="succeeded", step=56), 1),
    ]
    return [dataclasses.replace(e, node=node) for e in told]


class Page(HTMLParser):
    """Which elements a page has, and whether each was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else() -> None:
    """No script, no link, no address that a browser would fetch; every element is closed, every picture is valid XML."""
    text = report(story())
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert {value for name, value in page.attributes if name in ("src", "href")} == set()
    assert "url(" not in text and "@import" not in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 3
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert "prefers-color-scheme:dark" in text and "@media print" in text


def test_the_page_tells_the_story() -> None:
    """Figures, slots coloured by what they did, faults and checkpoints, attempts, recoveries, environment, and the right cause first."""
    text = report(story())
    for words in (
        *(
            "succeeded at step 56, 1 restart",
            "of the capacity asked for",
            "step 50 durable",
            "rank 1 lost its slot",
            "restart without slot 1",
        ),
        *("slot 3", "to #1", "restore: 0.50 s", "train.py --lr 1", "2.13", "productive", "idle capacity", "redone work"),
    ):
        assert words in text, words
    first = re.search(r"What to improve next</h2><ol><li>(.*?)</li>", text)
    assert first is not None and "data wait" in first[1] and "num_workers=1 would keep up" in first[1]


def test_what_a_run_says_cannot_break_the_page() -> None:
    """Markup in a cause, a command line or a node's name is shown as it is, and is no markup."""
    hostile = "</p><script>alert(1)</script>\"'&<b>"
    text = report(story(cause=hostile, node=hostile))
    page = Page(text)
    assert "script" not in page.seen and "b" in page.seen
    assert page.open == []
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("n", range(14))
def test_a_run_cut_off_anywhere_has_a_page(n: int) -> None:
    """From no event at all to the last one: there is always a page."""
    assert Page(report(story()[:n])).open == []


def test_two_nodes_have_two_pictures() -> None:
    """Each node's slots are drawn by its own clock, under its name."""
    text = report([*story(node="left"), *story(node="right")])
    assert text.count("what 4 slots did") == 2 and ">left<" in text and ">right<" in text


def test_the_loss_is_drawn_where_the_script_gives_one() -> None:
    """A curve over the run; none where nothing is known, and a flat one is no trouble."""
    assert "<h2>Loss</h2>" not in report(story())
    for values in ((2.5, 1.5), (2.0, 2.0), (0.0, 0.0)):
        told = [dataclasses.replace(e, loss=values[e.t > 40]) if isinstance(e, ev.RankProgress) else e for e in story()]
        text = report(told)
        assert "<h2>Loss</h2>" in text and "the loss over the run" in text


def test_a_long_run_stays_a_small_page() -> None:
    """A thousand faults and sixty-four slots make a page of less than a megabyte."""
    told, t, slots = [at(0, ev.RunStarted(slots=tuple(range(64))), -1)], 1.0, tuple(range(64))
    for attempt in range(1000):
        told += [at(t, ev.AttemptStarted(slots=slots), attempt), at(t + 5, ev.FirstStep(step=attempt * 10), attempt)]
        told += [at(t + i, ev.RankProgress(steps=(attempt * 10 + i,) * 64, step_t=t + i), attempt) for i in range(6, 60, 6)]
        told.append(at(t + 62, ev.Failed(step=attempt * 10 + 50, fault_t=t + 61), attempt))
        t += 65
    told = [dataclasses.replace(e, loss=e.t**-0.5) if isinstance(e, ev.RankProgress) else e for e in told]
    assert len(report(told)) < 1_000_000


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`goodrun report RUN -o FILE` writes it and says where; a run that is not there is said so."""
    (tmp_path / FILE_NAME).write_text("".join(json.dumps({"event": e.name, **dataclasses.asdict(e)}) + "\n" for e in story()))
    assert report_main([str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert "r.html" in capsys.readouterr().out
    assert report_main([str(tmp_path / "none")]) == 2
