"""The manifests of examples/kubernetes: what they say, and their containers' command under their variables, as pods.

A pod is a network namespace with the pod's name, its command is process 1 of a process namespace, and it is stopped as
the kubelet stops it: SIGTERM to process 1. There is no cluster here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault import hosts
from tests.fault.launch_jobs import ROOT, wait_until
from tests.helpers import need

yaml: Any = need("yaml", "PyYAML")

FOLDER = ROOT / "examples" / "kubernetes"
ADDRESSES = {"train-0.train": "10.85.0.1", "train-1.train": "10.85.0.2"}
GRACE_S = 60


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pod_specs() -> dict[str, dict[str, Any]]:
    """Of each kind of pod."""
    _, job = documents("job.yaml")
    (pytorch_job,) = documents("pytorchjob.yaml")
    replicas = pytorch_job["spec"]["pytorchReplicaSpecs"]
    return {"Job": job["spec"]["template"]["spec"]} | {
        name: replica["template"]["spec"] for name, replica in replicas.items()
    }


def test_the_manifests_hold_together() -> None:
    service, job = documents("job.yaml")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}  # the Job controller's label
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    env = {it["name"]: it for it in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["PET_NNODES"]["value"] == str(job["spec"]["completions"])
    assert env["PET_MASTER_ADDR"]["value"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    (pytorch_job,) = documents("pytorchjob.yaml")
    replicas = pytorch_job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    for kind, spec in pod_specs().items():
        (container,) = spec["containers"]
        assert kind == "Job" or container["name"] == "pytorch"
        assert {it["name"] for it in container["volumeMounts"]} == {it["name"] for it in spec["volumes"]}
        assert all(isinstance(it.get("value", ""), str) for it in container["env"])
        assert spec["terminationGracePeriodSeconds"] == GRACE_S
        (grace,) = re.findall(r"--shutdown-timeout (\d+)", container["command"][-1])
        assert int(grace) < GRACE_S
        (secret,) = [it["secret"] for it in spec["volumes"] if "secret" in it]
        assert secret["defaultMode"] == 0o440


def test_the_schema_of_kubernetes() -> None:
    validate: Any = need("kubernetes_validate", "kubernetes-validate")
    for content in documents("job.yaml"):
        for version in ("1.28", "1.31"):
            validate.validate(content, version, strict=True)
    for spec in pod_specs().values():
        template = {"apiVersion": "v1", "kind": "PodTemplate", "template": {"spec": spec}}
        validate.validate(template, "1.28", strict=True)


class Pod:
    """The one container of a pod."""

    def __init__(self, lab: hosts.Lab, folder: Path, index: int, command: list[str], environ: dict[str, str]) -> None:
        self.out_path = folder / f"pod-{index}-{time.monotonic_ns()}.log"
        inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "env", *map("=".join, environ.items())]
        with open(self.out_path, "wb") as out:
            self.process = subprocess.Popen(
                [*lab.on(index), *inside, *command], cwd=folder, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    def stop(self) -> None:
        """SIGTERM to the container's process 1, the child of unshare."""
        child = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(child[0]), signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(90)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[hosts.Lab]:
    if reason := hosts.why_not():
        pytest.skip(reason)
    with hosts.Lab(2) as it:
        it.link("eth0", ["10.85.0.{}/24"])
        it.named(tmp_path, ADDRESSES)
        yield it


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """What the pods have: the image's files, the mounted secret (through two links, as the kubelet does), a disk."""
    (tmp_path / "train.py").write_text((FOLDER / "train.py").read_text())
    (tmp_path / "ringrun").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/launch.py "$@"\n')
    (tmp_path / "ringrun").chmod(0o755)
    mounted = tmp_path / "job-secret" / "..2026_01_01"
    mounted.mkdir(parents=True)
    (mounted / "secret").write_text("5e" * 32)
    (mounted / "secret").chmod(0o440)
    (tmp_path / "job-secret" / "..data").symlink_to("..2026_01_01")
    (tmp_path / "job-secret" / "secret").symlink_to("..data/secret")
    for index in range(2):
        (tmp_path / f"tmp-{index}").mkdir()
    return tmp_path


def start(lab: hosts.Lab, place: Path, index: int, variables: dict[str, str], *arguments: str) -> Pod:
    """The Job's container as it stands there, but for the roots of its paths, and with arguments behind."""
    (container,) = pod_specs()["Job"]["containers"]
    shell, flag, text = container["command"]
    here = {"/job-secret": "job-secret", "/tmp": f"tmp-{index}", "/checkpoints": "checkpoints"}
    text = re.sub(r"(?<![\w.-])(/[a-z-]+)", lambda found: f"{place}/{here[found[1]]}", text)
    path = f"{place}:{os.environ['PATH']}"
    return Pod(lab, place, index, [shell, flag, " ".join([text, *arguments])], variables | {"PATH": path})


def of_the_job(index: int) -> dict[str, str]:
    """The variables that the manifest sets, and the Job controller beside it."""
    (container,) = pod_specs()["Job"]["containers"]
    index_label = "metadata.labels['batch.kubernetes.io/job-completion-index']"
    values = {it["name"]: it.get("value") for it in container["env"]}
    (name,) = [n for n, v in values.items() if v is None]
    (field,) = [it["valueFrom"]["fieldRef"]["fieldPath"] for it in container["env"] if "valueFrom" in it]
    assert field == index_label
    return {n: v for n, v in values.items() if v is not None} | {name: str(index), "JOB_COMPLETION_INDEX": str(index)}


def of_the_operator(index: int) -> dict[str, str]:
    """As Kubeflow's training operator 1.8 sets them for nprocPerNode 2, one master, one worker."""
    where = {"MASTER_ADDR": "train-0.train", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": str(index)}
    pet = {"NPROC_PER_NODE": "2", "NNODES": "2", "NODE_RANK": str(index), "MASTER_ADDR": "train-0.train"}
    pet["MASTER_PORT"] = "23456"
    return where | {f"PET_{name}": value for name, value in pet.items()} | {"PYTHONUNBUFFERED": "1"}


@pytest.mark.ci
@pytest.mark.timeout(240)
@pytest.mark.parametrize("variables", [of_the_job, pytest.param(of_the_operator, marks=pytest.mark.slow)])
def test_two_pods_are_stopped_and_go_on(variables: Any, lab: hosts.Lab, place: Path) -> None:
    slow = ("--steps", "100000", "--seconds-per-step", "0.02")
    pods = [start(lab, place, index, variables(index), *slow) for index in range(2)]
    try:
        assert all(pod.process.poll() is None for pod in pods)
        wait_until(lambda: "4 ranks, from step 0" in pods[0].out, "four ranks", 60)
        begin = time.monotonic()
        pods[1].stop()  # a node is drained: one pod alone is asked
        assert pods[1].wait() == 128 + signal.SIGTERM, pods[1].out
        wait_until(lambda: "stopped, saved step" in pods[0].out, "the checkpoint", 10)
        assert pods[0].wait() == 1, pods[0].out  # its ranks ended with 143: the pod is not counted as a success
        assert time.monotonic() - begin < 45
        (saved,) = re.findall(r"saved step (\d+)", pods[0].out)
        again = [start(lab, place, index, variables(index), "--steps", str(int(saved) + 5)) for index in range(2)]
        pods += again
        assert [pod.wait() for pod in again] == [0, 0], again[0].out
        assert f"4 ranks, from step {saved}" in again[0].out
        assert f"done after step {int(saved) + 5}" in again[0].out
        assert "and 5 steps" in again[0].out
    finally:
        for pod in pods:
            pod.process.kill()
            pod.process.wait()
