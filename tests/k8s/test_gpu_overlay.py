"""The overlay for GPUs is valid over the base, and asks for what a GPU executor needs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from executor_svc.config import ExecutorConfig

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "k8s" / "overlays" / "gpu"
VERSION = "1.32"


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge as far as the patch needs one: lists of named entries by their names, other lists replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {key: merged(base.get(key), patch[key]) if key in patch else base[key] for key in {**base, **patch}}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in entry for entry in (*base, *patch)):
        named = {entry["name"]: entry for entry in patch}
        old = [merged(entry, named.pop(entry["name"], entry)) for entry in base]
        return [*old, *named.values()]
    return patch


def executor() -> dict[str, Any]:
    """The StatefulSet of the overlay: through kustomize, or merged here where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        text = subprocess.run([kubectl, "kustomize", str(OVERLAY)], check=True, capture_output=True, text=True).stdout
        documents = list(yaml.safe_load_all(text))
    else:
        patch = yaml.safe_load((OVERLAY / "executor.yaml").read_text())
        base = yaml.safe_load_all((ROOT / "k8s" / "base" / "executor.yaml").read_text())
        documents = [merged(document, patch) for document in base if document["kind"] == patch["kind"]]
    (found,) = (document for document in documents if document and document["kind"] == "StatefulSet")
    kubernetes_validate.validate(found, VERSION, strict=True)
    return found  # type: ignore[no-any-return]


def test_the_overlay_names_files_that_are_there() -> None:
    overlay = yaml.safe_load((OVERLAY / "kustomization.yaml").read_text())
    assert all((OVERLAY / name).resolve().is_dir() for name in overlay["resources"])
    assert all((OVERLAY / patch["path"]).is_file() for patch in overlay["patches"])


def test_an_executor_gets_a_gpu_and_settings_that_exist() -> None:
    pod = executor()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    settings = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    known = {f"JITNEY_EXECUTOR_{field.name.upper()}" for field in fields(ExecutorConfig)} | {
        "JITNEY_CACHE_DIR",
        "CUPY_CACHE_DIR",
    }
    assert set(settings) <= known
    assert settings["JITNEY_EXECUTOR_BACKEND"] == "cupy_cuda"
    assert settings["JITNEY_EXECUTOR_CACHE"] == "127.0.0.1:50053"  # the base's are still there
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_the_memory_volume_holds_the_cpu_tier_and_the_cache_may_take_it() -> None:
    pod = executor()["spec"]["template"]["spec"]
    (cache,) = (container for container in pod["initContainers"] if container["name"] == "cache")
    (tier,) = (int(entry["value"]) for entry in cache["env"] if entry["name"] == "JITNEY_CACHE_CPU_BYTES")
    (volume,) = (each for each in pod["volumes"] if each["name"] == "memory")
    size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30
    limit = int(cache["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert tier < size < limit
    assert {volume["name"] for volume in pod["volumes"]} == {"memory", "tmp"}
