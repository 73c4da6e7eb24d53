"""The dense GEMM and the linear layer on a GPU, beyond what `test_launch_gpu.py` says."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moefp8 import FP8Linear, kernels
from moefp8.kernels import fp8_gemm_nt
from moefp8.kernels.gemm.operands import Operands
from moefp8.kernels.gemm.sm90 import heuristic
from moefp8.kernels.gemm.sm90.config import with_most_stages
from moefp8.kernels.gemm.sm90.launch import band
from moefp8.quant import quantize_1x128, quantize_128x128
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS, no_synchronisation, slow
from tests.kernels.gemm.cases import BIASES, NAN, choosing, run_gemm
from tests.kernels.gemm.gpu_cases import (
    SOME_SHAPES,
    assert_right,
    random_dense,
    run_dense,
    run_dense_and_check,
)
from tests.kernels.gemm.grouped_cases import dense, launch
from tests.kernels.gemm.sm90 import families

pytestmark = NEEDS_GPU


def random_bias(dtype: torch.dtype | None, n: int) -> torch.Tensor | None:
    return None if dtype is None else torch.randn(n, device="cuda").to(dtype)


@pytest.mark.parametrize("m", [1, 7, 16, 40, 64, 100, 128, 200, 512, 1000, 4096])
def test_large_shapes_are_right(m):
    for n, k in ((2112, 7168), (4096, 7168), (7168, 2048), (32768, 512), (1111, 9000)):
        run_dense_and_check(random_dense(m, n, k), random_bias(BIASES[(m + n) % 4], n))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_is_right(name):
    """It is right also where it would not be chosen."""
    config = families.FAMILIES[name]
    k = 128 * config.split_k * config.k_blocks_per_stage
    shapes = [
        *families.shapes_of(config),
        (1, 1, k), (3, 129, k + 8), (257, 1000, k + 1000), (1500, 2112, 7168), (16, 8, 7168),
    ]  # fmt: skip
    with choosing(config):
        for i, (m, n, k) in enumerate(shapes):
            made, bias = random_dense(m, n, k, octaves=i % 3 * 10), random_bias(BIASES[i % 4], n)
            run_dense_and_check(made, bias)
            alone = made.d.clone()
            launch(dense(m), made._replace(d=made.d.fill_(NAN)), bias=bias, programmatic=True)
            assert torch.equal(made.d, alone)


@pytest.mark.parametrize("name", [name for name, x in families.FAMILIES.items() if x.halves_tiles])
@pytest.mark.parametrize("m", [129, 300, 777])
def test_halves_of_tiles_give_the_bits_of_whole_ones(name, m):
    config = families.FAMILIES[name]
    rows = kernels.ceil_div(m, 128)
    with choosing(config):
        for i, (cols, k) in enumerate(((2, 128), (3, 7168), (2, 1000), (3, 2880))):
            n = cols * config.tile_weights - 72
            made, bias = random_dense(m, n, k), random_bias(BIASES[i], n)
            run_dense_and_check(made, bias)
            whole = made.d.clone()
            try:  # a tile or two are left for the last wave
                kernels.set_num_sms(rows * cols - 1 if rows * cols < 6 else rows * cols - 2)
                for _ in range(3):
                    made.d.fill_(NAN)
                    run_gemm(*made, bias)
                    assert torch.equal(made.d, whole)
            finally:
                kernels.set_num_sms(None)


@pytest.mark.parametrize(("n", "k"), [(1000, 7168), *slow((2112, 2880), (4096, 3840))])
def test_above_512_rows_a_row_has_the_same_bits_in_all_tiles(n, k):
    m, first = 1100, None
    made = random_dense(m, n, k)
    for config in map(with_most_stages, heuristic.candidates(m)):
        with choosing(config):
            made.d.fill_(NAN)
            run_gemm(*made)
            first = made.d.clone() if first is None else first
            assert torch.equal(made.d, first), config


def test_above_512_rows_other_rows_change_nothing():
    layer, x = FP8Linear(3840, 4096, device="cuda"), torch.randn(5000, 3840, device="cuda")
    y = layer(x.bfloat16())
    for m in (513, 777, 1564, 2496, 3397):
        assert torch.equal(layer(x[:m].bfloat16()), y[:m]), m


@pytest.mark.parametrize("m", [3, 40, 70, 130, 200])
def test_what_shared_memory_held_before_is_never_seen(m):
    """The box of tokens is smaller than a tile that holds more, and leaves the rest as it is."""
    config = heuristic.choose_config(m, 2112, 7168, kernels.get_num_sms())
    poison, made = (random_dense(x, 2112, 7168) for x in (max(config.cta_tile[0], m), m))
    poison.a.view(torch.uint8).fill_(0x7F)  # NaN
    poison.a_scale_inv.fill_(NAN)
    for _ in range(5):
        run_dense(poison)
        run_dense_and_check(made)


@pytest.mark.parametrize("shape", [(5, 200, 520), (300, 576, 512), (1, 136, 128)])
def test_extreme_scales_are_right(shape):
    """Products of scales from 2**-100 to 2**100; neighbouring rows and blocks lie far apart."""
    run_dense_and_check(random_dense(*shape, octaves=100))


@pytest.mark.parametrize("shape", SOME_SHAPES)
def test_repeated_runs_are_identical(shape):
    made = random_dense(*shape)
    run_dense_and_check(made)
    first = made.d.clone()
    for _ in range(20):
        run_dense(made)
        assert torch.equal(made.d, first)


def test_the_current_stream_is_taken():
    made, stream = random_dense(300, 1000, 2000), torch.cuda.Stream()
    late = made._replace(a=torch.zeros_like(made.a.view(torch.uint8)).view(made.a.dtype))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.a.copy_(made.a)
        run_gemm(*late)
    stream.synchronize()
    assert_right(dense(300), made)


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
            made = [random_dense(m, 1000, 2000) for m in (5, 300)]
            for _ in range(50):
                for each in made:
                    run_gemm(*each)
            for each in made:
                assert_right(dense(len(each.a)), each)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


@pytest.mark.parametrize("shape", [(1, 2112, 7168), (77, 333, 1000), (512, 2112, 7168)])
@pytest.mark.usefixtures("new_driver")
def test_graphs_replay_with_new_numbers(shape):
    """The kernel is loaded and prepared while the graph is captured."""
    made, bias = random_dense(*shape), random_bias(torch.float32, shape[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_gemm(*made, bias)
    for _ in range(3):
        new = (*random_dense(*shape), random_bias(torch.float32, shape[1]))
        for x, y in zip((*made, bias), new, strict=True):
            x.copy_(y)
        graph.replay()
        assert_right(dense(shape[0]), made, bias)


def test_a_last_band_of_tiles_that_is_cut_off():
    m, n, k = 128 * 9 + 5, 2112, 24000
    config = heuristic.choose_config(m, n, k, kernels.get_num_sms())
    rows = kernels.ceil_div(m, config.tile[0])
    assert band(config, m, k) < rows
    assert rows % band(config, m, k)
    run_dense_and_check(random_dense(m, n, k))


def test_more_than_2_to_31_elements():
    repeats, rows, few, k = 300, 1024, 16, 7168
    assert repeats * rows * k > 2**31
    many, other = torch.randn(rows, k, device="cuda"), torch.randn(128, k, device="cuda")
    a, b = quantize_1x128(many), quantize_128x128(other)
    data, scales = a.data.repeat(repeats, 1), a.scale_inv.repeat(repeats, 1)
    d = torch.full((repeats * rows, 128), NAN, dtype=torch.bfloat16, device="cuda")
    run_gemm(data, scales, *b, d)
    blocks = d.view(repeats, rows, 128)
    assert_right(dense(rows), Operands(*a, *b, blocks[0]))
    assert bool((blocks == blocks[0]).all())

    b = quantize_128x128(many)
    scales = b.scale_inv.repeat(repeats, 1)
    a = quantize_1x128(other[:few])
    d = torch.full((few, repeats * rows), NAN, dtype=torch.bfloat16, device="cuda")
    data.view(repeats, rows, k).copy_(b.data)
    run_gemm(*a, data, scales, d)
    blocks = d.view(few, repeats, rows)
    assert_right(dense(few), Operands(*a, *b, blocks[:, 0]))
    assert bool((blocks == blocks[:, :1]).all())


def test_d_of_more_than_2_to_31_elements():
    m, n, k = 2**15 + 7, 2**16 + 8, 64
    assert m * n > 2**31
    made = random_dense(m, n, k)
    run_dense(made)
    for rows in (slice(0, 300), slice(m - 300, m)):
        some = made._replace(a=made.a[rows], a_scale_inv=made.a_scale_inv[rows], d=made.d[rows])
        assert_right(dense(300), some)


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
