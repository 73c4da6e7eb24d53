"""Kernels in a row as one call of the driver: when that is, and what happens where it cannot be."""

import pytest
import torch

from moefp8 import FP8Linear, GroupedExperts
from moefp8.functional.experts import experts
from moefp8.functional.linear import fp8_linear
from tests.fakes.emulator import Emulator, FakeDriver, emulated

KERNELS = {"linear": ["quantize", "gemm"], "experts": ["dispatch", "gemm", "gemm", "combine"]}


class CountingLibcuda(Emulator):
    """`calls` are those that launch, and `executables` the graphs that were.

    `fails` names a function that fails from now on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.executables: list[int] = []
        self.fails = ""

    def cuLaunchKernelEx(self, config, *rest):
        if config._obj.stream not in self.captured:
            self.calls.append("kernel")
        elif self.fails == "cuLaunchKernelEx amid a capture":
            return 2  # out of memory
        return super().cuLaunchKernelEx(config, *rest)

    def cuGraphLaunch(self, *arguments):
        if self.fails == "cuGraphLaunch":
            return 1
        self.calls.append("graph")
        self.executables.append(arguments[0].value)
        return super().cuGraphLaunch(*arguments)

    def cuGraphExecKernelNodeSetParams_v2(self, *arguments):
        if self.fails == "cuGraphExecKernelNodeSetParams_v2":
            return 1
        return super().cuGraphExecKernelNodeSetParams_v2(*arguments)

    def cuGetErrorName(self, result, out):
        return 0

    def cuGetErrorString(self, result, out):
        return 0

    def cuStreamCreate(self, *arguments):
        return 1 if self.fails == "cuStreamCreate" else super().cuStreamCreate(*arguments)

    def cuGraphInstantiateWithFlags(self, *arguments):
        if self.fails == "cuGraphInstantiateWithFlags":
            return 1
        return super().cuGraphInstantiateWithFlags(*arguments)


@pytest.fixture
def driver():
    with emulated(library=CountingLibcuda()) as made:
        yield made


def linear_call():
    """A call with tensors and weights of its own, and what it should give."""
    module, x = FP8Linear(256, 48).requires_grad_(False), torch.randn(20, 256).bfloat16()
    weights = module.weight, module.weight_scale_inv, module.bias
    return lambda: module(x), fp8_linear.overload(x, *weights)


def experts_call():
    module, x = GroupedExperts(4, 256, 128), torch.randn(20, 256).bfloat16()
    ids, scores = torch.randint(0, 5, (20, 2)), torch.rand(20, 2)
    names = "gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"
    weights = [getattr(module, name).detach() for name in names]
    return lambda: module(x, ids, scores), experts.overload(x, ids, scores, *weights, None, False)


CALLS = {"linear": linear_call, "experts": experts_call}


def run(driver: FakeDriver, call, expected: torch.Tensor) -> list[str]:
    """Check the result; how it was launched."""
    driver.library.calls.clear()
    driver.launched.clear()
    torch.testing.assert_close(call(), expected, rtol=2**-7, atol=2**-7)
    return list(driver.library.calls)


@pytest.mark.parametrize("layer", CALLS)
def test_from_the_third_call_on_it_is_one_call_with_any_addresses(driver, layer):
    calls = [CALLS[layer]() for _ in range(4)]
    num_kernels = len(KERNELS[layer])
    for _ in range(2):
        assert run(driver, *calls[0]) == ["kernel"] * num_kernels
    for call in (calls[0], *calls, calls[0], calls[0]):
        assert run(driver, *call) == ["graph"]
        assert [x.kernel.name.split("_")[0] for x in driver.launched] == KERNELS[layer]
        assert {x.stream for x in driver.launched} == {driver.stream}


@pytest.mark.parametrize("layer", CALLS)
def test_each_stream_has_a_graph_of_its_own(driver, layer):
    """One would keep two streams from running at the same time."""
    calls, used = [CALLS[layer]() for _ in range(3)], driver.library.executables
    for driver.stream in (7, 11):
        for call in calls:
            run(driver, *call)
        assert driver.library.calls == ["graph"]
        assert {x.stream for x in driver.launched} == {driver.stream}
    assert len(set(used)) == len(used) == 2
    driver.stream = 7
    assert run(driver, *calls[0]) == ["graph"]
    assert used[2] == used[0]


@pytest.mark.parametrize("layer", CALLS)
def test_what_is_being_captured_gets_the_kernels_themselves(driver, layer, monkeypatch):
    first, second = CALLS[layer](), CALLS[layer]()
    for _ in range(3):
        run(driver, *first)
    monkeypatch.setattr(driver, "is_capturing", lambda: True)
    assert run(driver, *second) == ["kernel"] * len(KERNELS[layer])
    monkeypatch.setattr(driver, "is_capturing", lambda: False)
    assert run(driver, *first) == ["graph"]
    assert run(driver, *second) == ["graph"]


@pytest.mark.parametrize("layer", CALLS)
@pytest.mark.parametrize("fails", ["cuStreamCreate", "cuGraphInstantiateWithFlags"])
def test_a_driver_that_makes_no_graph_launches_the_kernels(driver, layer, fails):
    driver.library.fails = fails
    for call in [CALLS[layer]()] * 4:
        assert run(driver, *call) == ["kernel"] * len(KERNELS[layer])


@pytest.mark.parametrize("layer", CALLS)
@pytest.mark.parametrize("fails", ["cuGraphLaunch", "cuGraphExecKernelNodeSetParams_v2"])
def test_a_graph_that_fails_is_given_up(driver, layer, fails):
    first, second = CALLS[layer](), CALLS[layer]()
    for _ in range(3):
        run(driver, *first)
    driver.library.fails = fails
    for call in (second, first, second):
        assert run(driver, *call) == ["kernel"] * len(KERNELS[layer])


def test_what_is_forgotten_gives_its_graph_back():
    with emulated(library=CountingLibcuda(), max_prepared=1) as driver:
        call = linear_call()
        for _ in range(3):
            run(driver, *call)
        assert len(driver.library.captured) == 1
        run(driver, *experts_call())
        assert driver.library.captured == {}


def test_a_call_that_is_interrupted_leaves_nothing_of_its_own(driver, monkeypatch):
    """Its addresses may have reached some kernels of the graph."""
    first, second = linear_call(), linear_call()
    for _ in range(3):
        run(driver, *first)
    set_params, num_set = driver.library.cuGraphExecKernelNodeSetParams_v2, []

    def interrupted(*arguments):
        set_params(*arguments)
        num_set.append(arguments)
        if len(num_set) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(driver.library, "cuGraphExecKernelNodeSetParams_v2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second[0]()
    assert run(driver, *first) == ["graph"]


def test_without_memory_for_a_graph_the_call_is_done_all_the_same(driver):
    call = linear_call()
    run(driver, *call)
    driver.library.fails = "cuLaunchKernelEx amid a capture"
    for _ in range(3):
        assert run(driver, *call) == ["kernel", "kernel"]


def test_a_lost_context_takes_its_graphs_along(driver, monkeypatch):
    """The driver would crash, were it told to destroy them."""
    monkeypatch.setattr(driver, "is_lost", lambda function: True)
    monkeypatch.setattr(driver.library, "cuGraphExecDestroy", None)
    monkeypatch.setattr(driver.library, "cuGraphDestroy", None)
    call = linear_call()
    for _ in range(3):
        run(driver, *call)
    driver.lose()
    assert run(driver, *call)[-2:] == ["kernel", "kernel"]
