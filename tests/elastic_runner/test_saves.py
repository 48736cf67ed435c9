"""What becomes of every snapshot is in the record, as the keeper tells it; the words on what a stopped job leaves are made of it."""

import dataclasses
from pathlib import Path

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.events import Notice, SaveEnded, Saving
from goodrun.elastic_runner.journal import Journal, read_events
from goodrun.elastic_runner.saves import Saves
from goodrun.progress import Page


@pytest.fixture
def pages():
    """Two ranks' pages, as they can be set."""
    page, _ = Page.create()
    blank = dataclasses.replace(page.read(), saved_step=5)
    yield lambda **words: {rank: dataclasses.replace(blank, **words) for rank in range(2)}
    page.close()


@pytest.fixture
def saves(tmp_path):
    """With all that was said."""
    journal, said = Journal(tmp_path), []
    made = Saves(journal, said.append, lambda text: journal.write(Notice(text=text)))
    yield made, said, lambda kind: [e for e in read_events(tmp_path) if isinstance(e, kind)]
    journal.close()


@pytest.mark.parametrize(("how", "left_out"), [("skip", "skipped"), ("replace", "replaced")])
def test_every_snapshot_has_an_end_in_the_record(job, how, left_out):
    """Storage slower than the cadence: how far each write is, which snapshots were left out, and which checkpoint is where."""
    j = job("--nproc-per-node", 2, "--keeper-bandwidth", "0.004", "train.py", 60, env={"TEST_WHEN_BUSY": how}).ok()
    ended = j.events(SaveEnded)
    assert sorted(e.step for e in ended) == list(range(5, 65, 5))
    assert {e.fate for e in ended} == {"durable", left_out}
    durable = [e for e in ended if e.fate == "durable"]
    assert all(e.seconds > 0 for e in durable) and all(Path(e.path).is_dir() for e in durable[-2:])
    assert how == "skip" or (ended[-1].step, ended[-1].fate) == (60, "durable")
    under_way = j.events(Saving)
    assert all(0 <= e.done <= e.total > 0 for e in under_way)
    assert {e.step for e in under_way} <= {e.step for e in durable} and under_way


@pytest.mark.parametrize(("seconds", "status"), [(1.8, 0), (60, 1)])
def test_storage_that_fails_under_the_last_save(job, seconds, status):
    """The ranks give up on it, and the next attempt finds it in memory with nothing left to train: it is written all the same, or told."""
    j = job("--nproc-per-node", 2, "--chaos", f"eio:for={seconds}s@step=17", "train.py", 20)
    assert j.wait(100) == status
    newest = next(f for f in found_in(j.where / "checkpoints") if not f.fault)
    assert newest.step == (15 if status else 20)
    assert ("its last checkpoint is not in storage: step 20 was not saved" in j.err) == bool(status)


def test_what_the_keeper_tells_becomes_events(saves):
    """Each thing told is one event; what went wrong is a remark, too."""
    told, _, events = saves
    told.hear({"op": "writing", "step": 5, "done": 3, "total": 9})
    told.hear({"op": "trouble", "step": 5, "why": "503"})
    told.hear({"op": "durable", "step": 5, "seconds": 1.5, "path": "p"})
    told.hear({"op": "failed", "step": 6, "why": "newer", "replaced": True})
    told.hear({"op": "failed", "step": 7, "why": "gone", "kept": True})
    told.hear({"op": "failed", "step": 8, "why": "full"})
    told.hear({"op": "skipped", "step": 9})
    told.hear({"op": "of a newer keeper"})
    assert [(e.step, e.done, e.total, e.trouble) for e in events(Saving)] == [(5, 3, 9, ""), (5, 0, 0, "503")]
    fates = [(5, "durable"), (6, "replaced"), (7, "kept"), (8, "failed"), (9, "skipped")]
    assert [(e.step, e.fate) for e in events(SaveEnded)] == fates
    assert [e.text for e in events(Notice)] == ["503", "gone", "full"]
    assert (told.durable, told.made, told.lost) == (5, 1, "full")
    told.hear({"op": "failed", "step": 12, "why": "of an older attempt", "fenced": True})
    told.hear({"op": "durable", "step": 8})
    assert told.lost == ""


@pytest.mark.parametrize(
    ("durable_later", "after", "words"),
    [
        (None, {}, "no checkpoint was made on the way out: the next run goes on from step 5"),
        (10, {}, "step 10 was saved on the way out"),
        (None, {"left_step": 12}, "step 12 was saved on the way out"),
        (None, {"restored_step": 7}, "no checkpoint was made on the way out: the next run goes on from step 7"),
    ],
)
def test_what_a_stopped_job_leaves(saves, pages, durable_later, after, words):
    """Ranks that sleep or are gone know nothing of what the keeper finished; the words count it all the same."""
    told, said, _ = saves
    told.hear({"op": "durable", "step": 5})
    told.stopped(pages(), pages(**after))
    if durable_later:
        told.hear({"op": "durable", "step": durable_later})
    told.last_words()
    told.last_words()
    assert said == [words]


def test_a_job_that_keeps_no_checkpoints_leaves_no_words(saves, pages):
    """Nothing is said of checkpoints where there are none."""
    told, said, _ = saves
    told.stopped(pages(saved_step=-1), pages(saved_step=-1))
    told.last_words()
    assert said == []
