"""The chance of reuse that a class learns, and what follows for keeping its blocks."""

from __future__ import annotations

import itertools

import numpy as np

from cache_svc.reuse import AGES, WIDTH, ReuseProfile, age_bucket

NOBODY = np.zeros(0, np.int64)


def test_buckets_follow_one_another_without_a_gap() -> None:
    first = [next(age for age in range(1 << 14) if age_bucket(age) == bucket) for bucket in range(24)]
    assert np.diff(first).tolist() == WIDTH[:23].tolist()
    assert age_bucket(1 << 60) == AGES - 1


def test_blocks_that_wait_are_counted_where_their_ages_lie() -> None:
    profile = ReuseProfile(1)
    for age in (0, 1, 2, 3, 5, 100, 4097, (1 << 31) + 7, 1 << 40):
        profile.used(0, age)
    ages = np.array([0, 1, 2, 3, 5, 100, 4097, (1 << 31) + 7, 1 << 40])
    values = profile.learn(np.zeros(len(ages), np.int64), ages)
    assert values.tolist() == [profile.values[0][age_bucket(int(age))] for age in ages]


def test_a_value_never_rises_with_the_age() -> None:
    profile = ReuseProfile(2)
    for age in (3, 70, 71, 72, 900):
        for _ in range(50):
            profile.used(0, age)
            profile.gone(1, age)
    profile.learn(NOBODY, NOBODY)
    for values in profile.values:
        assert all(later <= earlier for earlier, later in itertools.pairwise(values))


def test_a_class_that_is_used_again_is_worth_more_at_every_age_before() -> None:
    profile = ReuseProfile(2)
    for _ in range(200):
        profile.used(0, 500)
        profile.gone(1, 500)
    profile.learn(NOBODY, NOBODY)
    assert all(profile.values[0][age_bucket(age)] > 2 * profile.values[1][age_bucket(age)] for age in (0, 10, 400))


def test_a_class_without_history_is_like_its_habit_and_its_answers() -> None:
    """Of four classes, three are known: a habit that comes back, and answers after which blocks do."""
    profile = ReuseProfile(2, 2)
    for kind, uses in ((0, 10), (1, 100), (2, 100)):
        for _ in range(uses):
            profile.used(kind, 500)
        for _ in range(2000 - uses):
            profile.gone(kind, 500)
    profile.learn(NOBODY, NOBODY)
    values = [profile.values[kind][age_bucket(10)] for kind in range(4)]
    assert values[3] > 2 * max(values[1], values[2]) > 4 * values[0]


def test_one_block_says_little_against_many() -> None:
    """What a class has seen of one block leaves it near all others."""
    profile = ReuseProfile(2)
    for _ in range(1000):
        profile.used(0, 100)
    profile.gone(1, 100)
    profile.learn(NOBODY, NOBODY)
    assert profile.values[1][0] > 0.8 * profile.values[0][0]
