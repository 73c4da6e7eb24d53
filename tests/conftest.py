"""Hypothesis profiles: `default` in CI; `MOEFP8_HYPOTHESIS_PROFILE=thorough` for long runs.

`fuzz` is for runs as long as wanted, of `MOEFP8_FUZZ_EXAMPLES`; each draws others, and what failed
is kept in `.hypothesis` and drawn first the next time.
"""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from moefp8.kernels import jit
from moefp8.kernels.jit import cache
from tests.kernels.jit.cases import forget
from tests.progress import Progress
from tests.workers import Machine, begin_with_slow_files, let_files_take_turns

quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=40, derandomize=True, **quiet)
settings.register_profile("thorough", max_examples=1000, **quiet)
settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("MOEFP8_FUZZ_EXAMPLES", "2000")),
    derandomize=False,
    print_blob=True,
    **quiet,
)
settings.load_profile(os.environ.get("MOEFP8_HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    return Machine.at_hand().num_workers


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if getattr(session.config.option, "numprocesses", None):
        session.config.pluginmanager.register(Progress(session))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of GPU tests reads the files alone that have some: its start takes half as long."""
    wants_gpu = config.option.markexpr.startswith("gpu")
    return True if wants_gpu and _has_no_gpu_test(collection_path) else None


def _has_no_gpu_test(path: Path) -> bool:
    return path.name.startswith("test_") and path.is_file() and "tests.gpu" not in path.read_text()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    for path in {item.path for item in on_gpu}:
        if _has_no_gpu_test(path):
            raise pytest.UsageError(
                f"{path}: take the mark from tests.gpu, else no GPU run finds it"
            )
    if getattr(config.option, "loadgroup", False):
        let_files_take_turns(items, on_gpu)
    yield  # here tests are left out that no worker runs
    worker = getattr(config, "workerinput", None)
    if worker and not config.option.loadgroup:
        begin_with_slow_files(items, worker["workercount"])


def pytest_collection_finish() -> None:
    """Collections of garbage need not look at thousands of tests: each would take a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


_KEPT_BYTES = 2 << 30  # of a GPU's memory: a process keeps this much of what it has freed


@pytest.fixture(autouse=True)
def _shared_gpu() -> Iterator[None]:
    """Give memory back to the other processes that run tests on the GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Compiled kernels go to a folder of this test."""
    monkeypatch.setenv("MOEFP8_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def fresh_jit(own_cache, monkeypatch):
    """An empty cache, in memory and on disk; nothing is loaded."""
    monkeypatch.delenv("MOEFP8_COMPILER", raising=False)
    forget()
    monkeypatch.setattr(cache, "_num_warned", iter(range(1000)))
    monkeypatch.setattr(cache, "_disk_fails", False)
    with jit.using(jit.Driver()):
        yield
    forget()


@pytest.fixture
def new_driver() -> Iterator[jit.Driver]:
    """A driver with nothing loaded, nothing prepared, and all SMs of the GPU."""
    with jit.using(jit.Driver()) as driver:
        yield driver


@pytest.fixture
def builds() -> list[str]:
    """Keys of made-up kernels that were built."""
    return []


@pytest.fixture
def gpu():
    """A GPU that works on tensors of the CPU; no launch writes around its workspace."""
    from tests.fakes.emulator import emulated

    with emulated() as made:
        yield made
