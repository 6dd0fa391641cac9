"""The counter-based generator against the known answers of its authors, and its numbers as numbers."""

from __future__ import annotations

import numpy as np
import pytest

from executor_svc.philox import philox, uniform

KNOWN = [  # counter, key, result: kat_vectors of Random123, philox4x32 with 10 rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    k0, k1 = (np.array([word], np.uint64) for word in key)
    assert tuple(int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))) == expected


def test_numbers_are_uniform_and_in_range() -> None:
    count = 20000
    numbers = uniform(np.full(count, 7, np.uint64), np.zeros(count, np.int32), np.arange(count, dtype=np.int32))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    histogram = np.histogram(numbers, bins=20, range=(0.0, 1.0))[0]
    chi_square = float(((histogram - count / 20) ** 2 / (count / 20)).sum())
    assert chi_square < 50.0  # 19 degrees of freedom: above 43.8 once in a thousand draws; the seed is fixed


def test_every_part_of_the_key_counts() -> None:
    base = {"seed": 1, "choice": 2, "position": 3, "draw": 0}
    variants = [base, *({**base, name: value + 1} for name, value in base.items()), {**base, "seed": 1 << 40}]
    numbers = {
        float(uniform(np.array([v["seed"]], np.uint64), _one(v["choice"]), _one(v["position"]), v["draw"])[0])
        for v in variants
    }
    assert len(numbers) == len(variants)


def _one(value: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([value], np.int32)
