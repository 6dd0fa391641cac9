"""Generates the gRPC stubs from protos/ beside their packages; `python -m jitney.build_stubs` does it.

The stubs are never edited nor committed. They are made again only when a .proto file changed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = ROOT / "build" / "stubs.digest"


def sources() -> list[Path]:
    """Every .proto file."""
    return sorted((ROOT / "protos").rglob("*.proto"))


def digest() -> str:
    """Of the sources and of the generator."""
    state = hashlib.sha256(importlib.metadata.version("grpcio-tools").encode())
    for path in sources():
        state.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


def outputs() -> list[Path]:
    """The files that are generated."""
    stems = [ROOT / path.relative_to(ROOT / "protos").with_suffix("") for path in sources()]
    return [stem.with_name(stem.name + end) for stem in stems for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")]


def build(force: bool = False) -> bool:
    """Generates what is missing or old; whether there was anything to do."""
    if not sources():
        raise FileNotFoundError(f"no .proto files under {ROOT / 'protos'}")
    current = digest()
    done = STAMP.exists() and STAMP.read_text(encoding="ascii") == current and all(p.exists() for p in outputs())
    if done and not force:
        return False
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos"]
    command += ["--python_out=.", "--pyi_out=.", "--grpc_python_out=."]
    subprocess.run([*command, *(str(path.relative_to(ROOT)) for path in sources())], cwd=ROOT, check=True)
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.write_text(current, encoding="ascii")
    return True


if __name__ == "__main__":
    sys.stdout.write("stubs generated\n" if build() else "stubs are up to date\n")
