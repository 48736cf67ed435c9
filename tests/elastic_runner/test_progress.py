"""The page by which a rank tells how far it is: what is written is read, and only the rank itself writes."""

import mmap
import os
import time

import pytest

from goodrun import progress
from goodrun.progress import Mark, Page, Phase


@pytest.fixture
def page():
    made, fd = Page.create()
    os.close(fd)
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that the test moves, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic_ns", lambda: int(now[0] * 1e9))
    return now


@pytest.fixture
def attached(monkeypatch):
    """A page that this process has attached to, as a worker does, seen from the supervisor's mapping."""
    mine, fd = Page.create()
    monkeypatch.setattr(progress, "_page", None)
    progress.attach(os.dup(fd))
    os.close(fd)
    yield mine
    progress.page().close()
    mine.close()


def test_a_fresh_page_says_nothing(page):
    """Before the first beat: no time, no step, no mark, no text."""
    p = page.read()
    assert (p.seq, p.t, p.step, p.phase, p.steps_done) == (0, 0.0, -1, Phase.START, 0)
    assert (p.restored_step, p.saved_step, p.durable_step) == (-1, -1, -1)
    assert p.marks == (0.0,) * len(Mark)
    assert p.restored_from == ""


def test_what_is_written_is_read(page, clock):
    """Every word comes back as it was written, in seconds where it is a time."""
    for _ in range(2):
        begun = page.fetch_begins()
        clock[0] += 0.25
        page.fetch_ends(begun)
    page.beat(phase=Phase.DATA)
    page.save_stalled(10_000_000)
    page.saved(40)
    page.durable(30)
    page.batch_sizes(per_rank=8)
    page.batch_sizes(whole=32)
    page.chaos_fires(0)
    page.chaos_fires(62)
    page.restored(20, "/checkpoints/step-20")
    page.mark(Mark.TORCH)
    assert page.read().loss is None
    page.loss(3, 2.25)
    page.loss(4, float("nan"))
    p = page.read()
    assert (p.finite_step, p.bad_step, p.loss) == (3, 4, 2.25)
    assert (p.seq, p.t, p.phase, p.phase_t) == (5, 1000.5, Phase.DATA, 1000.5)
    assert (p.data_wait_s, p.save_stall_s) == (0.5, 0.01)
    assert (p.saved_step, p.durable_step, p.restored_step, p.step) == (40, 30, 20, 20)
    assert (p.batch, p.global_batch) == (8, 32)
    assert p.chaos_fired == 1 | 1 << 62
    assert p.restored_from == "/checkpoints/step-20"
    assert p.marks[Mark.TORCH] == 1000.5


def test_words_do_not_overlap():
    """No two words share a place, and all lie before the text."""
    places = [*(at for name, at in vars(progress._Word).items() if name.isupper()), *(progress._Word.MARKS + m for m in Mark if m)]
    assert len(set(places)) == len(places)
    assert (max(places) + 1) * 8 <= progress._TEXT_OFFSET
    assert progress._TEXT_OFFSET + progress._TEXT_BYTES == progress.PAGE_BYTES


@pytest.mark.parametrize("source", ["", "/c/ä", "x" * 511, "/long/" + "d" * 600 + "/step-7", "ä" * 400])
def test_a_long_source_keeps_its_end(page, source):
    """A path that does not fit loses its beginning, never the step at its end, and never touches what is beside it."""
    page.beat(step=3)
    page.restored(7, source)
    p = page.read()
    assert source.endswith(p.restored_from.lstrip("�"))
    assert len(p.restored_from) >= min(len(source), 255)
    assert p.seq == 1
    page.restored(8, "short")
    assert page.read().restored_from == "short"


def test_steps_are_counted_and_the_longest_is_kept(page, clock):
    """Optimizer steps number themselves from 1; the longest of all but the first is what limits are learned from."""
    for seconds in (60.0, 0.5, 2.0, 1.0):  # the first one carries compilation and warm-up
        clock[0] += seconds
        page.optimizer_stepped()
    p = page.read()
    assert (p.step, p.steps_done, p.seq, p.phase) == (4, 4, 4, Phase.STEP)
    assert p.longest_step_s == 2.0
    assert p.last_step_s == 1.0
    assert p.step_t == p.t == clock[0]


def test_the_first_step_teaches_nothing(page, clock):
    """After one step there is still no length of a step, but the mark of the first is stamped, once."""
    clock[0] += 60
    page.optimizer_stepped()
    assert (page.read().longest_step_s, page.read().last_step_s) == (0.0, 0.0)
    clock[0] += 1
    page.optimizer_stepped()
    assert page.read().marks[Mark.FIRST_STEP] == 1060.0


def test_a_script_that_numbers_its_steps_is_believed(page, clock):
    """After `beat(step=…)` optimizer steps no longer count: two optimizers, or accumulation, do not disturb the number."""
    page.optimizer_stepped()
    page.beat(step=100)
    for _ in range(2):
        clock[0] += 1
        page.optimizer_stepped()
    p = page.read()
    assert (p.step, p.steps_done, p.t, p.seq) == (100, 2, 1002.0, 4)
    page.beat(step=101)
    assert (page.read().step, page.read().steps_done, page.read().last_step_s) == (101, 3, 2.0)


def test_the_same_step_again_is_only_a_beat(page, clock):
    """Repeating a number says "alive", it does not finish a step."""
    page.beat(step=5)
    clock[0] += 9
    page.beat(step=5)
    p = page.read()
    assert (p.steps_done, p.seq, p.t, p.step_t) == (1, 2, 1009.0, 1000.0)


def test_counting_goes_on_after_a_restore(page):
    """Steps are numbered over the whole job: after restoring step 40 the next one is 41, and the first of this attempt."""
    page.restored(40, "/c")
    page.optimizer_stepped()
    p = page.read()
    assert (p.step, p.steps_done, p.longest_step_s) == (41, 1, 0.0)


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.RESTORE])
def test_optimizer_steps_inside_a_checkpoint_do_not_count(page, phase):
    """torch steps a fresh optimizer once to give it a state: that is no step of the script's, and not even a beat."""
    page.beat(phase=phase)
    page.optimizer_stepped()
    p = page.read()
    assert (p.step, p.steps_done, p.seq, p.phase) == (-1, 0, 1, phase)


def test_a_step_ends_an_announced_phase(page):
    """A script that forgot to take back `eval` is held to the step's limit again once it steps."""
    page.beat(phase=Phase.EVAL)
    page.optimizer_stepped()
    assert page.read().phase is Phase.STEP


def test_what_hangs_on_steps_is_called_once_for_each(page):
    """`after_step` is called with the step's number for every step finished, and for nothing else."""
    seen = []
    page.after_step = seen.append
    page.beat()
    page.beat(phase=Phase.DATA)
    page.optimizer_stepped()
    page.beat(step=7)
    page.beat(step=7)
    page.optimizer_stepped()
    assert seen == [1, 7]


def test_a_mark_is_stamped_once(page, clock):
    """Only the first time counts."""
    page.mark(Mark.INIT_BEGIN)
    clock[0] += 5
    page.mark(Mark.INIT_BEGIN)
    assert page.read().marks[Mark.INIT_BEGIN] == 1000.0


def test_no_page_no_beat(monkeypatch):
    """Under plain python or torchrun every call of a script's is a no-op."""
    monkeypatch.setattr(progress, "_page", None)
    progress.heartbeat()
    progress.heartbeat(step=3, phase="eval")
    with progress.in_phase(Phase.SAVE):
        pass
    assert progress.page() is None


def test_heartbeats_reach_the_supervisor(attached):
    """What the rank beats through its own mapping is read through the supervisor's; a phase may be named."""
    progress.heartbeat(step=3, phase="eval")
    p = attached.read()
    assert (p.step, p.phase, p.seq) == (3, Phase.EVAL, 1)


def test_an_unknown_phase_is_an_error_at_the_call(attached):
    """A misspelt phase is told to the script's author, and writes nothing."""
    with pytest.raises(KeyError, match="EVALUATE"):
        progress.heartbeat(phase="evaluate")
    assert attached.read().seq == 0


def test_the_phase_before_comes_back(attached):
    """Also where the block raises, and where phases are nested."""
    with pytest.raises(ValueError), progress.in_phase(Phase.EVAL):
        with progress.in_phase(Phase.SAVE):
            assert attached.read().phase is Phase.SAVE
        assert attached.read().phase is Phase.EVAL
        raise ValueError
    assert attached.read().phase is Phase.START


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child does nothing that needs another thread
def test_a_forked_child_has_no_page(attached):
    """A data loader's worker, or any other fork, beats for nobody: the rank may hang while its child lives."""
    progress.heartbeat(step=1)
    pid = os.fork()
    if pid == 0:
        progress.heartbeat(step=99)
        with progress.in_phase(Phase.SAVE):
            pass
        os._exit(0 if progress.page() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert (attached.read().step, attached.read().seq, attached.read().phase) == (1, 1, Phase.STEP)


def test_pages_leave_nothing_behind():
    """No name in /dev/shm, and no descriptor once closed."""
    before = (set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd")))
    made, fd = Page.create()
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_size == progress.PAGE_BYTES <= mmap.PAGESIZE
    assert set(os.listdir("/dev/shm")) == before[0]
    os.close(fd)
    made.close()
    assert (set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))) == before


def test_beats_are_cheap_enough_to_count(page):
    """Ten thousand beats and steps in a row all count, and the clock they carry is the one the supervisor reads."""
    before = time.monotonic()
    for _ in range(10_000):
        page.beat()
        page.optimizer_stepped()
    p = page.read()
    assert (p.seq, p.steps_done) == (20_000, 10_000)
    assert before <= p.t <= time.monotonic()
