"""The structure of the code, held against its rules: who may import whom, and how long things may get.

Rules: docs/where-does-my-code-go.md. A rule is broken by changing it here first, with the reason.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("scheduler_svc", "executor_svc", "cache_svc")
PACKAGES = ("jitney", *SERVICES, "simulator")
STUBS = ("jitney.scheduler.v1", "jitney.executor.v1", "jitney.cache.v1")

# Where torch may be: what touches weights, activations, the KV pool or samples.
TORCH = ("model", "attention", "kernels", "blocks", "copies", "sampling")
# What a pure core must not have: a clock, a random source, the environment, input and output, threads.
IMPURE = {
    "asyncio",
    "concurrent",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "shutil",
    "signal",
    "socket",
}
IMPURE |= {"subprocess", "sys", "tempfile", "threading", "time", "uuid"}
PURE_CORES = ("scheduler_svc.decide", "cache_svc.ledger")
READS_ITSELF = "scheduler_svc.build"
"""The one exception: it reads its own sources, once, to give the build a name that decisions carry."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name, generated stubs left out."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith(STUBS):
                found[name] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from runtime_nodes(child)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that a module imports when it runs, inside functions too."""
    known = modules()
    names: set[str] = set()
    for node in runtime_nodes(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names.add(module)
            names |= {f"{module}.{alias.name}" for alias in node.names if f"{module}.{alias.name}" in known}
    return frozenset(names)


def top(name: str) -> str:
    return name.partition(".")[0]


def reachable(start: str) -> dict[str, Path]:
    """The modules of the tree that `start` imports, directly or not, with itself."""
    known, found, todo = modules(), dict[str, Path](), [start]
    while todo:
        name = todo.pop()
        if name in known and name not in found:
            found[name] = known[name]
            todo += imports(known[name])
    return found


def test_there_is_something_to_look_at() -> None:
    known = modules()
    assert {"jitney.columns", *PURE_CORES, "executor_svc.loop"} <= set(known)
    assert len(known) > 50


def test_services_import_jitney_and_never_each_other() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imports(path)
        if top(name) in SERVICES and top(other) in {*PACKAGES, "tests", "bench"} - {"jitney", top(name)}
    ]
    assert not wrong


def test_jitney_imports_no_service() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imports(path)
        if top(name) == "jitney" and top(other) in {*PACKAGES, "tests", "bench"} - {"jitney"}
    ]
    assert not wrong


@pytest.mark.parametrize("core", PURE_CORES)
def test_pure_cores_stand_on_the_standard_library_and_numpy(core: str) -> None:
    wrong = []
    for name, path in reachable(core).items():
        for other in imports(path) if name != READS_ITSELF else ():
            foreign = top(other) not in (*PACKAGES, "numpy") and top(other) not in sys.stdlib_module_names
            if foreign or top(other) in IMPURE or other.startswith(STUBS):
                wrong.append(f"{name} imports {other}")
    assert not wrong


@pytest.mark.parametrize("start", ["executor_svc.loop", *(name for name in modules() if top(name) == "simulator")])
def test_loop_and_simulator_run_without_grpc_and_torch(start: str) -> None:
    """The simulator may encode snapshots (the codec needs protobuf), the loop does not even know that they travel."""
    banned = {"grpc", "torch", "cupy"} | ({"google"} if top(start) == "executor_svc" else set())
    wrong = [
        f"{name} imports {other}"
        for name, path in reachable(start).items()
        for other in imports(path)
        if top(other) in banned or other.endswith("_pb2_grpc")
    ]
    assert not wrong


def test_columns_and_keys_load_without_grpc() -> None:
    for start in ("jitney.columns", "jitney.keys", "jitney.snapshot", "jitney.decision", "jitney.block_ops"):
        assert not {top(other) for path in reachable(start).values() for other in imports(path)} & {"grpc", "google"}


def test_torch_stays_where_the_arithmetic_is() -> None:
    wrong = [
        name
        for name, path in modules().items()
        if {"torch", "cupy"} & {top(other) for other in imports(path)}
        and not (top(name) == "executor_svc" and name.split(".")[1].startswith(TORCH))
    ]
    assert not wrong


@pytest.mark.parametrize("service", SERVICES)
def test_inside_a_service_nothing_imports_upwards(service: str) -> None:
    shell = {"__main__", "service", "server"}  # `service` puts the parts of a service together.
    may_import = {"server": shell, "config": shell, "service": shell, "__main__": set[str]()}
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imports(path)
        if top(name) == service and other in {f"{service}.{part}" for part in may_import}
        if name.removeprefix(f"{service}.") not in may_import[other.removeprefix(f"{service}.")]
    ]
    assert not wrong


def test_only_config_reads_the_environment() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "environb", "getenv")
        and name.rpartition(".")[2] != "config"
    ]
    assert not wrong


def test_files_and_functions_stay_short() -> None:
    wrong = []
    for name, path in modules().items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{name}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{name}.{node.name}: {length} lines, at most {MAX_FUNCTION_LINES}")
    assert not wrong


def test_every_module_says_what_it_is() -> None:
    assert not [name for name, path in modules().items() if not ast.get_docstring(tree(path))]


def test_nothing_is_left_unfinished() -> None:
    marks = ("TODO", "FIXME", "XXX", "raise NotImplementedError")
    wrong = [
        f"{name}: {mark}"
        for name, path in modules().items()
        for mark in marks
        if mark in path.read_text(encoding="utf-8")
    ]
    assert not wrong
