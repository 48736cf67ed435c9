"""Network ports that go down while a job runs are told, with how long they were away; those that never were up are not."""

from __future__ import annotations

from goodrun.elastic_runner.devices.asking import Ports
from goodrun.elastic_runner.devices.ports import ROOT_VARIABLE, PortWatch, states


def port(root, name, state):
    where = root / name / "ports" / "1"
    where.mkdir(parents=True, exist_ok=True)
    (where / "state").write_text(f"{state}\n")


def test_a_ports_absences_are_told_and_add_up():
    """Each time it goes and each time it comes back, once; one that was down at the start is nobody's business."""
    said, now = [], [0.0]
    watch = PortWatch(said.append, lambda: now[0])
    up, down = {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}, {"mlx5_0/1": "INIT", "mlx5_1/1": "DOWN"}
    for t, seen in ((0, up), (1, down), (3, down), (8, up), (9, up), (20, {}), (30, up)):
        now[0] = float(t)
        watch.look(seen)
    assert [words.partition(":")[0] for words in said] == [
        "network port mlx5_0/1 is INIT",
        "network port mlx5_0/1 is back after 7 s (7 s in all since the job began)",
        "network port mlx5_0/1 is gone",
        "network port mlx5_0/1 is back after 10 s (17 s in all since the job began)",
    ]


def test_states_are_the_kernels_words(tmp_path):
    """The number before them is left out; a machine without such ports has none."""
    assert states(str(tmp_path / "nothing")) == {}
    port(tmp_path, "mlx5_0", "4: ACTIVE")
    port(tmp_path, "mlx5_1", "1: DOWN")
    assert states(str(tmp_path)) == {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}


def test_the_prober_tells_them_each_round(gpus, prober, hear, tmp_path, monkeypatch):
    """Because to read them may hang in a driver, as anything else that it asks."""
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "ib"))
    port(tmp_path / "ib", "mlx5_0", "4: ACTIVE")
    p = prober()
    assert hear(p, lambda h: isinstance(h, Ports))[-1].states == {"mlx5_0/1": "ACTIVE"}
    port(tmp_path / "ib", "mlx5_0", "1: DOWN")
    assert hear(p, lambda h: isinstance(h, Ports) and h.states["mlx5_0/1"] != "ACTIVE")[-1].states == {"mlx5_0/1": "DOWN"}
