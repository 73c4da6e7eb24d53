"""Tools that only a GPU or a hand runs: files that move break them, and no other test sees it."""

from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATHS = [
    path.relative_to(ROOT).with_suffix("")
    for path in sorted(
        chain.from_iterable((ROOT / at).rglob("*.py") for at in ("benchmarks", "tests"))
    )
    if not path.name.startswith(("test_", "conftest", "__init__"))
]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_it_imports_without_a_gpu(path):
    if path.parent == Path("benchmarks/serving") and path.name in ("sglang", "vllm"):
        pytest.importorskip(path.name)
    import_module(".".join(path.parts))


def test_shares_of_the_sanitizer_are_all_its_launches():
    sanitizer = import_module("tests.kernels.sanitizer.__main__")
    num_launches = sum(1 for _ in sanitizer.launches())
    shares = [sum(1 for _ in sanitizer.launches_of(which, 8)) for which in range(1, 9)]
    assert num_launches == sum(shares) > 8
    assert max(shares) - min(shares) <= 1
