"""Kernels in a row as one call of the driver: when that is, and what happens where it cannot be."""

import os
from collections.abc import Callable

import pytest
import torch

from moefp8 import GroupedExperts
from moefp8.kernels import jit
from tests.fakes.emulator import Emulator, FakeDriver, emulated
from tests.kernels.common.cases import Sample, expert_layer, linear_layer

KERNELS = {"linear": ["quantize", "gemm"], "experts": ["dispatch", "gemm", "gemm", "combine"]}


class CountingLibcuda(Emulator):
    """`calls` are those that launch, and `executables` the graphs that were launched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.executables: list[int] = []
        self.fails_amid_captures = False

    def cuLaunchKernelEx(self, config, *rest):
        if config._obj.stream not in self.captured:
            self.calls.append("kernel")
        elif self.fails_amid_captures:
            return 2  # out of memory
        return super().cuLaunchKernelEx(config, *rest)

    def cuGraphLaunch(self, executable, stream):
        self.calls.append("graph")
        self.executables.append(executable.value)
        return super().cuGraphLaunch(executable, stream)

    def cuGetErrorName(self, result, out):
        return 0

    cuGetErrorString = cuGetErrorName


@pytest.fixture
def driver():
    with emulated(library=CountingLibcuda()) as made:
        yield made


LAYERS = {"linear": linear_layer, "experts": expert_layer("contiguous")}


def run(driver: FakeDriver, sample: Sample) -> list[str]:
    """Check the result, and return how it was launched."""
    driver.library.calls.clear()
    driver.launched.clear()
    sample.check()
    return list(driver.library.calls)


@pytest.fixture(params=LAYERS)
def pair(request, driver) -> list[Sample]:
    """Two calls of a layer, of which the first has been called three times."""
    samples = [LAYERS[request.param](20) for _ in range(2)]
    for _ in range(3):
        run(driver, samples[0])
    return samples


@pytest.mark.parametrize("layer", LAYERS)
def test_from_the_third_call_on_it_is_one_call_with_any_addresses(driver, layer):
    samples = [LAYERS[layer](20) for _ in range(4)]
    for _ in range(2):
        assert run(driver, samples[0]) == ["kernel"] * samples[0].num_kernels
    for sample in (samples[0], *samples, samples[0], samples[0]):
        assert run(driver, sample) == ["graph"]
        assert [x.kernel.name.split("_")[0] for x in driver.launched] == KERNELS[layer]
        assert {x.stream for x in driver.launched} == {driver.stream}


@pytest.mark.parametrize("layer", LAYERS)
def test_each_stream_has_a_graph_of_its_own(driver, layer):
    """A shared graph would keep two streams from running at the same time."""
    samples, used = [LAYERS[layer](20) for _ in range(3)], driver.library.executables
    for driver.stream in (7, 11):
        for sample in samples:
            run(driver, sample)
        assert driver.library.calls == ["graph"]
        assert {x.stream for x in driver.launched} == {driver.stream}
    assert len(set(used)) == len(used) == 2
    driver.stream = 7
    assert run(driver, samples[0]) == ["graph"]
    assert used[2] == used[0]


def test_what_is_being_captured_gets_the_kernels_themselves(driver, pair, monkeypatch):
    first, second = pair
    monkeypatch.setattr(driver, "is_capturing", lambda: True)
    assert run(driver, second) == ["kernel"] * first.num_kernels
    monkeypatch.setattr(driver, "is_capturing", lambda: False)
    assert run(driver, first) == ["graph"]
    assert run(driver, second) == ["graph"]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("fails", ["cuStreamCreate", "cuGraphInstantiateWithFlags"])
def test_a_driver_that_makes_no_graph_launches_the_kernels(driver, layer, fails, monkeypatch):
    monkeypatch.setattr(driver.library, fails, lambda *arguments: 1)
    for sample in [LAYERS[layer](20)] * 4:
        assert run(driver, sample) == ["kernel"] * sample.num_kernels


def reorder_nodes(driver: FakeDriver, monkeypatch, order: Callable[[list[int]], list[int]]) -> None:
    """Let the driver list the nodes of a graph as `order` has them."""
    get_nodes = driver.library.cuGraphGetNodes

    def get_others(graph, nodes, count):
        get_nodes(graph, nodes, count)
        others = order(nodes[: count._obj.value])
        nodes[: len(others)], count._obj.value = others, len(others)
        return 0

    monkeypatch.setattr(driver.library, "cuGraphGetNodes", get_others)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("order", [lambda x: [*x, x[-1]], lambda x: x[:-1]], ids=["more", "fewer"])
def test_nodes_that_are_not_the_launches_make_no_graph(driver, layer, order, monkeypatch):
    reorder_nodes(driver, monkeypatch, order)
    for sample in [LAYERS[layer](20)] * 4:
        assert run(driver, sample) == ["kernel"] * sample.num_kernels
    assert driver.library.captured == {}


@pytest.mark.parametrize("layer", LAYERS)
def test_nodes_may_come_in_any_order(driver, layer, monkeypatch):
    """CUDA promises none."""
    reorder_nodes(driver, monkeypatch, lambda nodes: nodes[::-1])
    samples = [LAYERS[layer](20) for _ in range(3)]
    for _ in range(2):
        run(driver, samples[0])
    for sample in (*samples, samples[0]):
        assert run(driver, sample) == ["graph"]


@pytest.mark.parametrize("num_equal", [0, 2])
def test_nodes_of_equal_kernels_get_their_own_arguments(driver, num_equal, monkeypatch):
    """A trained backward gathers columns of gradients and of tokens: two launches of one kernel.

    In the first calls these may be the same tensor, and then nothing tells the nodes apart.
    """
    swaps = []

    def swapped(nodes: list[int]) -> list[int]:
        *_, captured = driver.library.captured.values()
        firsts, others = {}, list(nodes)
        for i, (config, function, _) in enumerate(captured):
            first = firsts.setdefault((function.value, config.grid_x), i)
            if first != i:
                others[first], others[i] = others[i], others[first]
                swaps.append(driver.kernels[function.value - 1].source.stem)
        return others

    reorder_nodes(driver, monkeypatch, swapped)
    layer = GroupedExperts(2, 128, 128, trainable=True)
    ids, scores = torch.randint(0, 2, (20, 1)), torch.rand(20, 1)

    def weight_gradients(x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        layer.zero_grad()
        layer(x, ids, scores).backward(grad)
        return [weight.grad for weight in layer.parameters()]

    for i in range(4):
        x, grad = torch.randn(2, 20, 128).bfloat16()
        inputs = (x, x) if i < num_equal else (x, grad)
        gradients = weight_gradients(*inputs)
        with jit.using(FakeDriver()):  # its first call, so without a graph
            expected = weight_gradients(*inputs)
        assert all(map(torch.equal, gradients, expected))
    assert "columns" in swaps
    assert "graph" in driver.library.calls[-4:] or num_equal


@pytest.mark.parametrize("fails", ["cuGraphLaunch", "cuGraphExecKernelNodeSetParams_v2"])
def test_a_graph_that_fails_is_given_up(driver, pair, fails, monkeypatch):
    first, second = pair
    monkeypatch.setattr(driver.library, fails, lambda *arguments: 1)
    for sample in (second, first, second):
        assert run(driver, sample) == ["kernel"] * sample.num_kernels


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_leaves_the_graphs_to_its_parent(driver, pair):
    """The driver does not work there."""
    child = os.fork()
    if child == 0:
        driver.prepared().clear()
        os._exit(len(driver.library.captured) != 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run(driver, pair[0]) == ["graph"]


def test_what_is_forgotten_gives_its_graph_back():
    with emulated(library=CountingLibcuda(), max_prepared=1) as driver:
        sample = linear_layer(20)
        for _ in range(3):
            run(driver, sample)
        assert len(driver.library.captured) == 1
        run(driver, expert_layer("contiguous")(20))
        assert driver.library.captured == {}


def test_a_call_that_is_interrupted_leaves_nothing_of_its_own(driver, pair, monkeypatch):
    """The call's addresses may have reached some kernels of the graph."""
    first, second = pair
    set_params, num_set = driver.library.cuGraphExecKernelNodeSetParams_v2, []

    def interrupted(*arguments):
        set_params(*arguments)
        num_set.append(arguments)
        if len(num_set) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(driver.library, "cuGraphExecKernelNodeSetParams_v2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second.call()
    assert run(driver, first) == ["graph"]


def test_without_memory_for_a_graph_the_call_is_done_all_the_same(driver):
    sample = linear_layer(20)
    run(driver, sample)
    driver.library.fails_amid_captures = True
    for _ in range(3):
        assert run(driver, sample) == ["kernel", "kernel"]


def test_a_lost_context_takes_its_graphs_along(driver, pair, monkeypatch):
    """The driver would crash, were it told to destroy them."""
    monkeypatch.setattr(driver, "is_lost", lambda function: True)
    monkeypatch.setattr(driver.library, "cuGraphExecDestroy", None)
    monkeypatch.setattr(driver.library, "cuGraphDestroy", None)
    driver.lose()
    assert run(driver, pair[0])[-2:] == ["kernel", "kernel"]
