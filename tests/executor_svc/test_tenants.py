"""What each tenant may have: read from a file, and in force at the door of a running executor."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_svc.tenants import TenantLimits, Tenants, read_tenants
from jitney.client import Client, Options
from jitney.errors import InvalidRequest, TooLarge
from tests.support.house import SMALL, tiny_house

FILE = """
[default]
max_priority = 10

[gold]
weight = 2.5
max_priority = 50
max_rows = 4

[small]
max_waiting_tokens = 20
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    assert read_tenants(path) == Tenants(
        {
            "gold": TenantLimits(weight=2500, max_priority=50, max_rows=4),
            "small": TenantLimits(max_waiting_tokens=20),
        },
        TenantLimits(max_priority=10),
    )


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[a]\nmax_priority = 101", "tenants.a.max_priority"),
        ("[a]\nmax_rows = -1", "tenants.a.max_rows"),
        ("[a]\nmax_rows = true", "tenants.a.max_rows"),
        ("[a]\nweight = 0", "tenants.a.weight"),
        ("[a]\nweight = 'x'", "tenants.a.weight"),
        ("[a]\ncolour = 1", "tenants.a.colour"),
        ("a = 1", "tenants.a"),
        ("[a", "tenants"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        read_tenants(path)
    assert refused.value.field == field


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_tenants(tmp_path / "absent.toml")


def test_limits_hold_at_the_door(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    with tiny_house(executor_args=(*SMALL, f"--tenants={path}")) as house, Client(house.executor_target) as client:
        ids = [5, 6, 7]
        assert client.generate_once(ids, Options(max_tokens=1, tenant="gold", priority=50)).token_ids
        assert client.generate_once(ids, Options(max_tokens=1, priority=10)).token_ids
        for options, limit in (
            (Options(max_tokens=1, tenant="gold", priority=51), "-100 to 50"),
            (Options(max_tokens=1, priority=11), "-100 to 10"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                client.generate_once(ids, options)
            assert (refused.value.field, refused.value.limit) == ("priority", limit)
        with pytest.raises(TooLarge) as full:
            client.generate_once(list(range(5, 35)), Options(max_tokens=1, tenant="small"))
        assert (full.value.field, full.value.limit, full.value.value) == ("tenant_queue_tokens", "20", "30")
