"""Which of many cases a run of the tests takes."""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

T = TypeVar("T")
ALL_KERNELS = os.environ.get("MOEFP8_TEST_ALL_KERNELS") == "1"  # `make verify-compilers` says so


def sample(cases: Iterable[T], axes: Callable[[T], tuple[Hashable, ...]], strength: int) -> list[T]:
    """Few of the cases, each time the same, or all of them with MOEFP8_TEST_ALL_KERNELS=1.

    `axes` gives a case's values on some axes. Whatever values any case has on `strength` axes at
    once, a case of the sample has them, too.
    """
    of_case = {case: set(combinations(enumerate(axes(case)), strength)) for case in cases}
    if ALL_KERNELS:
        return list(of_case)
    left = set().union(*of_case.values())
    taken = []
    while left:
        best = max(of_case, key=lambda case: len(of_case[case] & left))
        left -= of_case[best]
        taken.append(best)
    return taken


def pairs(
    *axes: Sequence[Any], where: Callable[..., bool] = lambda *_: True
) -> list[tuple[Any, ...]]:
    """Few of the cases of all axes, of those `where`: values of two axes that meet in any of them
    meet in one that is taken.
    """
    cases = {
        places: tuple(axis[i] for axis, i in zip(axes, places, strict=True))
        for places in product(*(range(len(axis)) for axis in axes))
    }
    possible = [places for places, case in cases.items() if where(*case)]
    return [cases[places] for places in sample(possible, lambda places: places, 2)]
