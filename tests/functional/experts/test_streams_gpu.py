"""The routed experts on a GPU in graphs, on several streams and GPUs, and the memory they take."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moefp8 import GroupedExperts
from moefp8.kernels.common.activation import SWIGLU
from moefp8.kernels.gemm.sizes import Sizes
from moefp8.testing import assert_matches_reference
from tests.functional.cases import Weights, body, run, weights_of
from tests.functional.experts.records import forward_bytes
from tests.functional.gpu_cases import E, H, I, K, inputs
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS, no_synchronisation
from tests.kernels.gemm.cases import choosing
from tests.layers.cases import assert_close

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("error:.*portable PyTorch body"),
]
NAN = float("nan")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 32, 400, 2100])
@pytest.mark.parametrize(("h", "i"), [(H, I), (100, 200)])
def test_one_graph_serves_all_routings(new_driver, num_tokens, masked, h, i):
    weights = weights_of(E, h, i, "cuda")
    memory = inputs(num_tokens, hidden_size=h)
    run(*memory, weights, SWIGLU, masked)  # kernels are compiled and loaded
    new_driver.prepared().clear()  # preparing while a graph is captured must be allowed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(*memory, weights, SWIGLU, masked)
    for kind in ("one expert", "distinct", "out of range", "repeated", "distinct"):
        fresh = inputs(num_tokens, hidden_size=h, kind=kind)
        for old, new in zip(memory, fresh, strict=True):
            old.copy_(new)
        y.fill_(NAN)
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, run(*fresh, weights, SWIGLU, masked))


def test_new_addresses_other_layers_and_other_streams_prepare_nothing(layer, new_driver):
    """The addresses in CUDA's tensor maps are replaced."""
    others = [weights_of(E, H, I, "cuda") for _ in range(2)]
    new_driver.prepared().clear()  # also what quantizing them prepared
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for weights in (layer, *others):
                arguments = inputs(70)
                assert_close(run(*arguments, weights), body(*arguments, weights), I)
        torch.cuda.current_stream().wait_stream(stream)
    assert len(new_driver.prepared()) == 1


def test_streams_run_side_by_side(layer):
    """Layers differ in size, so that kernels of several are on the GPU at once."""
    made = [inputs(num_tokens) for num_tokens in (3, 64, 65, 700, 2100)]
    expected = [run(*arguments, layer) for arguments in made]
    streams = [torch.cuda.Stream() for _ in made]
    torch.cuda.synchronize()
    results = [[] for _ in made]
    for i in range(40):
        for arguments, stream, of_stream in zip(made, streams, results, strict=True):
            with torch.cuda.stream(stream):
                of_stream.append(run(*arguments, layer, SWIGLU, i % 2 == 1))
    torch.cuda.synchronize()
    for of_stream, right in zip(results, expected, strict=True):
        assert all(torch.equal(y, right) for y in of_stream)


def test_calls_in_a_row_do_not_meet(layer):
    """Calls share a workspace, and inputs are written right before."""
    made = [inputs(num_tokens) for num_tokens in (1, 300, 2, 64, 2100, 1000, 5, 300)]
    expected = [run(*arguments, layer) for arguments in made]
    for _ in range(10):
        results = []
        with no_synchronisation():
            for arguments in made:
                late = [x + 0 for x in arguments]
                results.append(run(*late, layer))
                for x in late:
                    x.zero_()
        assert all(torch.equal(y, right) for y, right in zip(results, expected, strict=True))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 300, 2100])
@pytest.mark.parametrize("behind", ["a copy", "two streams"])
def test_dispatch_waits_for_whatever_is_before_it(layer, behind, num_tokens, captured):
    """It may start before a kernel ends; here a copy or another stream's end is before it."""
    x, *choice = inputs(num_tokens)
    expected, late, side = run(x, *choice, layer), torch.empty_like(x), torch.cuda.Stream()

    def call() -> torch.Tensor:
        late.fill_(NAN)
        here = torch.cuda.current_stream()
        if behind == "a copy":
            late.copy_(x)
        else:
            side.wait_stream(here)
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)
                late.copy_(x)
            torch.ones(1, device="cuda")  # so that two kernels are before the next one
            here.wait_stream(side)
        return run(late, *choice, layer)

    if not captured:
        for _ in range(5):
            with choosing():  # prepared anew: later calls would be a graph, and start behind all
                assert torch.equal(call(), expected)
        return
    assert torch.equal(call(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for _ in range(3):
        y.fill_(NAN)
        graph.replay()
        assert torch.equal(y, expected)


@NEEDS_TWO_GPUS
def test_two_gpus_from_two_threads_give_the_same_bits(layer):
    """They do so whichever GPU is the current one."""
    made = [inputs(num_tokens) for num_tokens in (1, 300, 2100)]
    expected = [run(*arguments, layer).cpu() for arguments in made]

    def work(index: int) -> None:
        place = f"cuda:{index}"
        weights = Weights(*(x.to(place) for x in layer))
        moved = [[x.to(place) for x in arguments] for arguments in made]
        for i in range(40):
            with torch.cuda.device(i % 2):
                results = [run(*arguments, weights) for arguments in moved]
                assert torch.cuda.current_device() == i % 2
            for y, right in zip(results, expected, strict=True):
                assert torch.equal(y.cpu(), right)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def test_memory_is_given_back(layer):
    arguments = inputs(500)
    run(*arguments, layer)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for masked in (False, True):
        for num_tokens in (500, 20, 1):
            run(*(x[:num_tokens] for x in arguments), layer, SWIGLU, masked)
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    y = run(*arguments, layer)
    size = forward_bytes(Sizes(500, K, E, H, I, False))
    assert torch.cuda.max_memory_allocated() - before <= size + y.numel() * 2 + (4 << 20)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_layers_compile_whole(layout):
    torch._dynamo.reset()
    layer = GroupedExperts(E, H, I, layout=layout, device="cuda")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for num_tokens in (9, 1, 300):
        arguments = inputs(num_tokens)
        with torch.inference_mode():
            y = compiled(*arguments)
            assert torch.equal(y, layer(*arguments))
        assert_matches_reference(layer(*arguments).detach(), y, 0.0)
