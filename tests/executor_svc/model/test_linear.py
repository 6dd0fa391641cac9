"""Packed linear layers: right products in every form, and rows that do not feel each other."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kernels.library import load
from executor_svc.model.linear import FbgemmLinear, Fp32Linear, Linear, Packer, has_fbgemm
from executor_svc.model.native_linear import GROUP, Form, NativeLinear
from executor_svc.model.probe import probe_layers
from jitney.errors import InvalidRequest

LIBRARY = load()
FORMS = ["fp32", *(["fbgemm"] if has_fbgemm() else []), *(LIBRARY.isas if LIBRARY is not None else ())]
SHAPES = [(1, 1), (64, 24), (65, 33), (200, 576), (128, 1)]  # outputs, inputs


def layer(form: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The layer in one form: fp32, fbgemm, or native for an instruction set."""
    if form == "fp32":
        return Fp32Linear(weight, bias)
    if form == "fbgemm":
        return FbgemmLinear(weight, bias)
    assert LIBRARY is not None
    return NativeLinear(weight, bias, LIBRARY, form)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 6, 13, 100])
def test_products_are_right(form: str, outputs: int, inputs: int, rows: int) -> None:
    weight, bias, x = random(outputs, inputs), random(outputs, seed=1), random(rows, inputs, seed=2)
    if form != "fp32":
        weight = weight.half().float()
    expected = x.double() @ weight.double().T
    tolerance = 1e-6 * inputs + 1e-6
    assert (layer(form, weight)(x) - expected).abs().max() < tolerance
    assert (layer(form, weight, bias)(x) - expected - bias).abs().max() < tolerance
    before = random(rows, outputs, seed=3)
    out = before.clone()
    layer(form, weight, bias).add_to(out, x)
    assert (out - before - expected - bias).abs().max() < tolerance


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("fp32", "fbgemm")])
def test_rows_may_lie_in_wider_ones(form: str) -> None:
    weight, wide = random(70, 48).half().float(), random(9, 100, seed=1)
    out = torch.full((9, 90), 7.0)
    layer(form, weight).add_to(out[:, 5:75], wide[:, 2:50])
    expected = 7.0 + wide[:, 2:50].double() @ weight.double().T
    assert (out[:, 5:75] - expected).abs().max() < 1e-4
    assert (out[:, :5] == 7.0).all() and (out[:, 75:] == 7.0).all()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_a_multiple(form: str) -> None:
    layers = [(layer(form, random(*shape)), 512) for shape in ((192, 64), (60, 96))]
    found = probe_layers(layers)
    assert found.invariant
    assert found.multiple <= 12
    if form not in ("fp32", "fbgemm"):
        assert found.multiple == 1


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("fp32", "fbgemm")])
def test_threads_change_no_bit(form: str) -> None:
    weight, x = random(500, 300), random(200, 300, seed=1)
    one = layer(form, weight)(x)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(layer(form, weight)(x), one)
        assert torch.equal(layer(form, weight)(x[37:41]), one[37:41])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("form", FORMS)
def test_weights_beyond_half_precision_stay_finite(form: str) -> None:
    weight = torch.tensor([[1e6, -1e6, 1e-9]])
    assert torch.isfinite(layer(form, weight)(torch.ones(1, 3))).all()


@pytest.mark.parametrize("isa", LIBRARY.isas if LIBRARY is not None else ())
@pytest.mark.parametrize("form", ["int8", "int16"])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-42, 1e-40, 1e-38, 1e-37, 1e-36])
def test_weights_near_the_end_of_float32_stay_finite(isa: str, form: Form, size: float) -> None:
    assert LIBRARY is not None
    weight, x = size * random(3, 70), random(5, 70, seed=1)
    result = NativeLinear(weight, None, LIBRARY, isa, form)(x)
    assert (result - x.double() @ weight.double().T).abs().max() <= 0.02 * weight.abs().max() * 70 + 1e-40


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("native", [True, False])
def test_weights_come_in_any_float_type(stored: torch.dtype, native: bool) -> None:
    weight, x = random(40, 24), random(5, 24, seed=1)
    for packer in (Packer("fp32", native), Packer("fp16", native)):
        result = packer.pack(weight.to(stored), torch.zeros(40, dtype=stored))(x)
        assert (result - x @ weight.to(stored).float().T).abs().max() < 2e-2


def eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """What remains of `[outputs, inputs]`: 255 steps for each 64 inputs of an output."""
    outputs, inputs = weight.shape
    grouped = torch.nn.functional.pad(weight.double(), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    steps = (grouped.abs().amax(dim=2, keepdim=True) / 127.0).clamp_min(1e-30)
    return ((grouped / steps).round() * steps).view(outputs, -1)[:, :inputs]


@pytest.mark.parametrize("isa", LIBRARY.isas if LIBRARY is not None else ())
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (70, 129), (33, 1536)])
@pytest.mark.parametrize("rows", [1, 7, 12, 100])
def test_products_of_eight_bits(isa: str, outputs: int, inputs: int, rows: int) -> None:
    """As exact as 255 steps for each 64 weights of an output allow, whatever the other rows are."""
    assert LIBRARY is not None
    weight, bias, x = random(outputs, inputs), random(outputs, seed=1), random(rows, inputs, seed=2)
    x *= torch.logspace(-6, 6, rows)[:, None]
    layer = NativeLinear(weight, bias, LIBRARY, isa, "int8")
    exact, ideal = x.double() @ weight.double().T, x.double() @ eight_bits(weight).T
    error = (layer(x) - bias - exact).square().mean(dim=1).sqrt()
    scale = x.double().square().sum(dim=1).sqrt() * weight.abs().max()  # of which scales in half precision miss some
    assert (error < 1.2 * (ideal - exact).square().mean(dim=1).sqrt() + 1e-3 * scale + 1e-6).all()
    for row in range(0, rows, 5):
        assert torch.equal(layer(x[row : row + 1])[0], layer(x)[row])
    out = bias.repeat(rows, 1)
    layer.add_to(out, x)
    assert torch.allclose(out, layer(x) + bias)


@pytest.mark.parametrize("isa", LIBRARY.isas if LIBRARY is not None else ())
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (70, 129), (33, 1536)])
@pytest.mark.parametrize("rows", [1, 4, 7, 100])
def test_products_of_sixteen_bits(isa: str, outputs: int, inputs: int, rows: int) -> None:
    """No less exact than weights in half precision, whatever the other rows are."""
    assert LIBRARY is not None
    weight, bias, x = random(outputs, inputs), random(outputs, seed=1), random(rows, inputs, seed=2)
    layer = NativeLinear(weight, bias, LIBRARY, isa, "int16")
    exact, halves = x.double() @ weight.double().T, x.double() @ weight.half().double().T
    error = (layer(x) - bias - exact).double().square().mean().sqrt()
    assert error < 1.2 * (halves - exact).square().mean().sqrt() + 1e-4
    for row in range(0, rows, 5):
        assert torch.equal(layer(x[row : row + 1])[0], layer(x)[row])


@pytest.mark.parametrize("isa", LIBRARY.isas if LIBRARY is not None else ())
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_of_sixteen_bits_have_room(isa: str, sign: float) -> None:
    """The largest activations times weights whose magnitudes fill a group, in every form that fills it most."""
    assert LIBRARY is not None
    even, one = torch.ones(1, 2 * GROUP), torch.nn.functional.one_hot(torch.tensor([5]), 2 * GROUP).float()
    ramp, odd = torch.linspace(0.01, 1.0, 2 * GROUP)[None], 0.75 * even + 1e-3 * random(1, 2 * GROUP).sign()
    weight = torch.cat([even, one, ramp, odd, 1e-20 * even, 1e-3 * even])
    x = sign * weight.sign()
    full = NativeLinear(weight, None, LIBRARY, isa, "int16")(x).diagonal()
    assert torch.allclose(full, sign * weight.abs().sum(dim=1), rtol=3e-4, atol=1e-9)


@pytest.mark.parametrize("isa", LIBRARY.isas if LIBRARY is not None else ())
@pytest.mark.parametrize("form", ["int8", "int16"])
def test_extreme_rows_of_whole_numbers(isa: str, form: Form) -> None:
    """Rows and weights of nothing give nothing; what is not finite stays visible, in its row only."""
    assert LIBRARY is not None
    weight = torch.cat([random(20, 64), torch.zeros(20, 64), 1e9 * torch.ones(1, 64)])
    x = random(4, 64, seed=1)
    x[1], x[2, 5], x[3, 6] = 0.0, torch.nan, torch.inf
    out = NativeLinear(weight, None, LIBRARY, isa, form)(x)
    assert torch.isfinite(out[:2]).all() and (out[1] == 0.0).all() and (out[0, 20:40] == 0.0).all()
    assert out[2].isnan().all() and not torch.isfinite(out[3]).any()


@pytest.mark.parametrize("form", ["int8", "int16"])
def test_whole_numbers_are_native_only(form: Form) -> None:
    with pytest.raises(InvalidRequest, match=f"{form} weights need the native kernels"):
        Packer(form, native=False)
