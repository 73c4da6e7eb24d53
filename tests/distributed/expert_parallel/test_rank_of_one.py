"""A whole layer whose tokens travel by kernels, on a CPU: a group of one rank.

Push and give back are the kernels' own text; a stand-in does what all others would. The cases are
those that the sanitizer runs on a GPU.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from moefp8.kernels import jit
from moefp8.routing import plan_launch
from tests.distributed.expert_parallel.peers_cases import GIVE_BACK, PUSH, HostGroup, build
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.kernels.sanitizer import ranks

NEEDS_GROUPED_MM_ON_A_CPU = pytest.mark.skipif(
    not hasattr(nn.functional, "grouped_mm"), reason="torch's grouped_mm runs on a CPU from 2.10 on"
)


class WithExchange(cuda_on_cpu.OnCpu):
    """Kernels of the exchange and of a plan run; others are emulated."""

    def compute(self, made, parameters):
        if made.kernel.name in self.functions:
            super().compute(made, parameters)
        else:
            super(cuda_on_cpu.OnCpu, self).compute(made, parameters)


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    plans = [plan_launch.kernel_of(ahead) for ahead in (1, 4)]
    return build([*PUSH, *GIVE_BACK, *plans], tmp_path_factory)


@pytest.fixture
def gpu(functions, monkeypatch) -> Iterator[FakeDriver]:
    """A GPU whose memory is that of the CPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    monkeypatch.setattr(nn.Module, "cuda", lambda x: x)
    monkeypatch.setattr("tests.distributed.expert_parallel.local_ranks.ExpertGroup", HostGroup)
    with jit.using(FakeDriver(library=WithExchange(functions))) as driver:
        yield driver


LAUNCHES = list(ranks.launches())


def id_of(launch: ranks.Launch) -> str:
    return ", ".join(map(str, (*launch.args, *launch.keywords.values())))


@NEEDS_GROUPED_MM_ON_A_CPU
@pytest.mark.parametrize("launch", LAUNCHES, ids=id_of)
def test_a_rank_of_one_gives_the_bits_of_no_group(gpu, launch):
    launch()
    launched = {made.kernel.name.partition("<")[0] for made in gpu.launched}
    name, *_ = launch.args
    pushes = "push_codes_kernel" if "frozen" in name else "push_rows_kernel"
    assert pushes in launched
    whole = "frozen" in name and "odd" not in name
    assert ("combine_and_give_back_kernel" in launched) == whole
    assert ("give_back_kernel" in launched) != whole
