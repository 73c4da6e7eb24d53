"""What the kernels of `quantize.cu` compute: the arithmetic without a GPU, then all on one.

On a GPU every result equals the CPU body's bit for bit; a NaN equals a NaN.
"""

from functools import partial
from itertools import starmap

import pytest
import torch

from moefp8.kernels import jit
from moefp8.quant import numerics
from moefp8.quant.quantize import (
    QuantizeCut,
    launch_quantize_1x128,
    quantize_1x128,
    quantize_128x128,
)
from tests.gpu import no_synchronisation, on_gpu, poison, same_bits

DTYPES = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")

# ---- Without a GPU ----


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """FP32 a b + c, rounded once: the FP64 sum is rounded to odd, which makes the next one safe."""
    product, c = a.double() * b.double(), c.double()  # exact: 48 bits
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    toward_exact = torch.where((error > 0) == (total > 0), 1, -1)
    to_odd = torch.where((error != 0) & (bits % 2 == 0), bits + toward_exact, bits)
    return to_odd.view(torch.float64).float()


def correctly_rounded(scale: torch.Tensor) -> torch.Tensor:
    return 1 / scale


def one_ulp_up(scale: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(1 / scale, torch.full_like(scale, INF))


def divided(x: torch.Tensor, scale: torch.Tensor, reciprocal_of=correctly_rounded) -> torch.Tensor:
    """What `Scale::divide` computes."""
    reciprocal = reciprocal_of(scale)
    quotient = x * reciprocal
    return fma(fma(scale, quotient, -x), -reciprocal, quotient)


def mantissas() -> torch.Tensor:
    """FP32 numbers in [1, 2): random ones, and the neighbours of those with few bits."""
    few = torch.arange(0, 2**23, 2**17)[:, None] + torch.arange(-8, 9)
    some = torch.cat([few.flatten() % 2**23, torch.randint(2**23, (2**14,))])
    return (some + (127 << 23)).int().view(torch.float32)


def near_ties(scale: torch.Tensor, ulps: int) -> torch.Tensor:
    """[S, 16, 2 ulps + 1]: x whose quotients lie at or next to the numbers between two E4M3 codes.

    8 ties of normal codes, 8.5 to 15.5, and the 8 of subnormal codes.
    """
    odd = torch.arange(1, 16, 2, device=scale.device)
    ties = torch.cat([8 + odd / 2, odd * 2.0**-10])
    bits = (scale[:, None] * ties).view(torch.int32)
    steps = torch.arange(-ulps, ulps + 1, device=scale.device)
    return (bits[..., None] + steps).int().view(torch.float32)


def test_residual_correction_divides_as_division_does():
    scale = mantissas()
    x = near_ties(scale, 5)
    scale = scale[:, None, None].expand_as(x)
    assert torch.equal(divided(x, scale), x / scale)
    assert not torch.equal(divided(x, scale, one_ulp_up), x / scale)  # the test can fail


def test_constant_reciprocal_divides_by_448():
    amax = mantissas()
    c = torch.full_like(amax, 1 / 448)
    quotient = amax * c
    corrected = fma(fma(torch.full_like(amax, 448), quotient, -amax), -c, quotient)
    assert torch.equal(corrected, amax / torch.tensor(448.0))
    assert not torch.equal(quotient, corrected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
def test_codes_of_nan_do_not_depend_on_the_processor(bad, dtype):
    x = torch.randn(70, 130).to(dtype)
    x[:, 3] = bad
    codes = numerics.quantize_1x128(x, False)[0].view(torch.uint8)
    assert bool((codes[:, 3] == 0x7F).all())
    assert not bool((codes == 0xFF).any())


# ---- On a GPU ----


both = pytest.mark.parametrize("op", [quantize_1x128, quantize_128x128], ids=["1x128", "128x128"])
SIZES_OF_CUTS = (1, 16, 32), (1, 16, 256), (1, 8, 128), (2, 8, 128), (4, 8, 32), (4, 8, 256)
CUTS = None, *starmap(QuantizeCut, (*SIZES_OF_CUTS, (4, 16, 128), (8, 16, 64)))


def assert_same(ours: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Codes bit by bit; scales likewise, but any NaN equals any other; and the layout."""
    for tensor, other in zip(ours, expected, strict=True):
        assert same_bits(tensor, other)
        assert tensor.stride() == other.stride()


def spread(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers; every row has its own power of two."""
    exponents = torch.randint(-12, 9, (*shape[:-1], 1)) if len(shape) > 1 else torch.tensor(0)
    return (torch.randn(shape) * torch.exp2(exponents)).to(dtype)


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """[130, 384]: what the numerics could trip over, scattered over random numbers."""
    finfo = torch.finfo(dtype)
    values = [0.0, -0.0, NAN, -NAN, INF, -INF, finfo.max, finfo.min, finfo.tiny, -finfo.tiny]
    values += [finfo.smallest_normal / 2, -finfo.smallest_normal / 4, 448.0, -449.0, 1e-4, 464.0]
    x = spread(130, 384, dtype=dtype)
    if dtype != torch.float16:  # scales beyond what FP16 reaches, large and small
        x[20:60] *= torch.exp2(torch.arange(-130.0, 110.0, 6.0))[:, None].to(dtype)
    x[60:64] = 0.0
    x[64:68, ::2] = -0.0
    x[68:72] *= finfo.tiny  # all denormal
    for i, value in enumerate(values):
        x[2 * i % 20 + 72, 7 * i : 7 * i + 300 : 50 + i] = value
        x[100 + i, 130] = value
    return x


def poison_for(tensors: tuple[torch.Tensor, ...]) -> None:
    """Leave NaN in the memory that PyTorch will hand out for tensors of these sizes."""
    poison("cuda", *(tensor.untyped_storage().nbytes() for tensor in tensors))


@on_gpu
@both
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1, 7168), (5, 1), (33, 300), (128, 7168), (1, 8), (129, 136), (2, 130, 257), (3, 2, 9, 264)],
)
def test_equals_the_cpu(op, shape, dtype, ue8m0):
    x = spread(*shape, dtype=dtype)
    expected, on_device = op(x, ue8m0), x.cuda()
    poison_for(expected)
    with no_synchronisation():
        ours = op(on_device, ue8m0)
    assert_same(ours, expected)


@on_gpu
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_cut_gives_the_same(dtype, cut):
    for shape in ((301, 1024), (3, 7, 392), (2, 6, 131), (1, 128), (130,)):
        x = spread(*shape, dtype=dtype)
        expected = numerics.quantize_1x128(x, False)
        poison_for(expected)
        assert_same(launch_quantize_1x128(x.cuda(), False, cut=cut), expected)


@on_gpu
@both
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_numbers_equal_the_cpu(op, dtype, ue8m0):
    x = awkward(dtype)
    assert_same(op(x.cuda(), ue8m0), op(x, ue8m0))
    for i in range(0, x.shape[0], 10):  # the blocks of 128 rows are nearly all spoilt
        part = x[i : i + 10]
        assert_same(op(part.cuda(), ue8m0), op(part, ue8m0))


@on_gpu
@pytest.mark.parametrize("start", range(0, 2**23, 2**20))
def test_every_mantissa_of_a_scale_rounds_as_division(start):
    """x lies next to all ties of E4M3, for an amax of every mantissa; the other side divides."""
    amax = (torch.arange(start, start + 2**20, device="cuda").int() + (135 << 23)).view(
        torch.float32
    )
    x = torch.zeros(amax.numel(), 128, device="cuda")
    x[:, :112] = near_ties(amax / torch.full_like(amax, 448), 3).flatten(1)
    x[:, 64:112] *= -1
    x[:, 127] = amax
    assert bool((x.abs().amax(dim=1) == amax).all())
    assert_same(quantize_1x128(x, False), numerics.quantize_1x128(x, False))
    some = x[:: 2**12]
    assert_same(quantize_1x128(some, False), quantize_1x128(some.cpu(), False))


def behind(offset: int, x: torch.Tensor) -> torch.Tensor:
    """[9, 256] that begins amid 16 bytes."""
    return x.flatten()[offset : offset + 9 * 256].view(9, 256)


@on_gpu
@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :256],
        lambda x: x[:, 8:264],
        lambda x: x[:, 1:257],
        lambda x: x[::3, :200],
        lambda x: x[3:4],
        lambda x: x.T,
        lambda x: x[:1].expand(140, 300),
        lambda x: x.view(20, 7, 300)[:, :5],
        lambda x: x.view(20, 7, 300).transpose(0, 1),
        lambda x: x.view(2, 10, 7, 300)[:, :, 1:, :264],
        lambda x: x.view(2, 10, 7, 300).transpose(0, 1)[..., :128],
        *[partial(behind, offset) for offset in (1, 2, 4, 7)],
    ],
)
def test_views_equal_the_cpu(op, view, dtype):
    base = spread(140, 300, dtype=dtype)
    expected = op(view(base), False)
    poison_for(expected)
    assert_same(op(view(base.cuda()), False), expected)


@on_gpu
@both
def test_ops_take_the_kernels(op):
    x = spread(3, 20, 256)
    with jit.using(jit.Driver()) as driver:
        assert_same(op(x.cuda(), False), op(x, False))
        assert len(driver.prepared()) == 1


@on_gpu
@both
def test_more_than_2_to_31_elements(op):
    repeats, n, k = 300, 1024, 7168
    assert repeats * n * k > 2**31
    matrix = spread(n, k)
    expected_data, expected_scale_inv = (t.cuda() for t in op(matrix, False))
    x = matrix.cuda().repeat(repeats, 1, 1)
    data, scale_inv = op(x, False)
    assert bool((data.view(torch.uint8) == expected_data.view(torch.uint8)).all())
    assert bool((scale_inv == expected_scale_inv).all())
    if op is quantize_1x128:
        data, scale_inv = op(x.flatten(0, 1), False)
        assert bool((data.view(x.shape).view(torch.uint8) == expected_data.view(torch.uint8)).all())
        assert bool((scale_inv.view(repeats, n, -1) == expected_scale_inv).all())


@on_gpu
@both
def test_graphs_replay_with_new_numbers(op):
    x = spread(40, 384).cuda()
    graph = torch.cuda.CUDAGraph()
    # Loading and preparing while a graph is captured must be allowed.
    with jit.using(jit.Driver()), torch.cuda.graph(graph):
        ours = op(x, False)
    for _ in range(3):
        x.copy_(spread(40, 384))
        graph.replay()
        assert_same(ours, op(x.cpu(), False))


@on_gpu
@both
def test_the_current_stream_is_taken(op):
    x, stream = spread(2000, 1024), torch.cuda.Stream()
    expected = op(x, False)
    with torch.cuda.stream(stream):
        on_device = torch.zeros_like(x, device="cuda")
        torch.cuda._sleep(50_000_000)
        on_device.copy_(x.cuda())
        ours = op(on_device, False)
    stream.synchronize()
    assert_same(ours, expected)
