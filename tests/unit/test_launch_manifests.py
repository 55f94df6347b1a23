"""Manifests under ``examples/launch`` have the fields of the Kubernetes API, and start what ``torchrun`` understands.

``tests/data/kubernetes_types.json`` holds the types that they use, with their fields and which are required: of
Kubernetes 1.35 and of Kubeflow's training operator 1.9, from the models of their Python clients.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
TYPES: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "kubernetes_types.json").read_text(encoding="utf-8"))
KINDS = {"Service": "V1Service", "Job": "V1Job", "PyTorchJob": "KubeflowOrgV1PyTorchJob"}
PLAIN = {"str": str, "int": int, "bool": bool}
GPU = "nvidia.com/gpu"


def mistakes(value: Any, kind: str, at: str) -> list[str]:
    """Where a value is not of a type of the API, in words."""
    listed, mapped = re.fullmatch(r"list\[(.*)\]", kind), re.fullmatch(r"dict\(\w+, (.*)\)", kind)
    if listed:
        if not isinstance(value, list):
            return [f"{at} is not a list"]
        return [fault for place, one in enumerate(value) for fault in mistakes(one, listed[1], f"{at}[{place}]")]
    if mapped:
        kind = mapped[1] if not at.endswith((".limits", ".requests")) else "quantity"
        return [fault for name, one in value.items() for fault in mistakes(one, kind, f"{at}.{name}")]
    if kind == "quantity":  # "32Gi", 8
        return [] if isinstance(value, int) or re.fullmatch(r"\d+([KMGT]i?|m)?", value) else [f"{at} is no quantity"]
    if kind in PLAIN:
        return [] if type(value) is PLAIN[kind] else [f"{at} is not of type {kind}"]
    if kind not in TYPES:
        return [f"{at} is of type {kind}, which the table lacks"]
    known = TYPES[kind]["fields"]
    found = [f"{at} has no `{name}`" for name in TYPES[kind]["required"] if name not in value]
    found += [f"{at}.{name} is not a field of {kind}" for name in value if name not in known]
    return found + [
        fault for name in value if name in known for fault in mistakes(value[name], known[name], f"{at}.{name}")
    ]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / f"{name}.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["job", "pytorchjob"])
def test_manifests_have_the_fields_and_types_of_the_api(name: str) -> None:
    for document in documents(name):
        assert mistakes(document, KINDS[document["kind"]], document["kind"]) == []


def test_a_wrong_field_type_or_missing_field_is_found() -> None:
    job = documents("job")[1]
    job["spec"]["backofLimit"] = 3
    job["spec"]["completions"] = "2"
    pod = job["spec"]["template"]["spec"]
    del pod["containers"][0]["name"]
    pod["volumes"][1]["emptyDir"] = {"size": "32Gi"}
    assert sorted(mistakes(job, "V1Job", "Job")) == [
        "Job.spec.backofLimit is not a field of V1JobSpec",
        "Job.spec.completions is not of type int",
        "Job.spec.template.spec.containers[0] has no `name`",
        "Job.spec.template.spec.volumes[1].emptyDir.size is not a field of V1EmptyDirVolumeSource",
    ]


def launched(container: dict[str, Any], folder: Path, **given: str) -> Namespace:
    """What a container tells ``torchrun``: its command is run, with a ``torchrun`` that only reports its arguments."""
    reporting = folder / "torchrun"
    reporting.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    reporting.chmod(0o755)
    own = {one["name"]: one["value"] for one in container["env"]}
    done = subprocess.run(
        container["command"],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **own, **given},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return get_args_parser().parse_args(done.stdout.splitlines())


def test_pods_of_the_job_are_the_nodes_of_one_launch(tmp_path: Path) -> None:
    service, job = documents("job")
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    for index in range(spec["completions"]):
        told = launched(container, tmp_path, JOB_COMPLETION_INDEX=str(index))
        assert (told.node_rank, told.nnodes) == (index, str(spec["completions"]))
        assert told.nproc_per_node == str(container["resources"]["limits"][GPU])
        assert told.training_script == "train.py"
        # The first pod of an indexed Job has the host name NAME-0; the headless service resolves NAME-0.SERVICE.
        assert told.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["backoffLimit"] % spec["completions"] == 0  # it counts failed pods, and all pods end together


def test_pods_of_the_pytorchjob_take_their_place_from_the_operators_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = documents("pytorchjob")[0]["spec"]
    operator = {"NPROC_PER_NODE": spec["nprocPerNode"], "NNODES": "2", "MASTER_ADDR": "train-master-0"}
    for rank, kind in enumerate(("Master", "Worker")):
        for name, value in {**operator, "NODE_RANK": str(rank), "MASTER_PORT": "23456"}.items():
            monkeypatch.setenv(f"PET_{name}", value)
        pods = spec["pytorchReplicaSpecs"][kind]
        (container,) = pods["template"]["spec"]["containers"]
        told = launched(container, tmp_path)
        assert (told.node_rank, told.nnodes, told.master_addr, told.master_port) == (rank, "2", "train-master-0", 23456)
        assert told.nproc_per_node == str(container["resources"]["limits"][GPU]) and pods["replicas"] == 1
