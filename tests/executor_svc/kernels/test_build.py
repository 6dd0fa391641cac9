"""The kernels build, say what they are, and leave their place to torch where they cannot."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from executor_svc import backends
from executor_svc.attention import KVShape
from executor_svc.kernels import build, library
from jitney.errors import InvalidRequest

SHAPE = KVShape(blocks=2, layers=1, block_tokens=8, kv_heads=1, head_size=8, dtype=torch.float16)
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")


def copy_sources(folder: Path) -> Path:
    """The C sources alone."""
    for path in (*build.HERE.glob("*.c"), *build.HERE.glob("*.h")):
        shutil.copy(path, folder)
    return folder


@needs_compiler
def test_built_once_and_replaced_with_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second build finds the first one's library; changed sources give another and remove it."""
    monkeypatch.setattr(build, "PER_ISA", ("rows.c",))  # the quickest
    sources = copy_sources(tmp_path)
    first = build.build(sources)
    assert first.exists() and build.build(sources) == first
    opened = library.open_library(sources)
    assert opened.isas[-1] == "portable" and opened.digest in first.name
    assert opened.digest == build.digest() and opened.digest in opened.describe(opened.isas[0])
    with (sources / "cpu.c").open("a") as file:
        file.write("/* changed */\n")
    second = build.build(sources)
    assert second != first and second.exists() and not first.exists()


@needs_compiler
def test_an_error_of_the_compiler_is_one_line(tmp_path: Path) -> None:
    """It names the compiler and the first error."""
    sources = copy_sources(tmp_path)
    (sources / "cpu.c").write_text("int broken(\n")
    with pytest.raises(build.BuildError, match=r"failed: .*error") as caught:
        build.build(sources)
    assert "\n" not in str(caught.value)
    assert not list(sources.glob("*.so")) and not list(sources.glob("*.tmp"))


def test_without_compiler_torch_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so; a demand for native kernels is refused."""
    sources = copy_sources(tmp_path)
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(build.BuildError, match="no C compiler found"):
        build.build(sources)

    def without() -> library.Library:
        return original(sources)

    original = library.open_library
    monkeypatch.setattr(library, "open_library", without)
    monkeypatch.setattr(backends, "load", library.load.__wrapped__)
    with caplog.at_level(logging.WARNING):
        assert backends.select_backend(SHAPE).name == "torch"
    assert len(caplog.records) == 1 and "no C compiler found" in caplog.text
    with pytest.raises(InvalidRequest, match="do not run here"):
        backends.select_backend(SHAPE, "native")


def test_selection_by_name() -> None:
    """Each name gives its backend; another is refused with the names that there are."""
    for name in ("torch", "plain"):
        backend = backends.select_backend(SHAPE, name)
        assert backend.name == name and name in backend.describe()
    loaded = library.load()
    if loaded is not None:
        assert backends.select_backend(SHAPE).name == backends.select_backend(SHAPE, "native").name
        assert backends.select_backend(SHAPE, "native-portable").name == "native-portable"
        assert loaded.digest in backends.select_backend(SHAPE).describe()
        with pytest.raises(ValueError, match="does not run here"):
            loaded.pick("sse9")
        with pytest.raises(InvalidRequest, match="native-portable, torch, plain") as caught:
            backends.select_backend(SHAPE, "cuda")
        assert (caught.value.field, caught.value.value) == ("attention", "cuda")


def test_shapes_that_nothing_computes_are_refused() -> None:
    """Head size, type and an empty pool."""
    for change in ({"head_size": 12}, {"head_size": 264}, {"blocks": 0}, {"dtype": torch.bfloat16}):
        values = {name: getattr(SHAPE, name) for name in SHAPE.__slots__} | change
        with pytest.raises(ValueError, match=r"multiple of 8|empty|KV type"):
            backends.select_backend(KVShape(**values), "torch")
