"""Shapes and sizes that the dense GEMM is timed at."""

import statistics

from benchmarks.gemm_cases import (
    FITTED,
    HELD_OUT,
    LARGE_MS,
    MORE_SHAPES,
    MS,
    SHAPES,
    cases_of,
    random_cases,
    shapes_of,
)
from moefp8.kernels import BLOCK


def test_no_shape_is_both_fitted_and_held_out():
    assert not set(shapes_of(FITTED)) & set(shapes_of(HELD_OUT))
    assert not set(FITTED) & set(HELD_OUT)


def test_both_sets_have_many_models_and_uncommon_shapes():
    for models in (FITTED, HELD_OUT):
        assert len(models) >= 12
        assert all(models.values())
        shapes = shapes_of(models)
        assert {512, 576, 1024} <= {n for n, _ in shapes}
        assert sum(n % BLOCK != 0 for n, _ in shapes) >= 4
        assert sum(k % BLOCK != 0 for _, k in shapes) >= 4
        assert all(n % 16 == 0 and k % 16 == 0 for n, k in shapes)  # cuBLASLt takes no others


def test_every_m_has_the_shapes_of_deepseek_and_large_ones_have_more():
    cases = cases_of(MS)
    assert len(cases) == len(MS) * len(SHAPES) + len(LARGE_MS) * len(MORE_SHAPES)
    assert {(case.n, case.k) for case in cases if case.m == 512} == {*SHAPES}
    assert {(case.n, case.k) for case in cases if case.m == 8192} == {*SHAPES, *MORE_SHAPES}
    assert cases_of((1, 4096), [(64, 128)]) == [(1, 64, 128), (4096, 64, 128)]


def test_random_cases_are_the_same_every_time_and_of_any_magnitude():
    cases = random_cases(HELD_OUT)
    assert cases == random_cases(HELD_OUT)
    assert cases != random_cases(HELD_OUT, seed=1)
    assert len(set(cases)) == 200
    assert {(case.n, case.k) for case in cases} <= set(shapes_of(HELD_OUT))
    ms = [case.m for case in cases]
    assert min(ms) >= 1
    assert max(ms) <= 16384
    assert 64 < statistics.median(ms) < 256  # the root of 16384 is 128
