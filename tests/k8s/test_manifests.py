"""The Kubernetes manifests render, are valid, and hold what the services need from a cluster."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cache_svc.config import CacheConfig
from executor_svc.config import ExecutorConfig
from jitney.serving.config import SHARED, ServingConfig
from scheduler_svc.config import SchedulerConfig

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "k8s" / "base"
VERSION = "1.32"
CONFIGS: dict[str, type[ServingConfig]] = {
    "scheduler": SchedulerConfig,
    "executor": ExecutorConfig,
    "cache": CacheConfig,
}


@functools.cache
def rendered() -> list[dict[str, Any]]:
    """Documents of the base: through kustomize, or the plain files where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
        text = "\n---\n".join((BASE / name).read_text() for name in names)
    else:
        text = subprocess.run([kubectl, "kustomize", str(BASE)], check=True, capture_output=True, text=True).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def documents(kind: str) -> list[dict[str, Any]]:
    return [document for document in rendered() if document["kind"] == kind]


def workloads() -> list[dict[str, Any]]:
    return [*documents("Deployment"), *documents("StatefulSet")]


def pods() -> list[dict[str, Any]]:
    return [workload["spec"]["template"]["spec"] for workload in workloads()]


def containers() -> Iterator[dict[str, Any]]:
    """Of all pods, init containers and sidecars too."""
    for pod in pods():
        yield from [*pod.get("initContainers", []), *pod["containers"]]


def services() -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Containers that run one of our services: its name, the container, its settings."""
    for container in containers():
        if container["name"] in CONFIGS:
            settings = {entry["name"]: entry.get("value", "") for entry in container["env"]}
            yield container["name"], container, settings


def test_every_document_is_valid() -> None:
    assert len(rendered()) == 7
    for document in rendered():
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_wrong_field_would_be_found() -> None:
    document = {**documents("Deployment")[0]}
    document["spec"] = {**document["spec"], "replicaz": 2}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_all_three_services_run_with_settings_that_exist() -> None:
    assert sorted(name for name, _, _ in services()) == sorted(CONFIGS)
    for name, container, settings in services():
        prefix = f"JITNEY_{name.upper()}_"
        known = {prefix + field.name.upper() for field in fields(CONFIGS[name])} | SHARED
        assert set(settings) <= known
        assert container["command"] == ["python", "-m", f"{name}_svc"]
        (port,) = container["ports"]
        assert port["containerPort"] == int(settings[f"{prefix}PORT"])
        assert settings[f"{prefix}HOST"] == "0.0.0.0"


def test_schedulers_are_replicated_headless_and_kept() -> None:
    (deployment,) = documents("Deployment")
    assert deployment["spec"]["replicas"] >= 2
    assert {service["metadata"]["name"]: service["spec"]["clusterIP"] for service in documents("Service")} == {
        "jitney-scheduler": "None",
        "jitney-executor": "None",
    }
    budgets = {budget["metadata"]["name"]: budget["spec"] for budget in documents("PodDisruptionBudget")}
    assert budgets["jitney-scheduler"]["minAvailable"] >= 1


def test_selectors_select_the_pods() -> None:
    labels = {
        workload["metadata"]["name"]: workload["spec"]["template"]["metadata"]["labels"].items()
        for workload in workloads()
    }
    for workload in workloads():
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels[workload["metadata"]["name"]]
    for service in documents("Service"):
        assert service["spec"]["selector"].items() <= labels[service["metadata"]["name"]]
    for budget in documents("PodDisruptionBudget"):
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels[budget["metadata"]["name"]]


def test_a_pod_gets_the_time_that_its_services_need_to_drain() -> None:
    for pod in pods():
        names = {container["name"] for container in [*pod.get("initContainers", []), *pod["containers"]]}
        drains = [
            float(settings[f"JITNEY_{name.upper()}_GRACE_S"]) for name, _, settings in services() if name in names
        ]
        assert pod["terminationGracePeriodSeconds"] >= sum(drains) + 5


def test_the_cluster_adds_no_variables_of_our_names() -> None:
    assert all(pod["enableServiceLinks"] is False for pod in pods())


def test_the_cache_starts_before_the_executor_and_ends_after_it() -> None:
    (pod,) = (workload["spec"]["template"]["spec"] for workload in documents("StatefulSet"))
    (sidecar,) = (container for container in pod["initContainers"] if container["name"] == "cache")
    assert sidecar["restartPolicy"] == "Always"
    assert "startupProbe" in sidecar
    mounts = [
        {mount["mountPath"] for mount in container["volumeMounts"]} for container in [sidecar, *pod["containers"]]
    ]
    assert all({"/dev/shm", "/var/lib/jitney"} <= paths for paths in mounts)


def test_probes_ask_for_life_and_for_readiness() -> None:
    for name, container, _ in services():
        assert container["livenessProbe"]["grpc"]["service"] == "live"
        assert container["startupProbe"]["grpc"]["port"] == container["ports"][0]["containerPort"]
        if name != "cache":  # A sidecar: the executor's readiness covers it.
            assert "service" not in container["readinessProbe"]["grpc"]


def test_containers_may_do_nothing_that_they_need_not() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
    for container in containers():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def test_the_executor_asks_the_headless_service_by_name() -> None:
    settings = next(settings for name, _, settings in services() if name == "executor")
    assert settings["JITNEY_EXECUTOR_SCHEDULERS"] == "dns:///jitney-scheduler.jitney.svc:50052"


def test_the_container_file_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    subprocess.run([hadolint, "Containerfile"], check=True, cwd=ROOT)
