"""Policies of an operator's own: a class in a Python file, beside the ones that Jitney brings along.

The file is code that runs in the scheduler: who may name it, may do anything. It is read once. The build that such a
scheduler decides as names the file's digest, so that replay refuses to confuse two versions of it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from jitney.errors import InvalidRequest
from scheduler_svc.policies import BUILT_IN, PolicyBook
from scheduler_svc.policies.base import Policy

FIELD = "policy"


def with_custom(spec: str, book: PolicyBook = BUILT_IN) -> PolicyBook:
    """`book` with the policy of `spec`, "path/to/file.py:ClassName"; `book` itself for an empty one.

    InvalidRequest if there is no such file or class, or if it is not a policy that can be told from the others.
    """
    if not spec:
        return book
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise _refused(f"{spec!r} names no file; a policy of your own is given as path.py:ClassName", spec)
    source = path.read_bytes()
    kind = _load(path, name, spec)
    if any(kind.name == other.name for other in book.kinds):
        raise _refused(f"policy {spec} is named {kind.name!r}, as another one is", spec)
    kinds = tuple(sorted((*book.kinds, kind), key=lambda other: other.name))
    return PolicyBook(kinds, f"{book.build}+{kind.name}.{hashlib.sha256(source).hexdigest()[:12]}")


def _load(path: Path, name: str, spec: str) -> type[Policy]:
    loader = importlib.util.spec_from_file_location(f"jitney_policy_{path.stem}", path)
    if loader is None or loader.loader is None:
        raise _refused(f"{path} is no Python file", spec)
    module = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        raise _refused(f"{path} cannot be loaded: {type(error).__name__}: {error}", spec) from error
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise _refused(f"{path} has no policy {name!r}: a class derived from scheduler_svc.policies.base.Policy", spec)
    if kind.__abstractmethods__ or not isinstance(getattr(kind, "name", None), str) or not kind.name.isascii():
        raise _refused(f"policy {spec} needs `name`, `summary` and `rank`", spec)
    return kind


def _refused(message: str, spec: str) -> InvalidRequest:
    return InvalidRequest(message, field=FIELD, limit="path.py:ClassName", value=spec)
