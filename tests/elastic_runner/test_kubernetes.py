"""The manifests fit the API's own models and goodrun's parser; the variables of Kubeflow's torch policy are all that a job needs."""

import os
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from goodrun.elastic_runner.events import AttemptStarted
from goodrun.elastic_runner.options import parse

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "kubernetes"
DOCUMENTS = [(path.name, d["kind"], d) for path in sorted(FOLDER.glob("*.yaml")) for d in yaml.safe_load_all(path.read_text("utf-8"))]
MODELS = {
    "Service": "IoK8sApiCoreV1Service",
    "Job": "IoK8sApiBatchV1Job",
    "JobSet": "JobsetV1alpha2JobSet",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


@pytest.mark.skipif(find_spec("kubeflow_trainer_api") is None, reason="kubeflow-trainer-api, which has the models, is not installed")
@pytest.mark.parametrize(("file", "kind", "document"), DOCUMENTS, ids=[f"{file}-{kind}" for file, kind, _ in DOCUMENTS])
def test_a_manifest_is_what_the_api_takes(file, kind, document):
    """Types and required fields are right, and no field is one that the API would drop."""
    from kubeflow_trainer_api import models

    assert not dropped(document, getattr(models, MODELS[kind]).from_dict(document).to_dict())


def dropped(written, taken, where=""):
    """The fields of `written` that are not in `taken` as they stand; what the API adds by default is its own affair."""
    if isinstance(written, dict) and isinstance(taken, dict):
        return [w for key, value in written.items() for w in dropped(value, taken.get(key), f"{where}.{key}")]
    if isinstance(written, list) and isinstance(taken, list) and len(written) == len(taken):
        return [w for i, (a, b) in enumerate(zip(written, taken, strict=True)) for w in dropped(a, b, f"{where}[{i}]")]
    return [] if written == taken else [where]


def containers(node):
    """All containers of a document, however deep."""
    if isinstance(node, dict):
        yield from (c for key, value in node.items() for c in (value if key == "containers" else containers(value)))
    elif isinstance(node, list):
        yield from (c for value in node for c in containers(value))


@pytest.mark.parametrize("file", sorted({file for file, _, _ in DOCUMENTS}))
def test_the_command_line_is_goodruns(file, tmp_path, monkeypatch):
    """goodrun takes the arguments and the PET_ variables as they stand, and ranks may take as long to save as pods have to end."""
    documents = [d for f, _, d in DOCUMENTS if f == file]
    found = [*containers(documents), *(d["spec"]["trainer"] for d in documents if d["kind"] == "TrainJob")]
    [command] = [c for c in found if c.get("command")]
    assert command["command"] == ["goodrun"]
    for name in [n for n in os.environ if n.startswith(("PET_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for variable in command.get("env", ()):
        monkeypatch.setenv(variable["name"], variable["value"])
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    args, config = parse(command["args"])
    pods = [spec for d in documents for spec in pod_specs(d)]
    assert pods and all(config.shutdown_timeout_s < pod["terminationGracePeriodSeconds"] for pod in pods)
    assert config.metrics_at == ("0.0.0.0", 9400)
    if command.get("env"):
        assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2:4", "8", "goodrun")
        assert args.rdzv_endpoint.partition(":")[0].partition(".")[2] == "train", "the name of the headless service"


def pod_specs(node):
    """All pods' specs of a document."""
    if isinstance(node, dict):
        yield from ([node] if "containers" in node else [s for value in node.values() for s in pod_specs(value)])
    elif isinstance(node, list):
        yield from (s for value in node for s in pod_specs(value))


def test_the_variables_of_kubeflows_torch_policy_are_enough(job):
    """Two pods with what the operator sets, and no option at all: one job of two nodes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    pods = [job("allreduce.py", 3, env={**shared, "PET_NODE_RANK": str(rank), "TEST_PAUSE": "0"}, name=f"pod{rank}") for rank in range(2)]
    for pod in pods:
        pod.ok()
        assert [e.world_size for e in pod.events(AttemptStarted)] == [2]
