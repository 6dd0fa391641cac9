"""The probe finds the multiple of kernels that have one, and says so when there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from executor_svc.model import probe
from executor_svc.model.linear import pad_rows
from executor_svc.model.probe import RowMultiple, probe_cached, probe_layers


class GroupedLinear:
    """Rows in groups of `group` are computed one way, the rest of them another way."""

    def __init__(self, group: int, *, from_rows: int = 0) -> None:
        self.inputs, self.outputs = 32, 16
        self.group, self.from_rows = group, from_rows
        self._weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        products = x[:, None, :] * self._weight
        result = products.sum(dim=-1)
        whole = len(x) - len(x) % self.group if len(x) >= self.from_rows else len(x)
        result[whole:] += 1e-3
        return result

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out += self(x)


@pytest.mark.parametrize("group", [1, 3, 4, 6, 8, 12, 48])
def test_the_group_is_found(group: int) -> None:
    assert probe_layers([(GroupedLinear(group), 300)]) == RowMultiple(group, invariant=True)


def test_groups_that_only_large_counts_have_are_found() -> None:
    assert probe_layers([(GroupedLinear(8, from_rows=500), 2048)]).multiple == 8


def test_several_layers_need_a_common_multiple() -> None:
    assert probe_layers([(GroupedLinear(4), 100), (GroupedLinear(6), 100)]).multiple == 12


def test_without_a_multiple_nothing_is_promised() -> None:
    assert probe_layers([(GroupedLinear(7), 300)]) == RowMultiple(1, invariant=False)


def test_the_answer_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [(GroupedLinear(4), 100)]
    found = probe_cached(layers, "this machine", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(probe, "probe_layers", None)
        assert probe_cached(layers, "this machine", tmp_path) == found
    file = next((tmp_path / "probes").iterdir())
    for content in ("", "{", json.dumps({"key": "another"}), json.dumps(["no object"])):
        file.write_text(content)
        assert probe_cached(layers, "this machine", tmp_path) == found


def test_padding_reaches_the_next_multiple() -> None:
    assert [pad_rows(rows, 6) for rows in (0, 1, 6, 7)] == [0, 6, 6, 12]
