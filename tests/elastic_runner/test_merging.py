"""What the nodes of a job wrote becomes one record, the same from whichever node it is read."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.goodput.account import account
from goodrun.elastic_runner.history import fold
from goodrun.elastic_runner.merging import PeerStarted, merged, others, own_parts
from goodrun.elastic_runner.nodes.gossip import Gossip
from goodrun.elastic_runner.nodes.tale import Line, Reader, Tale
from goodrun.elastic_runner.story import told_as_one

NOON = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)


class Clock:
    """A node's two clocks, both wrong: the true second `at` as they tell it."""

    def __init__(self, boot, skew):
        self.boot, self.skew = boot, skew

    def stamped(self, event, at, node, attempt):
        t = round(at + self.boot, 6)
        return replace(event, t=t, wall=(NOON + timedelta(seconds=at + self.skew)).isoformat(), node=node, attempt=attempt)


def agent(i):
    return f"host{i}:1:{i}"


def told(i, clock, leader, rounds, remarks):
    """What agent `i` wrote in `rounds` (generation, true second, who was in it), with `remarks` (true second, words)."""
    written, attempt = [], -1
    mine = [r for r in rounds if i in r[2]]
    began = mine[0][1] - 0.5 if mine[0] is not rounds[0] else 0.0
    whole = [(began, ev.RunStarted(run_id=f"run{i}", slots=(0,)))]
    for generation, at, who in mine:
        nodes = tuple(map(agent, who))
        behind = leader.skew - clock.skew
        whole.append((at, ev.RoundFormed(generation=generation, nodes=nodes, node_rank=who.index(i), clock_behind_s=behind)))
        whole.append((at + 0.01, ev.AttemptStarted(world_size=len(who), slots=(0,), attempt=generation)))
    whole += [(at, ev.Notice(text=words)) for at, words in remarks if at > began]
    for at, event in sorted(whole, key=lambda x: x[0]):
        attempt = event.attempt if isinstance(event, ev.AttemptStarted) else attempt
        written.append((at, clock.stamped(event, at, f"host{i}", attempt)))
    return written


clocks = st.builds(Clock, st.floats(10, 1e6), st.floats(-3600, 3600))


@given(st.lists(clocks, min_size=3, max_size=3), st.integers(0, 2), st.data())
def test_the_order_is_that_in_which_it_happened(every, leader, data):
    """Whatever the nodes' clocks say, from whichever node one reads, and whoever came later or left: true order, times on one clock."""
    sets = [data.draw(st.sampled_from([(0, 1, 2), (0, 1), (1, 2)])) for _ in range(3)]
    rounds = [(g, 10.0 * g + 1, who) for g, who in enumerate(sets)]
    present = [i for i in range(3) if any(i in who for _, _, who in rounds)]
    moments = data.draw(st.lists(st.integers(0, 29), min_size=len(present) * 3, max_size=len(present) * 3))
    remarks = {i: sorted((m + 0.1 + 0.01 * i, f"{i} at {m}") for m in moments[3 * k : 3 * k + 3]) for k, i in enumerate(present)}
    truth = {i: told(i, every[i], every[leader], rounds, remarks[i]) for i in present}
    reader = data.draw(st.sampled_from(present))
    own = own_parts(e for _, e in truth[reader])
    rest = others((agent(i), n, e) for i in present if i != reader for n, (_, e) in enumerate(truth[i]))
    whole = merged([*own, *rest])
    assert len(whole) == sum(map(len, truth.values()))
    at = {(e.node, type(e), getattr(e, "text", ""), e.attempt): second for i in present for second, e in truth[i]}
    seconds = [at[e.node, ev.RunStarted if isinstance(e, PeerStarted) else type(e), getattr(e, "text", ""), e.attempt] for e in whole[1:]]
    here = every[reader].boot
    assert all(abs(e.t - here - second) < 1e-3 for e, second in zip(whole[1:], seconds, strict=True))
    for generation in {e.attempt for e in whole[1:]} - {-1}:
        mine = [second for e, second in zip(whole[1:], seconds, strict=True) if e.attempt == generation and not _formed(e)]
        assert all(a <= b + 1e-3 for a, b in pairwise(mine))
    assert account(whole).nodes == len(present)


def _formed(e):
    """It is told under the generation that it ends."""
    return isinstance(e, ev.RoundFormed | PeerStarted)


def test_two_agents_on_one_host_at_a_time_are_two_nodes():
    """And one that was started there after the other had ended is the same node again."""
    clock = Clock(100.0, 0.0)
    first = told(0, clock, clock, [(0, 1.0, (0, 1))], [(5.0, "last words")])
    second = told(1, clock, clock, [(0, 1.0, (0, 1)), (1, 8.0, (1, 2))], [(20.0, "words")])
    third = told(2, clock, clock, [(0, 1.0, (0, 1)), (1, 8.0, (1, 2))], [(20.0, "words")])
    lines = [(agent(i), n, replace(e, node="host")) for i, part in ((1, second), (2, third)) for n, (_, e) in enumerate(part)]
    whole = merged([*own_parts(replace(e, node="host") for _, e in first), *others(lines)])
    assert {e.node for e in whole} == {"host", "host#2"}


def test_a_record_without_others_is_as_it_was():
    """A run on one node, its lives on two hosts: the merge is no second truth."""
    lives = [ev.RunStarted(t=5.0, node="a"), ev.Notice(t=6.0, node="a"), ev.RunStarted(t=1.0, node="b"), ev.Notice(t=2.0, node="b")]
    assert fold(told_as_one(lives)) == fold(lives)
    assert fold(lives).lives == 2


def failure(i, at, clock, kind, cause):
    return clock.stamped(ev.Failed(kind=kind, rank=i, cause=cause, fault_t=at + clock.boot, step=7), at + 0.1, f"host{i}", 0)


def test_the_story_names_what_happened_on_another_node():
    """A rank of node 1 died, and node 0 lost its connection to it: the history of either says so, and counts one restart."""
    clock = [Clock(1000.0, 3.0), Clock(50.0, -40.0)]
    rounds = [(0, 1.0, (0, 1)), (1, 12.0, (0, 1))]
    parts = [[e for _, e in told(i, clock[i], clock[0], rounds, [])] for i in (0, 1)]
    parts[0].insert(3, failure(0, 9.0, clock[0], "connection", "rank 0 lost its peer"))
    parts[1].insert(3, failure(1, 10.0, clock[1], "signal", "rank 1 was killed"))
    parts[1].insert(4, clock[1].stamped(ev.Decided(action="restart", slots=(0,), reason="it is the first"), 10.2, "host1", 0))
    for i in (0, 1):
        whole = merged([*own_parts(parts[i]), *others((agent(1 - i), n, e) for n, e in enumerate(parts[1 - i]))])
        history = fold(told_as_one(whole))
        first = history.attempts[0]
        assert (first.kind, first.cause, first.world_size) == ("signal", "rank 1 was killed on host1", 2)
        assert (history.lives, history.restarts, history.run_id) == (1, 1, f"run{i}")
        assert history.attempts[0].reason == "it is the first"
        assert abs(history.attempts[1].recovery.total - 2.01) < 0.01


def test_the_story_has_the_reason_that_all_nodes_agreed_on():
    """Node 0 only knew that it heard nobody; why there was a new round, the new leader knew."""
    clock = Clock(1000.0, 3.0)
    parts = [[e for _, e in told(i, clock, clock, [(0, 1.0, (0, 1, 2)), (1, 12.0, (0, 1))], [])] for i in (0, 1)]
    parts[0].insert(3, clock.stamped(ev.Decided(action="restart", reason="no word from a majority"), 10.0, "host0", 0))
    for part in parts:
        part[-2] = replace(part[-2], reason="host2 was lost")
    history = fold(told_as_one(merged([*own_parts(parts[0]), *others((agent(1), n, e) for n, e in enumerate(parts[1]))])))
    assert [a.cause for a in history.attempts] == ["host2 was lost", "running"]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=700), st.integers(0, 40))
def test_a_reader_is_told_all_it_lacks_in_order(written, had):
    """In frames of any size; of long stretches of progress every second line may be missing, and nothing else."""
    tale, lines = Tale(), [Line(f"a{i}", n, f'{{"n": {n}}}', progress) for n, (i, progress) in enumerate(written)]
    assert all(tale.add(line) for line in lines)
    assert not any(tale.add(line) for line in lines)
    reader, got = Reader(had={"a0": had}), []
    while tale.is_news_for(reader):
        got += tale.tell(reader, 30)
    wanted = [x for x in lines if x.agent != "a0" or x.n > had]
    assert [x for x in got if not x.progress] == [x for x in wanted if not x.progress]
    assert set(got) <= set(wanted)
    assert [x.n for x in got] == sorted(x.n for x in got)
    for a in ("a0", "a1", "a2"):
        progress = [x for x in wanted if x.agent == a and x.progress]
        assert sum(x.agent == a and x.progress for x in got) >= min(len(progress), 128)
        assert not progress or progress[-1] in got
    tale.add(Line("a9", 0, "{}"))
    assert [x.agent for x in tale.tell(reader, 30)] == ["a9"]


class Pipe:
    """What stands for a link: what is said to it is heard at its other end at once."""

    def __init__(self, number, there):
        self.number, self.there, self.said = number, there, 0
        self.connection = self
        self.waits_to_write = False

    def say(self, message):
        self.said += 1
        assert self.there[0].got(self.there[1](), message)


def joined(a, b, number):
    """Two agents with a link between them: (a's end, b's end)."""
    ends = []
    ends.append(Pipe(number, (b, lambda: ends[1])))
    ends.append(Pipe(number, (a, lambda: ends[0])))
    return ends


def test_a_new_leader_and_a_late_node_are_told_what_was():
    """Leader 0 told node 1 what node 2 wrote; 0 is lost, and 3, which comes late, hears of 0 and 2 from leader 1. Nothing is echoed."""
    every = [Gossip() for _ in range(4)]
    kept = [[] for _ in every]
    for g, k in zip(every, kept, strict=True):
        g.keep = k.extend
    to1, at1 = joined(every[0], every[1], 1)
    to2, at2 = joined(every[0], every[2], 2)
    every[1].greet(at1)
    every[2].greet(at2)
    for i in (0, 2):
        every[i].own([Line(f"a{i}", n, "{}") for n in range(3)])
    for g, links in ((every[2], {2: at2}), (every[0], {1: to1, 2: to2}), (every[1], {1: at1})):
        g.pump(links)
    assert [x.agent for x in kept[1]] == ["a0"] * 3 + ["a2"] * 3
    assert [x.agent for x in kept[2]] == ["a0"] * 3
    assert kept[0] == [Line("a2", n, "{}") for n in range(3)]
    to3, at3 = joined(every[1], every[3], 3)
    every[3].greet(at3)
    every[1].pump({3: to3})
    assert kept[3] == kept[1]
    before = to3.said
    every[1].pump({3: to3})
    every[3].pump({3: at3})
    assert to3.said == before
