"""The dense GEMM and the linear layer on a GPU, against sums in FP64 of the same operands."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import FP8Linear, kernels
from moefp8.kernels import fp8_gemm_nt
from moefp8.kernels.gemm import heuristic
from moefp8.kernels.gemm.dense import DenseInputs, launch_dense
from moefp8.kernels.gemm.launch import band
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128
from moefp8.testing import assert_matches_reference, gemm_shapes
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS, no_synchronisation
from tests.kernels import sanitizer as sanitizer_cases
from tests.kernels.gemm.cases import (
    BIASES,
    NAN,
    PLACES,
    SCALE_PLACES,
    nothing_around_is_written,
    run_gemm,
)

pytestmark = NEEDS_GPU


class Case(NamedTuple):
    """Operands on the GPU, and what they give in FP64."""

    arguments: tuple[torch.Tensor | None, ...]
    expected: torch.Tensor
    size: torch.Tensor  # of the terms: the sum of their magnitudes


def case(m: int, n: int, k: int, bias: torch.dtype | None = None, octaves: int = 0) -> Case:
    """octaves: over how many powers of two the scales spread; their products over twice as many."""
    a = quantize_1x128(torch.randn(m, k, device="cuda"))
    b = quantize_128x128(torch.randn(n, k, device="cuda"))
    for scale_inv in (a.scale_inv, b.scale_inv):
        exponents = (torch.rand(scale_inv.shape, device="cuda") - 0.5) * octaves
        scale_inv.mul_(torch.exp2(exponents))
    added = None if bias is None else torch.randn(n, device="cuda").to(bias)
    d = torch.full((m, n), NAN, dtype=torch.bfloat16, device="cuda")
    return Case((*a, *b, d, added), *in_fp64(a, b, added))


def in_fp64(a: BlockScaled, b: BlockScaled, bias: torch.Tensor | None) -> list[torch.Tensor]:
    """d and the sum of the magnitudes of its terms."""
    (n, k), block = b.data.shape, 128
    scales = (
        a.scale_inv.double().repeat_interleave(block, 1)[:, :k],
        b.scale_inv.double().repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)[:, :k],
    )
    x, y = (q.data.double() * scale for q, scale in zip((a, b), scales, strict=True))
    added = torch.zeros(n, device=x.device) if bias is None else bias.double()
    return [x @ y.T + added, x.abs() @ y.T.abs() + added.abs()]


def assert_right(d: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """One rounding to BF16, and the tensor cores' sums: where terms cancel, by the terms' size."""
    error = (d.double() - expected).abs()
    excess = error - expected.abs() * 2**-8 - size * 2**-11
    assert bool((excess <= 0).all()), f"off by {float((error / size).max()):.2e} of the terms"
    if d.shape[1] >= 64:
        assert_matches_reference(d, expected)


def launch_and_compare(made: Case) -> None:
    made.arguments[4].fill_(NAN)
    with no_synchronisation():
        run_gemm(*made.arguments)
    assert_right(made.arguments[4], made.expected, made.size)


@settings(max_examples=100)
@given(
    shape=gemm_shapes(max_m=300, max_n=700, max_k=1100),
    seed=st.integers(0, 2**16),
    octaves=st.sampled_from((0, 20)),
    places=st.tuples(*[st.sampled_from(("own", *sorted(PLACES)))] * 3),
    scale_places=st.tuples(*[st.sampled_from(("own", *sorted(SCALE_PLACES)))] * 2),
    bias=st.sampled_from(BIASES),
)
def test_any_shape_and_layout_is_right(shape, seed, octaves, places, scale_places, bias):
    torch.manual_seed(seed)
    made = case(*shape, bias, octaves)
    a, a_scale_inv, b, b_scale_inv, d, added = made.arguments
    a, b, d = (
        x if place == "own" else PLACES[place].make(x)
        for place, x in zip(places, (a, b, d), strict=True)
    )
    a_scale_inv, b_scale_inv = (
        x if place == "own" else SCALE_PLACES[place](x)
        for place, x in zip(scale_places, (a_scale_inv, b_scale_inv), strict=True)
    )
    with nothing_around_is_written(d):
        with no_synchronisation():
            run_gemm(a, a_scale_inv, b, b_scale_inv, d, added)
        assert_right(d, made.expected, made.size)


@pytest.mark.parametrize("m", [1, 7, 16, 40, 64, 100, 128, 200, 512, 1000, 4096])
def test_large_shapes_are_right(m):
    for n, k in ((2112, 7168), (4096, 7168), (7168, 2048), (32768, 512), (1111, 9000)):
        launch_and_compare(case(m, n, k, BIASES[(m + n) % 4]))


@pytest.mark.parametrize("name", sanitizer_cases.FAMILIES)
@pytest.mark.usefixtures("new_driver")
def test_every_family_is_right(name, monkeypatch):
    """Also where it would not be chosen."""
    config = sanitizer_cases.FAMILIES[name]
    monkeypatch.setattr(heuristic, "choose_config", lambda *shape: config)
    k = 128 * config.split_k * config.k_blocks_per_stage
    shapes = [
        *sanitizer_cases.shapes_of(config),
        *((1, 1, k), (3, 129, k + 8), (257, 1000, k + 1000), (1500, 2112, 7168), (16, 8, 7168)),
    ]
    for i, (m, n, k) in enumerate(shapes):
        made = case(m, n, k, BIASES[i % 4], octaves=i % 3 * 10)
        launch_and_compare(made)
        d, alone = made.arguments[4], made.arguments[4].clone()
        launch_dense(
            DenseInputs(*made.arguments[:4], d.fill_(NAN), made.arguments[5]), programmatic=True
        )
        assert torch.equal(d, alone)


@pytest.mark.parametrize("m", [3, 40, 70, 130, 200])
def test_what_shared_memory_held_before_is_never_seen(m):
    """The box of tokens is smaller than a tile that holds more, and leaves the rest as it is."""
    config = heuristic.choose_config(m, 2112, 7168, kernels.get_num_sms())
    poison, made = case(max(config.cta_tile[0], m), 2112, 7168), case(m, 2112, 7168)
    poison.arguments[0].view(torch.uint8).fill_(0x7F)  # NaN
    poison.arguments[1].fill_(NAN)
    for _ in range(5):
        run_gemm(*poison.arguments)
        launch_and_compare(made)


@pytest.mark.parametrize("shape", [(5, 200, 520), (300, 576, 512), (1, 136, 128)])
def test_extreme_scales_are_right(shape):
    """Products of scales from 2**-100 to 2**100; neighbouring rows and blocks lie far apart."""
    launch_and_compare(case(*shape, octaves=100))


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("m", [6, 200])
def test_bad_activations_stay_in_their_row(bad, m):
    x, b = torch.randn(m, 1000, device="cuda"), quantize_128x128(torch.randn(400, 1000).cuda())
    clean, d = (torch.empty(m, 400, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    fp8_gemm_nt(quantize_1x128(x), b, clean)
    x[2, 7] = bad
    fp8_gemm_nt(quantize_1x128(x), b, d)
    assert bool(d[2].isnan().all())
    others = torch.arange(m) != 2
    assert torch.equal(d[others], clean[others])


def test_one_prepared_launch_serves_new_addresses_and_streams(new_driver):
    """And it is our kernel that the op takes."""
    cases = [case(33, 200, 528, torch.bfloat16) for _ in range(4)]
    new_driver.prepared().clear()  # of what has quantized them
    torch.cuda.synchronize()
    for made in (*cases, *cases):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            made.arguments[4].fill_(NAN)
            run_gemm(*made.arguments)
        stream.synchronize()
        assert_right(made.arguments[4], made.expected, made.size)
        assert len(new_driver.prepared()) == 1


@pytest.mark.parametrize("bias", BIASES)
def test_empty_sizes(bias):
    for m, n, k in ((0, 5, 9), (5, 0, 9), (5, 7, 0), (0, 0, 0)):
        made = case(m, n, k, bias)
        launch_and_compare(made)


SOME_SHAPES = (
    *((1, 2112, 7168), (40, 2112, 7168), (64, 4096, 7168), (128, 4096, 7168)),
    *((300, 1000, 2000), (4096, 2112, 7168)),
)


@pytest.mark.parametrize("shape", SOME_SHAPES)
def test_repeated_runs_are_identical(shape):
    made = case(*shape)
    launch_and_compare(made)
    first = made.arguments[4].clone()
    for _ in range(20):
        made.arguments[4].fill_(NAN)
        run_gemm(*made.arguments)
        assert torch.equal(made.arguments[4], first)


def test_streams_run_side_by_side():
    cases = [case(*shape) for shape in SOME_SHAPES]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(30):
        for made, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                made.arguments[4].fill_(NAN)
                run_gemm(*made.arguments)
    torch.cuda.synchronize()
    for made in cases:
        assert_right(made.arguments[4], made.expected, made.size)


def test_the_current_stream_is_taken():
    made, stream = case(300, 1000, 2000), torch.cuda.Stream()
    a, *others = made.arguments
    late = torch.zeros(a.shape, dtype=torch.uint8, device="cuda").view(a.dtype)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(a)
        run_gemm(late, *others)
    stream.synchronize()
    assert_right(others[3], made.expected, made.size)


def test_threads_prepare_each_their_own_and_run_side_by_side(new_driver):
    cases = [case(m, 1000, 2000) for m in (5, 70, 300, 70)]
    new_driver.prepared().clear()
    torch.cuda.synchronize()

    def work(made: Case) -> int:
        for _ in range(50):
            run_gemm(*made.arguments)
        torch.cuda.synchronize()
        return len(new_driver.prepared())

    with ThreadPoolExecutor(len(cases)) as pool:
        assert all(pool.map(work, cases))
    assert not new_driver.prepared()
    for made in cases:
        assert_right(made.arguments[4], made.expected, made.size)


@NEEDS_TWO_GPUS
def test_another_gpu_than_the_current_one():
    made = case(70, 1000, 2000)
    there = [x if x is None else x.to("cuda:1") for x in made.arguments]
    run_gemm(*there)
    assert_right(there[4].to("cuda:0"), made.expected, made.size)


@NEEDS_TWO_GPUS
def test_a_layer_on_another_gpu_gives_the_same_bits_also_in_a_graph():
    fp8, x = FP8Linear.from_linear(torch.nn.Linear(2048, 1000).bfloat16()), torch.randn(33, 2048)
    here = fp8.to("cuda:0")(x.bfloat16().to("cuda:0"))
    there, at = fp8.to("cuda:1"), x.bfloat16().to("cuda:1")
    assert torch.equal(there(at).cpu(), here.cpu())
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        # without a stream, torch captures on one of the GPU on which it first captured
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            y = there(at)
        graph.replay()
        assert torch.equal(y.cpu(), here.cpu())


@NEEDS_TWO_GPUS
def test_two_gpus_from_two_threads():
    def work(index: int) -> None:
        with torch.cuda.device(index):
            made = [case(m, 1000, 2000) for m in (5, 300)]
            for _ in range(50):
                for each in made:
                    run_gemm(*each.arguments)
            for each in made:
                assert_right(each.arguments[4], each.expected, each.size)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


@pytest.mark.parametrize("shape", [(1, 2112, 7168), (77, 333, 1000), (512, 2112, 7168)])
@pytest.mark.usefixtures("new_driver")
def test_graphs_replay_with_new_numbers(shape):
    """Also when the kernel is loaded and prepared while the graph is captured."""
    made = case(*shape, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_gemm(*made.arguments)
    for _ in range(3):
        new = case(*shape, torch.float32)
        for x, y in zip(made.arguments, new.arguments, strict=True):
            x.copy_(y)
        graph.replay()
        assert_right(made.arguments[4], new.expected, new.size)


@pytest.mark.parametrize("m", [3, 300])
@pytest.mark.usefixtures("new_driver")
def test_a_limit_of_sms_changes_no_result(m):
    made = case(m, 2112, 7168)
    for limit in (1, 8, 131, 10_000, None):
        kernels.set_num_sms(limit)
        launch_and_compare(made)


def test_a_last_band_of_tiles_that_is_cut_off():
    m, n, k = 128 * 9 + 5, 2112, 24000
    config = heuristic.choose_config(m, n, k, kernels.get_num_sms())
    rows = kernels.ceil_div(m, config.tile[0])
    assert band(config, m, k) < rows
    assert rows % band(config, m, k)
    launch_and_compare(case(m, n, k))


def test_more_than_2_to_31_elements():
    repeats, rows, few, k = 300, 1024, 16, 7168
    assert repeats * rows * k > 2**31
    many, other = torch.randn(rows, k, device="cuda"), torch.randn(128, k, device="cuda")
    a, b = quantize_1x128(many), quantize_128x128(other)
    data, scales = a.data.repeat(repeats, 1), a.scale_inv.repeat(repeats, 1)
    d = torch.full((repeats * rows, 128), NAN, dtype=torch.bfloat16, device="cuda")
    run_gemm(data, scales, *b, d, None)
    blocks = d.view(repeats, rows, 128)
    assert_right(blocks[0], *in_fp64(a, b, None))
    assert bool((blocks == blocks[0]).all())

    b = quantize_128x128(many)
    scales = b.scale_inv.repeat(repeats, 1)
    a = quantize_1x128(other[:few])
    d = torch.full((few, repeats * rows), NAN, dtype=torch.bfloat16, device="cuda")
    data.view(repeats, rows, k).copy_(b.data)
    run_gemm(*a, data, scales, d, None)
    blocks = d.view(few, repeats, rows)
    assert_right(blocks[:, 0], *in_fp64(a, b, None))
    assert bool((blocks == blocks[:, :1]).all())


def test_d_of_more_than_2_to_31_elements():
    m, n, k = 2**15 + 7, 2**16 + 8, 64
    assert m * n > 2**31
    a, b = (
        quantize_1x128(torch.randn(m, k, device="cuda")),
        quantize_128x128(torch.randn(n, k, device="cuda")),
    )
    d = torch.full((m, n), NAN, dtype=torch.bfloat16, device="cuda")
    run_gemm(*a, *b, d, None)
    for rows in (slice(0, 300), slice(m - 300, m)):
        some = BlockScaled(a.data[rows], a.scale_inv[rows])
        assert_right(d[rows], *in_fp64(some, b, None))


# ---- The linear layer ----


def in_two_steps(layer: FP8Linear, x: torch.Tensor) -> torch.Tensor:
    """The layer, with nothing in flight while its GEMM starts."""
    y = torch.empty(x.shape[0], layer.out_features, dtype=torch.bfloat16, device="cuda")
    quantized = quantize_1x128(x)
    torch.cuda.synchronize()
    fp8_gemm_nt(quantized, (layer.weight, layer.weight_scale_inv), y, bias=layer.bias)
    return y.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("m", [0, 1, 33, 500])
def test_linear_equals_its_two_steps(m, dtype):
    for n, k in ((2112, 7168), (200, 300), (333, 1024)):
        layer, x = FP8Linear(k, n, device="cuda"), torch.randn(m, k, device="cuda").to(dtype)
        with no_synchronisation():
            y = layer(x)
        assert torch.equal(y, in_two_steps(layer, x))


def test_layers_of_one_layout_share_what_is_prepared(new_driver):
    layers = [FP8Linear(512, 336, device="cuda") for _ in range(3)]
    inputs = [torch.randn(20, 512, device="cuda") for _ in layers]
    expected = [in_two_steps(layer, x) for layer, x in zip(layers, inputs, strict=True)]
    new_driver.prepared().clear()
    for layer, x, y in zip(layers, inputs, expected, strict=True):
        assert torch.equal(layer(x), y)
        assert len(new_driver.prepared()) == 1


@pytest.mark.parametrize("m", [1, 64, 700])
def test_a_chain_of_layers_waits_where_it_must(m):
    """Each kernel starts while the one before ends, and memory is reused at once."""
    layers = [FP8Linear(1536, 1536, device="cuda") for _ in range(6)]
    x = torch.randn(m, 1536, device="cuda").bfloat16()
    with torch.inference_mode():
        expected = x
        for layer in layers:
            expected = in_two_steps(layer, expected * 2)
        for _ in range(30):
            y = x
            for layer in layers:
                y = layer(y * 2)
            assert torch.equal(y, expected)


def test_weights_written_just_before_are_seen():
    layer, x = FP8Linear(7168, 2112, device="cuda"), torch.randn(16, 7168, device="cuda")
    sources = [FP8Linear(7168, 2112, device="cuda") for _ in range(4)]
    expected = [in_two_steps(source, x) for source in sources]
    with torch.inference_mode():
        for _ in range(10):
            results = []
            for source in sources:
                for name in ("weight", "weight_scale_inv", "bias"):
                    getattr(layer, name).copy_(getattr(source, name))
                results.append(layer(x))
            for y, right in zip(results, expected, strict=True):
                assert torch.equal(y, right)


@pytest.mark.parametrize("k", [512, 300])
def test_linear_in_a_graph(k):
    layer, x = FP8Linear(k, 333, device="cuda"), torch.randn(20, k, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        y = layer(layer.in_features**-0.5 * x)
    for _ in range(3):
        x.copy_(torch.randn(20, k))
        graph.replay()
        assert torch.equal(y, in_two_steps(layer, layer.in_features**-0.5 * x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_linear_compiles_whole(backend):
    if backend == "inductor" and not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("needs a C compiler")
    layer = FP8Linear(512, 336, device="cuda")
    compiled = torch.compile(lambda x: layer(x * 2) + 1, fullgraph=True, backend=backend)
    for m in (3, 40, 41):
        x = torch.randn(m, 512, device="cuda").bfloat16()
        with torch.no_grad():
            assert torch.equal(compiled(x), in_two_steps(layer, x * 2) + 1)
