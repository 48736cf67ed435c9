"""A chaos plan says what it means, or one sentence why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from goodrun.fault_injection import (
    KINDS,
    STORAGE_KINDS,
    ChaosError,
    Fault,
    check_plan,
    due,
    for_keeper,
    for_rank,
    from_env,
    parse_plan,
    remaining,
    to_env,
)
from goodrun.fault_injection.telling import kinds_told, plan_told


def one(text: str) -> Fault:
    """The only entry of a plan."""
    [fault] = parse_plan(text)
    return fault


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill:rank=1@step=20", Fault(index=0, kind="kill", rank=1, at_step=20, text="kill:rank=1@step=20")),
        ("hang:rank=2@40s", Fault(index=0, kind="hang", rank=2, at_s=40.0, text="hang:rank=2@40s")),
        ("hang:rank=2@1.5s", Fault(index=0, kind="hang", rank=2, at_s=1.5, text="hang:rank=2@1.5s")),
        ("hang:rank=2@500ms", Fault(index=0, kind="hang", rank=2, at_s=0.5, text="hang:rank=2@500ms")),
        ("hang:rank=2@2m", Fault(index=0, kind="hang", rank=2, at_s=120.0, text="hang:rank=2@2m")),
        ("raise:rank=0@step=0", Fault(index=0, kind="raise", rank=0, at_step=0, text="raise:rank=0@step=0")),
        ("exit:rank=0@step=5", Fault(index=0, kind="exit", rank=0, at_step=5, code=1, text="exit:rank=0@step=5")),
        ("exit:rank=0,code=3@5s", Fault(index=0, kind="exit", rank=0, at_s=5.0, code=3, text="exit:rank=0,code=3@5s")),
        ("exit:code=0,rank=1@step=5", Fault(index=0, kind="exit", rank=1, at_step=5, code=0, text="exit:code=0,rank=1@step=5")),
        ("slot-lost:slot=3@step=60", Fault(index=0, kind="slot-lost", slot=3, at_step=60, text="slot-lost:slot=3@step=60")),
        ("slot-lost:rank=3@60s", Fault(index=0, kind="slot-lost", rank=3, at_s=60.0, text="slot-lost:rank=3@60s")),
        ("enospc:for=2s@step=20", Fault(index=0, kind="enospc", at_step=20, for_s=2.0, text="enospc:for=2s@step=20")),
        ("keeper-kill@5s", Fault(index=0, kind="keeper-kill", at_s=5.0, text="keeper-kill@5s")),
        ("clock-jump:by=-2h@5s", Fault(index=0, kind="clock-jump", at_s=5.0, by_s=-7200.0, text="clock-jump:by=-2h@5s")),
        ("preempt:grace=500ms@5s", Fault(index=0, kind="preempt", at_s=5.0, grace_s=0.5, text="preempt:grace=500ms@5s")),
        (
            "kill:rank=1@phase=save,step=30,attempt=2",
            Fault(
                index=0,
                kind="kill",
                rank=1,
                at_phase="save",
                at_step=30,
                from_attempt=2,
                text="kill:rank=1@phase=save,step=30,attempt=2",
            ),
        ),
        (" kill : rank = 1 @ step = 20 ; ", Fault(index=0, kind="kill", rank=1, at_step=20, text="kill : rank = 1 @ step = 20")),
    ],
)
def test_an_entry_is_read(text: str, expected: Fault) -> None:
    """Every form of the grammar, blanks wherever a person puts them."""
    assert one(text) == expected


def test_entries_are_numbered_in_the_order_written_and_may_repeat() -> None:
    """The index is what the record knows an entry by, so equal entries stay two."""
    plan = parse_plan("kill:rank=1@step=20; kill:rank=1@step=20;hang:rank=0@1s;")
    assert [(f.index, f.kind) for f in plan] == [(0, "kill"), (1, "kill"), (2, "hang")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no entries"),
        (" ; ", "has no entries"),
        ("explode:rank=1@step=2", "'explode'; known are kill, segv, abort, hang, "),
        ("kill", "does not say when"),
        ("kill:rank=1", "does not say when"),
        ("kill:rank=1@", "does not say when"),
        ("kill@step=1", "does not say who"),
        ("slot-lost:@step=1", "either rank=R or slot=S"),
        ("slot-lost:rank=1,slot=1@step=1", "either rank=R or slot=S"),
        ("kill:rank=x@step=1", "rank=x"),
        ("kill:rank=-1@step=1", "rank=-1"),
        ("kill:rank=1.5@step=1", "rank=1.5"),
        ("kill:rank=²@step=1", "rank=²"),
        ("kill:rank=1@step=soon", "step=soon"),
        ("kill:rank=1@step=", "step="),
        ("kill:rank=1@40", "'40', which is no time"),
        ("kill:rank=1@40d", "'40d'"),
        ("kill:rank=1@epoch=3", "unknown moment 'epoch=3'"),
        ("kill:rank=1,rank=2@step=1", "rank twice"),
        ("kill:slot=1@step=1", "unknown key 'slot'; kill takes rank"),
        ("kill:rank=1,code=2@step=1", "unknown key 'code'"),
        ("exit:rank=1,code=256@step=1", "256"),
        ("kill:rank=1@phase=lunch", "the phase 'lunch'; there are start, save, restore"),
        ("kill:rank=1@phase=start,step=3", "a step in a phase that has none"),
        ("kill:rank=1@attempt=2", "needs one moment"),
        ("kill:rank=1@step=1,3s", "needs one moment"),
        ("kill:rank=1@step=1,step=2", "two moments of one sort"),
        ("net-delay:rank=1,ms=500@step=1", "ms=500; net-delay takes 1 to 190"),
        ("net-delay:rank=1,ms=0@step=1", "ms=0"),
        ("eio@phase=restore", "nothing is written"),
        ("eio:rank=1@step=2", "eio takes for"),
        ("bit-flip:for=2s@step=2", "bit-flip takes no target"),
        ("preempt:grace=-1s@2s", "grace=-1s"),
        ("random:seed=1", "mtbf="),
        ("random:mtbf=0,seed=1", "mtbf=0"),
        ("random:mtbf=3s,of=explode", "unknown kind 'explode'"),
        ("random:mtbf=3s,often=1", "unknown key 'often'"),
        ("nowhere/plan.yaml", "No such file"),
        (";".join(["kill:rank=0@step=1"] * 64), "64 entries and at most 63"),
    ],
)
def test_a_bad_plan_is_refused_in_one_sentence(text: str, says: str) -> None:
    """The message names the value and a way out, on one line."""
    with pytest.raises(ChaosError) as caught:
        parse_plan(text)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message and message.endswith(".")


def test_63_entries_are_possible() -> None:
    """As many as a page has bits for."""
    assert len(parse_plan(";".join(["kill:rank=0@step=1"] * 63))) == 63


def test_a_yaml_file_holds_texts_or_mappings(tmp_path: Path) -> None:
    """Both spellings give the same entries as the text does."""
    path = tmp_path / "plan.yml"
    path.write_text(
        "- kill:rank=1@step=20\n- {hang: {rank: 2, at: 40s}}\n- exit: {rank: 0, code: 3, step: 50}\n- slot-lost: {slot: 3, step: 60}\n"
    )
    assert parse_plan(str(path)) == parse_plan("kill:rank=1@step=20; hang:rank=2@40s; exit:rank=0,code=3@step=50; slot-lost:slot=3@step=60")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("kill: {rank: 1}", "holds no list"),
        ("- [kill, 1]", "['kill', 1]"),
        ("- {kill: 3}", "{'kill': 3}"),
        ("- {kill: {rank: 1, step: 2}, hang: {rank: 1, step: 2}}", "write 'kill:rank=1@step=20'"),
        ("- {kill: {rank: 1, step: 2, at: 3s}}", "both step and at"),
        ("- {kill: {rank: one, step: 2}}", "rank=one"),
        ("- {kill: {rank: 1}}", "does not say when"),
        ("- 'kill:rank", "is not YAML"),
        ("[]", "has no entries"),
    ],
)
def test_a_bad_yaml_file_is_refused_in_one_sentence(tmp_path: Path, content: str, says: str) -> None:
    """As for the text, whatever YAML made of it."""
    path = tmp_path / "plan.yaml"
    path.write_text(content)
    with pytest.raises(ChaosError) as caught:
        parse_plan(str(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_rank_or_slot_the_job_does_not_have_is_refused() -> None:
    """Before anything is started: rank 9 of 4, slot 7 of 0 to 3."""
    check_plan(parse_plan("kill:rank=3@step=1; slot-lost:slot=3@step=1"), 4, range(4))
    with pytest.raises(ChaosError, match=r"names rank 9, but this job has 4 ranks; name one of 0 to 3"):
        check_plan(parse_plan("kill:rank=9@step=1"), 4, range(4))
    with pytest.raises(ChaosError, match=r"names slot 7, but this node has only 0, 1, 4;"):
        check_plan(parse_plan("slot-lost:slot=7@step=1"), 3, {4, 0, 1})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["step=5", "5s"])
def test_every_fault_has_exactly_one_who_finds_it_due(kind: str, moment: str) -> None:
    """The launcher, the rank and the keeper never two of them, and never none."""
    plan = parse_plan(f"{kind}:rank=0@{moment}" if KINDS[kind].has_target else f"{kind}@{moment}")
    finders = [bool(due(plan, frozenset(), 5.0)), bool(for_rank(plan, 0)), bool(for_keeper(plan))]
    assert sum(finders) == 1
    assert finders[2] is (kind in STORAGE_KINDS)
    assert not for_rank(plan, 1)
    if moment == "step=5":
        assert not finders[0]  # only a rank and the keeper count steps


def test_due_gives_the_earliest_first_and_each_once() -> None:
    """A plan is played in the order of its times, and what fired is over."""
    plan = parse_plan("kill:rank=0@5s; hang:rank=1@3s; kill:rank=2@9s")
    assert due(plan, frozenset(), 2.9) == ()
    assert [f.index for f in due(plan, frozenset(), 6.0)] == [1, 0]
    assert [f.index for f in due(plan, frozenset({1}), 6.0)] == [0]
    assert [f.index for f in remaining(plan, frozenset({0, 2}))] == [1]


def test_a_rank_gets_its_own_faults_and_those_of_its_slot() -> None:
    """By global rank, or by the device slot it is bound to."""
    plan = parse_plan("kill:rank=1@step=1; slot-lost:slot=2@step=1; kill:rank=2@step=1")
    assert [f.index for f in for_rank(plan, 1, 2)] == [0, 1]
    assert [f.index for f in for_rank(plan, 2, 0)] == [2]
    assert for_rank(plan, 0) == ()


def test_the_environment_carries_a_plan_unchanged() -> None:
    """What is left of a plan keeps its indices on the way to the worker."""
    plan = remaining(parse_plan("kill:rank=1@step=20; hang:rank=2@1.5s; exit:rank=0,code=3@step=50"), {0})
    assert from_env(to_env(plan)) == plan


def test_a_devices_fault_has_its_code_and_its_time():
    """Faults of devices take a slot, a code where there is one (79 and 1 if not given), and how long they last."""
    xid, lost, recovery = parse_plan("xid:slot=2@step=3; gpu-lost:rank=1,for=500ms@2s; recovery:slot=0,code=2,for=1m@step=9")
    assert (xid.slot, xid.code, xid.for_s) == (2, 79, None)
    assert (lost.rank, lost.for_s) == (1, 0.5)
    assert (recovery.code, recovery.for_s) == (2, 60.0)


TIMELESS = ["gpu-lost:slot=1,for=soon@2s", "gpu-lost:slot=1,for=1s,for=2s@2s", "kill:rank=1,for=2s@2s", "ecc:slot=1,code=3@2s"]


@pytest.mark.parametrize("entry", TIMELESS)
def test_a_time_or_a_code_that_means_nothing_is_refused(entry):
    """A fault that lasts no time, two times, or that takes neither, is an error that names the entry."""
    with pytest.raises(ChaosError, match=entry.split("@")[0].split(",")[0]):
        parse_plan(entry)


def test_every_kind_is_described_as_it_can_be_written():
    """The list has a line for each kind, and what stands before its words is an entry that a plan takes."""
    lines = kinds_told().splitlines()[: len(KINDS)]
    for name, line in zip(KINDS, lines, strict=True):
        entry = line.split()[0].replace("=N", "=1").replace("=TIME", "=3s")
        assert parse_plan(f"{entry}@step=3")[0].kind == name


def test_a_plan_is_told_before_it_is_carried_out():
    """A dry run names every entry's moment, target and deed, in the order in which they fall due."""
    told = plan_told(parse_plan("kill:rank=1@40s; gpu-lost:slot=2,for=2s@step=20; slow:rank=0@10s; exit:rank=3,code=7@step=5"))
    lines = [line.split(maxsplit=5) for line in told.splitlines()]
    assert [" ".join(line[:3]) for line in lines[:2]] == ["after step 5", "after step 20"]
    assert "code 7" in told.splitlines()[0] and "slot 2" in told.splitlines()[1] and "for 2 s" in told.splitlines()[1]
    assert told.splitlines()[2].startswith("at 10 s") and "factor 3" in told.splitlines()[2]
    assert told.splitlines()[3].startswith("at 40 s")


def test_random_faults_are_the_same_for_the_same_seed() -> None:
    """A random entry is nothing but a plan of ordinary ones: one seed gives one plan, another seed another, around the mean asked for."""
    entry = "random:mtbf=20,seed=7,of=kill|hang|enospc|gpu-lost,n=60"
    plan = parse_plan(entry, 4, range(4))
    assert plan == parse_plan(entry, 4, range(4))
    assert plan != parse_plan(entry.replace("seed=7", "seed=8"), 4, range(4))
    assert len(plan) == 60 and {f.kind for f in plan} == {"kill", "hang", "enospc", "gpu-lost"}
    assert {f.rank for f in plan if f.kind == "kill"} == set(range(4))
    assert all(f.for_s for f in plan if "for" in KINDS[f.kind].keys)
    assert 10 < (plan[-1].at_step or 0) / 60 < 30
    assert parse_plan("; ".join(f.text for f in plan)) == plan
    assert [f.at_s is not None for f in parse_plan("random:mtbf=2s,seed=1,n=3; kill:rank=0@step=3", 4)] == [True] * 3 + [False]


def test_an_attempt_holds_a_fault_back() -> None:
    """An entry with an attempt is not handed out before it."""
    plan = parse_plan("kill:rank=1@phase=start,attempt=1; kill:rank=1@5s,attempt=2")
    assert [f.index for f in remaining(plan, set(), 0)] == []
    assert [f.index for f in remaining(plan, set(), 1)] == [0]
    assert [f.index for f in due(plan, {0}, 9.0, 2)] == [1]
    assert due(plan, {0}, 9.0, 1) == ()
