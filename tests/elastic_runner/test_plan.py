"""The plan gives the published numbers, by formula and by simulation, and says where each assumption comes from."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodrun.elastic_runner.events import AttemptStarted, Event, Failed, FirstStep, RankProgress, RunStarted, Stopped
from goodrun.elastic_runner.planning import rates, yields
from goodrun.elastic_runner.planning.command import parser, plan_as_dict, plan_for
from goodrun.elastic_runner.planning.durations import parse_duration, show_duration
from goodrun.elastic_runner.planning.measured import costs_of
from goodrun.elastic_runner.planning.plan import GOODRUN, Plan
from goodrun.elastic_runner.planning.rates import PRESETS
from goodrun.elastic_runner.planning.simulation import Estimate, Scenario, simulate
from goodrun.elastic_runner.planning.yields import Costs
from goodrun.elastic_runner.reading import plan_main

FREE = Costs()


def plan(*argv: str) -> Plan:
    """The plan that these options ask for."""
    return plan_for(parser().parse_args(argv), lambda run: [])


def near(estimate: Estimate, value: float) -> bool:
    """Within three standard errors."""
    return abs(estimate.mean - value) <= 3 * estimate.error


@pytest.mark.parametrize(("gpus", "percent"), [(256, 19), (1024, 57)])
def test_the_chance_of_a_failure_in_a_month(gpus: int, percent: int) -> None:
    """At 1 % per GPU and year, 256 GPUs meet a failure within 30 days with 19 %, 1,024 with 57 %: by both formulas, and simulated."""
    made = plan("--gpus", str(gpus), "--days", "30", "--preset", "one-percent", "--simulate")
    assert round(100 * made.any_failure) == percent
    assert made.any_failure_by_power is not None and round(100 * made.any_failure_by_power) == percent
    simulated = made.variants[0].best.simulated
    assert simulated is not None and simulated.any_failure.error < 0.005
    assert near(simulated.any_failure, made.any_failure)


@pytest.mark.parametrize(("gpus", "hours"), [(608, "1.9 h"), (32, "36 h")])
def test_delta_with_every_error_counted(gpus: int, hours: str) -> None:
    """Delta's 608 GPUs meet an error every 1.9 h, 32 of them one in 36 h; the simulation agrees within its error."""
    made = plan("--gpus", str(gpus), "--preset", "delta", "--simulate", "--replicas", "40")
    assert show_duration(made.mtbf_s) == hours
    simulated = made.variants[0].best.simulated
    assert simulated is not None and near(simulated.mtbf_s, made.mtbf_s)


def test_two_hours_to_thirty_minutes() -> None:
    """At 8.6 failures a day, saving every 30 min in place of 2 h takes goodput from 64 to 91 % to first order; exactly 68.4 to 91.3 %."""
    made = plan(
        *("--gpus", "1024", "--days", "365", "--failures-per-day", "8.6", "--interval", "2h", "--interval", "30m", "--lost-share", "0"),
        *("--costs", "detect=0,recover=0,stall=0,durable=0", "--simulate", "--replicas", "12"),
    )
    two, half = made.variants[0].rows[:2]
    assert (round(two.first_order, 2), round(half.first_order, 2)) == (0.64, 0.91)
    assert (round(two.exact, 3), round(half.exact, 3)) == (0.684, 0.913)
    for row in (two, half):
        assert row.simulated is not None and row.simulated.time_goodput.error < 0.004
        assert near(row.simulated.time_goodput, row.exact)


def test_rates_of_the_presets() -> None:
    """Each preset gives the mean time between failures that its source reports, or that follows from its counts."""
    hours = {name: rates.mtbf_s(1024, p.per_gpu_year) / 3600 for name, p in PRESETS.items()}
    assert hours["one-percent"] == pytest.approx(855, rel=0.001)
    assert hours["llama3"] == pytest.approx(49.5, rel=0.003)
    assert hours["rsc-1"] == pytest.approx(28.8, rel=0.003)
    assert hours["rsc-2"] == pytest.approx(80.1, rel=0.003)
    assert rates.mtbf_s(608, PRESETS["delta-hardware"].per_gpu_year) / 3600 == pytest.approx(45.5, rel=0.001)
    assert all("arXiv" in p.source or "Databricks" in p.source for p in PRESETS.values())


def test_spares() -> None:
    """Of 1,024 with 0.1 % out at once, 4 spares are enough 99 % of the time (as ByteRobust keeps); with 0.2 %, 6; with none out, none."""
    assert [rates.spares_for(1024, p) for p in (0.001, 0.00125, 0.002, 0.0)] == [4, 4, 6, 0]
    assert rates.spares_for(1_000_000, 0.01) == pytest.approx(10_232, abs=2)  # where exp has no digits left


@given(mtbf=st.floats(60, 1e8), stall=st.floats(0.001, 3600))
def test_the_best_interval_is_the_best(mtbf: float, stall: float) -> None:
    """No interval a little longer or shorter gives more goodput than the exact one."""
    costs = Costs(detect_s=10, recover_s=60, stall_s=stall, durable_s=30)
    best = yields.best_interval(mtbf, stall)
    most = yields.goodput(mtbf, best, costs)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert yields.goodput(mtbf, best * factor, costs) <= most * (1 + 1e-9)


def test_daly_and_young_come_near_the_best() -> None:
    """Where a checkpoint is short beside the time between failures all three agree; at 51 min of 3.09 h Daly's is the one that does."""
    mtbf = 49.5 * 3600
    assert yields.young(mtbf, 9) == pytest.approx(yields.best_interval(mtbf, 9), rel=0.01)
    assert yields.daly(3.09 * 3600, 522) == pytest.approx(yields.best_interval(3.09 * 3600, 522), rel=0.001)
    assert yields.daly(3.09 * 3600, 522) / 60 == pytest.approx(51, abs=0.5)


def test_the_simulation_agrees_with_the_formula() -> None:
    """With recovery, stalls and a delay until durable, the simulated goodput is the exact one within its error."""
    costs = Costs(detect_s=30, recover_s=300, stall_s=20, durable_s=120)
    case = Scenario(gpus=512, days=365, per_gpu_year=4.0, costs=costs, interval_s=900, lost_share=0.0)
    simulated = simulate(case, seed=3, replicas=12)
    assert near(simulated.time_goodput, yields.goodput(rates.mtbf_s(512, 4.0), 900, costs))
    assert simulated.time_goodput.error < 0.002


def test_shrinking_and_spares() -> None:
    """Without spares lost GPUs take capacity, not time; with spares they take neither; a node takes its eight."""
    shared = {"gpus": 64, "days": 90.0, "per_gpu_year": 2.0, "costs": FREE, "interval_s": 60.0, "repair_s": 5 * 86400.0}
    bare = simulate(Scenario(**shared), seed=1, replicas=8)  # type: ignore[arg-type]
    spared = simulate(Scenario(**shared, spares=16), seed=1, replicas=8)  # type: ignore[arg-type]
    nodes = simulate(Scenario(**shared, node_share=1.0), seed=1, replicas=8)  # type: ignore[arg-type]
    assert bare.time_goodput.mean > 0.999 and bare.smallest < 64
    assert bare.capacity_goodput.mean == pytest.approx(1 - 2.0 * 5 / 365, abs=0.01)
    assert spared.capacity_goodput.mean > 0.999
    assert nodes.smallest <= 56 and nodes.capacity_goodput.mean < bare.capacity_goodput.mean - 0.05


def test_growing_is_weighed() -> None:
    """One GPU that was repaired is no reason to restart thousands: it comes in with the next failure, and costs no time of its own."""
    costs = Costs(recover_s=300.0)
    case = Scenario(gpus=4096, days=30, per_gpu_year=2.0, costs=costs, interval_s=60.0, repair_s=3600.0)
    large = simulate(case, seed=1, replicas=3)
    assert large.restarts == large.failures and large.smallest < 4096
    small = simulate(dataclasses.replace(case, gpus=8, days=900), seed=1, replicas=3)
    assert small.restarts.mean > 1.5 * small.failures.mean


def test_the_policy_decides_in_the_simulation() -> None:
    """What production would give up, the simulated job gives up: here a world that must keep its size waits for each repair."""
    case = Scenario(gpus=8, days=100, per_gpu_year=10.0, costs=FREE, interval_s=60.0, repair_s=7200.0, min_gpus=8)
    fixed = simulate(case, seed=1, replicas=6)
    assert fixed.smallest == 8
    assert fixed.time_goodput.mean == pytest.approx(1 - 80 / 365 / 24 * 2, abs=0.003)


def test_the_same_seed_gives_the_same_jobs() -> None:
    """A simulation can be repeated to the last digit, and another seed gives another."""
    case = Scenario(gpus=64, days=30, per_gpu_year=5.0, costs=GOODRUN, interval_s=600)
    assert simulate(case, seed=5, replicas=3) == simulate(case, seed=5, replicas=3)
    assert simulate(case, seed=5, replicas=3) != simulate(case, seed=6, replicas=3)


def test_a_hundred_thousand_gpus() -> None:
    """A month of 100,000 GPUs at Llama 3's rate, nodes failing whole, is simulated in one replica well under the test's time limit."""
    llama = PRESETS["llama3"]
    case = Scenario(
        gpus=100_000, days=30, per_gpu_year=llama.per_gpu_year, lost_share=llama.lost_share, node_share=0.1, spares=100,
        costs=GOODRUN, interval_s=300,
    )  # fmt: skip
    [one] = [simulate(case, seed=1, replicas=1)]
    assert 1200 < one.failures.mean < 1600
    assert math.isnan(one.time_goodput.error)


def test_costs_from_a_run() -> None:
    """`--from` takes detection, recovery and the stall from the record, and says in words what it still assumes."""

    def at(t: float, event: Event, attempt: int) -> Event:
        return type(event)(**{**event.__dict__, "t": t, "attempt": attempt})

    story = [
        at(0, RunStarted(run_id="r", slots=(0, 1)), -1),
        at(1, AttemptStarted(world_size=2, slots=(0, 1)), 0),
        at(5, FirstStep(step=1, first_step_t=5), 0),
        at(20, RankProgress(steps=(9, 9), save_stall_s=(1.0, 1.5), durable_step=3), 0),
        at(30, RankProgress(steps=(20, 20), save_stall_s=(2.0, 3.0), durable_step=6), 0),
        at(32, Failed(kind="hang", fault_t=30), 0),
        at(33, Stopped(), 0),
        at(34, AttemptStarted(world_size=2, slots=(0, 1)), 1),
        at(40, FirstStep(step=7, first_step_t=40), 1),
    ]
    costs, words = costs_of(story, GOODRUN)
    assert (costs.detect_s, costs.recover_s, costs.stall_s, costs.durable_s) == (2.0, 8.0, 1.5, GOODRUN.durable_s)
    assert "measured in 1 restart" in words and "time to durable assumed" in words
    assert costs_of([], GOODRUN)[0] == GOODRUN


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`goodrun plan` answers in words, in JSON without infinities, and with a picture; nonsense is refused in words."""
    assert plan_main(["--gpus", "256", "--afr", "0.01", "--price", "2", "--plot", str(tmp_path / "p.svg")]) == 0
    words = capsys.readouterr().out
    assert "19.0 % chance of at least one failure" in words and "368,640" in words
    assert (tmp_path / "p.svg").read_text().startswith("<svg") and "256 GPUs" in (tmp_path / "p.svg").read_text()
    assert plan_main(["--gpus", "256", "--afr", "0.01", "--json"]) == 0
    body = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert body["schema"] == 1 and round(body["any_failure"], 2) == 0.19
    assert plan_main(["--gpus", "8", "--from", str(tmp_path / "none")]) == 2
    for wrong in (["--gpus", "0"], ["--gpus", "8", "--afr", "-1"], ["--gpus", "8", "--interval", "soon"], ["--gpus", "8", "--costs", "x"]):
        with pytest.raises(SystemExit):
            plan_main(wrong)
        assert "Traceback" not in capsys.readouterr().err


@given(st.floats(1e-6, 1e6), st.integers(1, 100_000), st.floats(0.001, 3650))
def test_a_plan_never_says_nonsense(rate: float, gpus: int, days: float) -> None:
    """Whatever the size and the rate, probabilities and goodputs are between 0 and 1, and JSON stays JSON."""
    made = plan("--gpus", str(gpus), "--afr", repr(rate), "--days", repr(days))
    assert 0 <= made.any_failure <= 1
    for variant in made.variants:
        assert all(0 <= row.exact <= 1 and 0 <= row.first_order <= 1 for row in variant.rows)
    json.loads(json.dumps(plan_as_dict(made)), parse_constant=pytest.fail)


def test_lengths_of_time() -> None:
    """People write 90s, 30m, 2h, 5d; anything else is refused with a way out."""
    assert [parse_duration(t) for t in ("90", "90s", "30m", "30min", "2h", "1.5h", "5d", "250ms")] == [
        *(90, 90, 1800, 1800, 7200, 5400, 432000, 0.25),
    ]
    for wrong in ("", "soon", "-3s", "2 weeks", "nan"):
        with pytest.raises(ValueError, match="length of time"):
            parse_duration(wrong)
    rng = random.Random(1)
    assert all(show_duration(rng.random() * 10**k) for k in range(-3, 9))
