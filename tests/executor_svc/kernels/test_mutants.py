"""Kernels with one mistake each: the checks of the conformance suite must see every one of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.attention_native import NativeAttention
from executor_svc.kernels import build
from executor_svc.kernels.library import Library, load
from executor_svc.model.native_linear import KINDS, NativeLinear
from tests.support.attention_cases import Content, Span
from tests.support.kernel_sources import built_with

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler"),
]

UNTOUCHED = ("product.h", "#define STREAMS 3", "#define STREAMS 3")
SPANS = (Span(0, 100, 100), Span(1, 306, 4), Span(2, 17))
MUTANTS = {
    "sees the next token": ("tile.h", "row / w->group + 1;", "row / w->group + 2;"),
    "does not see itself": ("tile.h", "row / w->group + 1;", "row / w->group;"),
    "counts lanes behind the context": (
        "tile.h",
        "v_pick(valid, v_exp2(v_load(scores + whole) - v_set(peak)), v_set(0.0f))",
        "v_exp2(v_load(scores + whole) - v_set(peak))",
    ),
    "weighs some positions twice": ("tile.h", "if (shared < from) shared = from;", ""),
    "forgets to scale the tiles before": ("tile.h", "now, v_set(*sum) * before)[0]", "now, v_set(*sum))[0]"),
    "takes the values of the next token": (
        "paged_attention.c",
        "tile->values[t] = start + values + place * row_bytes;",
        "tile->values[t] = start + values + (place + 1) % job->block_tokens * row_bytes;",
    ),
    "rounds a lone row otherwise": (
        "tile.h",
        "sums[r][j] = v_fma(p, v[j], sums[r][j]);",
        "sums[r][j] = rows > 1 ? v_fma(p, v[j], sums[r][j]) : sums[r][j] + p * v[j] * v_set(1.0000001f);",
    ),
    "stores values rounded towards zero": (
        "pool.h",
        "v_store_half(to + i, v_load(from + i));",
        "v_store_half(to + i, v_load(from + i) * v_set(0.9998f));",
    ),
    "stores keys rounded towards zero": (
        "pool.h",
        "v_store_half(halves, v_load(from + i));",
        "v_store_half(halves, v_load(from + i) * v_set(0.9998f));",
    ),
    "mixes up dimensions of keys": ("pool.h", "(i + j) * stride] = halves[j]", "(i + j) * stride] = halves[j ^ 1]"),
}


PRODUCT_MUTANTS = {
    "adds twice": ("linear.c", "out[c] = add ? out[c] + value : value;", "out[c] = add ? 2 * out[c] + value : value;"),
    "leaves out the last input": (
        "product.h",
        "for (int64_t i = 0; i < inputs; i++, weights += PANEL, ahead += 2 * PANEL) {",
        "for (int64_t i = 0; i + 1 < inputs; i++, weights += PANEL, ahead += 2 * PANEL) {",
    ),
    "leaves out the last group": (
        "product.h",
        "groups_of(m->inputs), bytes = pair_bytes(kind);\n",
        "m->inputs / GROUP, bytes = pair_bytes(kind);\n",
    ),
    "takes one scale for all rows": ("product.h", "v_set(steps[r * groups])", "v_set(steps[0])"),
    "takes one scale for all groups": ("product.h", "scales, steps + g, groups", "scales, steps, groups"),
    "widens for many rows otherwise": (
        "product.h",
        "v_store(wide + i, v_load_half(weights + i));",
        "v_store(wide + i, v_load_half(weights + i) * v_set(1.000001f));",
    ),
    "measures a row by what lies before it": (
        "linear.c",
        "SHARE_ROWS(worker, r, rows)\n            quantise_row(x + r * stride,",
        "SHARE_ROWS(worker, r, rows)\n            quantise_row(x + (r ? r - 1 : 0) * stride,",
    ),
    "skips a block of rows": (
        "linear.c",
        "(rows + BLOCK_ROWS - 1) / BLOCK_ROWS",
        "(rows + BLOCK_ROWS - 2) / BLOCK_ROWS",
    ),
}


def products_are_right(library: Library) -> bool:
    """Whether products of every kind have the right values, and the same bits whatever the other rows are."""
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(70, 193, generator=random), torch.randn(97, 193, generator=random)
    x *= torch.logspace(-2, 2, 97)[:, None]
    for form in KINDS:
        linear = NativeLinear(weight, None, library, library.isas[0], form)
        out = torch.ones(97, 70)
        linear.add_to(out, x)
        expected, tolerance = 1 + x.double() @ weight.double().T, x.abs().amax(dim=1, keepdim=True) * 0.2 + 1e-3
        alone = torch.cat([linear(x[i : i + 1]) for i in range(97)])
        if not ((out - expected).abs() < tolerance).all() or not torch.equal(linear(x), alone):
            return False
    return True


def is_right(library: Library) -> bool:
    """Whether the best kernels give the right numbers, and the same bits for the same row in other company."""
    content = Content([span.end for span in SPANS], kv_heads=2, group=3)
    outs = []
    for split in (False, True):
        backend = NativeAttention(content.shape, library)
        backend.pool.fill_(float("nan"))
        before = [Span(i, span.end - span.queries, span.end - span.queries) for i, span in enumerate(SPANS)][1:]
        content.run(backend, before)
        steps = [[Span(s.sequence, s.end - s.queries + i + 1) for i in range(s.queries)] for s in SPANS]
        parts = [content.run(backend, [one]) for step in steps for one in step] if split else []
        outs.append(torch.cat(parts) if split else content.run(backend, SPANS))
    close = np.allclose(outs[0].numpy(), content.expected(SPANS), rtol=2e-5, atol=5e-6)
    return close and torch.equal(*outs)


@pytest.mark.parametrize("mutant", [None, *MUTANTS, *PRODUCT_MUTANTS])
def test_mutant(mutant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untouched sources pass, mutants do not."""
    library = load()
    assert library is not None
    best = library.isas[0]
    flags = build.isa_flags()[best]
    monkeypatch.setattr(build, "isa_flags", lambda: {best: flags})
    changed = built_with(tmp_path, *(MUTANTS | PRODUCT_MUTANTS | {None: UNTOUCHED})[mutant])
    assert is_right(changed) == (mutant not in MUTANTS)
    assert products_are_right(changed) == (mutant not in PRODUCT_MUTANTS)


def test_machines_without_vnni_give_the_same_bits(tmp_path: Path) -> None:
    """Sums of whole products are exact, by one instruction or by two."""
    library = load()
    assert library is not None
    without = built_with(tmp_path, "cpu.c", '__builtin_cpu_supports("avx512vnni") != 0', "0")
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(200, 577, generator=random), torch.randn(30, 577, generator=random)
    for isa in library.isas:
        for form in ("int8", "int16"):
            one, other = (NativeLinear(weight, None, each, isa, form)(x) for each in (library, without))
            assert torch.equal(one, other)
