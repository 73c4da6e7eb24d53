"""The CUDA kernels of `quantize.cu`: their launchers and numerics without a GPU, then on one.

On a GPU every result equals the CPU body's bit for bit; a NaN equals a NaN.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from gpu_cases import NUM_SMS, assert_arguments_fit, no_synchronisation, on_gpu
from hypothesis import example, given
from hypothesis import strategies as st

from moefp8.kernels import quantize
from moefp8.kernels import quantize_launch as room
from moefp8.kernels.jit import Kernel, compile_kernels
from moefp8.kernels.quantize import launch_quantize_1x128, launch_quantize_128x128
from moefp8.kernels.quantize_launch import Cut

DTYPES = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")

# ---- Without a GPU: compiling ----


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_compiles_and_spills_nothing(dtype):
    kernels = room.kernels_of(dtype)
    for kernel, cubin in zip(kernels, compile_kernels(kernels), strict=True):
        assert cubin.problems() == []
        registers = int(re.findall(r"Used (\d+) registers", cubin.log)[-1])
        if dtype.itemsize == 2 and kernel.name.endswith("true>"):
            assert registers <= 64, kernel.name  # 1024 threads of an SM keep their bytes in flight


@pytest.mark.usefixtures("own_cache")
def test_arguments_lie_in_memory_as_the_kernel_reads_them(tmp_path):
    kernel = Kernel(room._SOURCE, "quantize_128x128_kernel<Input::kFloat, true>")
    assert_arguments_fit(room._Arguments, kernel, tmp_path)


# ---- Without a GPU: the launcher ----


@given(n=st.integers(0, 2**31 - 1), value=st.integers(1, 2**31 - 1))
@example(n=2**31 - 1, value=1)
@example(n=2**31 - 1, value=2**31 - 1)
@example(n=2**31 - 2, value=3)
def test_divisor_divides(n, value):
    divisor = room._Divisor.of(value)
    assert n * divisor.magic >> divisor.shift == n // value
    assert divisor.value == value
    assert n * divisor.magic < 2**64


@given(num_rows=st.integers(1, 100_000), num_k_blocks=st.integers(1, 200))
def test_few_rows_are_spread_over_the_sms(num_rows, num_k_blocks):
    cut = room.cut_1x128(num_rows, num_k_blocks, NUM_SMS)
    num_threads = -(-num_rows // cut.rows) * num_k_blocks * cut.lanes
    assert cut.threads % 32 == 0
    assert 32 <= cut.threads <= 256
    assert 128 % (8 * cut.lanes) == 0
    assert cut.threads >= cut.lanes >= cut.rows  # one lane stores the scale of one row
    if num_threads >= NUM_SMS * 32 and cut.rows == 1:
        assert -(-num_threads // cut.threads) >= NUM_SMS // 2


@pytest.fixture
def launches(monkeypatch) -> list[SimpleNamespace]:
    """What would be launched, for tensors on the CPU; prepared anew for each test."""
    made: list[SimpleNamespace] = []

    class Recorder:
        def __init__(self, function, grid, block, arguments, *, stream, programmatic):
            known = SimpleNamespace(kernel=function.name, grid=grid, block=block)
            self.known, self.arguments = known, arguments
            known.stream, known.programmatic, known.launch = stream, programmatic, self

        def on(self, device_index):
            assert device_index == -1  # that of tensors on the CPU
            (arguments,) = self.arguments
            copy = type(arguments).from_buffer_copy(arguments)
            made.append(SimpleNamespace(**vars(self.known), arguments=copy))

    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    monkeypatch.setattr(room, "Launch", Recorder)
    monkeypatch.setattr(room, "load", lambda kernel, device_index: kernel)
    monkeypatch.setattr(room, "current_stream", lambda device_index: 7)
    monkeypatch.setattr(room, "_of_thread", room._OfThread())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return made


def test_launch_says_where_everything_lies(launches):
    x = torch.zeros(3, 10, 1024, dtype=torch.bfloat16)[:, :9, :520]
    data, scale_inv = launch_quantize_1x128(x, True, programmatic=True, cut=Cut(4, 8, 64))
    (launch,) = launches
    arguments = launch.arguments
    assert launch.kernel == "quantize_1x128_kernel<Input::kBFloat16, 4, 8, true>"
    assert (launch.grid, launch.block) == (-(-3 * 3 * 5 * 8 // 64), 64)
    assert (launch.stream, launch.programmatic) == (7, True)
    assert arguments.x == x.data_ptr()
    assert arguments.data == data.data_ptr()
    assert arguments.scale_inv == scale_inv.data_ptr()
    assert (arguments.matrix_bytes, arguments.row_bytes) == (2 * 10 * 1024, 2 * 1024)
    assert (arguments.num_matrices, arguments.num_rows, arguments.k) == (3, 9, 520)
    assert arguments.pitch == scale_inv.stride(-1) == 12
    assert (arguments.num_k_blocks.value, arguments.num_row_tiles.value) == (5, 3)
    assert arguments.ue8m0 == 1


def test_all_matrices_go_in_one_launch(launches):
    w = torch.zeros(2, 2, 200, 260)
    data, scale_inv = launch_quantize_128x128(w, False)
    (launch,) = launches
    assert launch.kernel == "quantize_128x128_kernel<Input::kFloat, false>"
    assert (launch.grid, launch.block) == (2 * 2 * 2 * 3, 256)
    assert (launch.arguments.num_matrices, launch.arguments.num_rows) == (4, 200)
    assert (data.shape, scale_inv.shape) == ((2, 2, 200, 260), (2, 2, 2, 3))


def test_a_launch_is_prepared_once_and_takes_new_addresses(launches):
    x, y = torch.zeros(2, 16, 256).unbind()
    kept = [launch_quantize_1x128(x, False), launch_quantize_1x128(y, False)]
    assert launches[0].launch is launches[1].launch
    for launch, source, (data, scale_inv) in zip(launches, (x, y), kept, strict=True):
        addresses = launch.arguments.x, launch.arguments.data, launch.arguments.scale_inv
        assert addresses == (source.data_ptr(), data.data_ptr(), scale_inv.data_ptr())
    launch_quantize_1x128(x, True)
    launch_quantize_1x128(x[:8], False)
    launch_quantize_1x128(x.bfloat16(), False)
    assert len({launch.launch for launch in launches}) == 4


def test_what_is_prepared_does_not_grow_for_ever(launches, monkeypatch):
    monkeypatch.setattr(room, "_MAX_PREPARED", 3)
    for m in range(1, 9):
        launch_quantize_1x128(torch.zeros(m, 8), False)
        assert len(room._of_thread.prepared) <= 3
    assert len(launches) == 8


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (2, 0, 5), (0,), (2, 3, 0)])
def test_nothing_is_launched_for_nothing(launches, shape):
    expected = quantize._quantize_1x128(torch.zeros(shape), False)
    ours = launch_quantize_1x128(torch.zeros(shape), False)
    assert [t.shape for t in ours] == [t.shape for t in expected]
    if len(shape) > 1:
        launch_quantize_128x128(torch.zeros(shape), False)
    assert launches == []


@pytest.mark.parametrize(
    ("make", "vectorized", "copied"),
    [
        (lambda: torch.zeros(6, 128), True, False),
        (lambda: torch.zeros(6, 136)[:, 4:132], True, False),  # 16 B on in rows 32 B apart
        (lambda: torch.zeros(6, 136)[:, 1:129], False, False),
        (lambda: torch.zeros(6, 130)[:, :128], False, False),
        (lambda: torch.zeros(6, 124), False, False),  # a row of codes ends in the middle of 8
        (lambda: torch.zeros(1, 128).expand(6, 128), True, False),
        (lambda: torch.zeros(128, 6).T, True, True),
        (lambda: torch.zeros(6, 4, 128)[:, :3], True, False),
        (lambda: torch.zeros(4, 6, 128).transpose(0, 1), True, False),
        (lambda: torch.zeros(2, 3, 6, 256)[..., :128], True, False),
        (lambda: torch.zeros(2, 3, 6, 128).transpose(0, 1), True, True),
        (lambda: torch.zeros(128), True, False),
        (lambda: torch.zeros(6, 5)[:, 2:3], False, False),
    ],
)
def test_strides_are_read_as_they_are(launches, make, vectorized, copied):
    x = make()
    launch_quantize_1x128(x, False)
    (launch,) = launches
    assert launch.kernel.endswith(", true>" if vectorized else ", false>")
    assert (launch.arguments.x != x.data_ptr()) == copied


def test_more_tiles_than_a_kernel_counts_are_refused(launches):
    x = torch.zeros(1, 1, dtype=torch.bfloat16).expand(2**31, 1)
    scale_inv = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"got \[1, 2147483648, 1\].*split the tensor"):
        room._prepare(x, scale_inv, False, False, None, 0)


# ---- Without a GPU: the numerics ----


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
    codes = quantize._quantize_1x128(x, False)[0].view(torch.uint8)
    assert bool((codes[:, 3] == 0x7F).all())
    assert not bool((codes == 0xFF).any())


# ---- On a GPU ----


BODIES = {
    "1x128": (launch_quantize_1x128, quantize._quantize_1x128),
    "128x128": (launch_quantize_128x128, quantize._quantize_128x128),
}
both = pytest.mark.parametrize(("launch", "cpu"), BODIES.values(), ids=BODIES.keys())
CUTS = (
    *(None, Cut(1, 16, 32), Cut(1, 16, 256), Cut(1, 8, 128), Cut(2, 8, 128), Cut(4, 8, 32)),
    *(Cut(4, 8, 256), Cut(4, 16, 128), Cut(8, 16, 64)),
)


def assert_same(ours: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Codes bit by bit; scales likewise, but any NaN equals any other; and the layout."""
    for tensor, other in zip(ours, expected, strict=True):
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert tensor.stride() == other.stride()
    codes, other_codes = (data.cpu().view(torch.uint8) for data in (ours[0], expected[0]))
    assert torch.equal(codes, other_codes)
    scales, other_scales = (scale_inv.cpu() for scale_inv in (ours[1], expected[1]))
    assert torch.equal(scales.isnan(), other_scales.isnan())
    assert torch.equal(scales.nan_to_num(nan=-1), other_scales.nan_to_num(nan=-1))


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


def poison(*tensors: torch.Tensor) -> None:
    """Leave NaN in the memory that PyTorch will hand out for tensors of these sizes."""
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    held = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sizes]
    del held


@on_gpu
@both
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1, 7168), (5, 1), (33, 300), (128, 7168), (1, 8), (129, 136), (2, 130, 257), (3, 2, 9, 264)],
)
def test_equals_the_cpu(launch, cpu, shape, dtype, ue8m0):
    x = spread(*shape, dtype=dtype)
    expected, on_device = cpu(x, ue8m0), x.cuda()
    poison(*expected)
    with no_synchronisation():
        ours = launch(on_device, ue8m0)
    assert_same(ours, expected)


@on_gpu
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_cut_gives_the_same(dtype, cut):
    for shape in ((301, 1024), (3, 7, 392), (2, 6, 131), (1, 128), (130,)):
        x = spread(*shape, dtype=dtype)
        expected = quantize._quantize_1x128(x, False)
        poison(*expected)
        assert_same(launch_quantize_1x128(x.cuda(), False, cut=cut), expected)


@on_gpu
@both
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_numbers_equal_the_cpu(launch, cpu, dtype, ue8m0):
    x = awkward(dtype)
    assert_same(launch(x.cuda(), ue8m0), cpu(x, ue8m0))
    for i in range(0, x.shape[0], 10):  # the blocks of 128 rows are nearly all spoilt
        part = x[i : i + 10]
        assert_same(launch(part.cuda(), ue8m0), cpu(part, ue8m0))


@on_gpu
@pytest.mark.parametrize("start", range(0, 2**23, 2**20))
def test_every_mantissa_of_a_scale_rounds_as_division(start):
    """Next to all ties of E4M3, for an amax of every mantissa; the other side divides."""
    amax = (torch.arange(start, start + 2**20, device="cuda").int() + (135 << 23)).view(
        torch.float32
    )
    x = torch.zeros(amax.numel(), 128, device="cuda")
    x[:, :112] = near_ties(amax / torch.full_like(amax, 448), 3).flatten(1)
    x[:, 64:112] *= -1
    x[:, 127] = amax
    assert bool((x.abs().amax(dim=1) == amax).all())
    (codes, scales), (expected_codes, expected_scales) = (
        body(x, False) for body in (launch_quantize_1x128, quantize._quantize_1x128)
    )
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    rows = slice(0, None, 2**12)
    assert_same(
        launch_quantize_1x128(x[rows], False), quantize._quantize_1x128(x[rows].cpu(), False)
    )


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
    ],
)
def test_views_equal_the_cpu(launch, cpu, view, dtype):
    base = spread(140, 300, dtype=dtype)
    expected = cpu(view(base), False)
    poison(*expected)
    assert_same(launch(view(base.cuda()), False), expected)


@on_gpu
@both
@pytest.mark.parametrize("offset", [1, 2, 4, 7])
def test_misaligned_memory_equals_the_cpu(launch, cpu, offset):
    x = spread(9, 256)
    memory = torch.empty(x.numel() + 8, dtype=x.dtype, device="cuda")
    moved = memory[offset : offset + x.numel()].view(x.shape).copy_(x)
    assert_same(launch(moved, False), cpu(x, False))


@on_gpu
def test_ops_take_the_kernels():
    x = spread(3, 20, 256)
    for op, cpu in (
        (quantize.quantize_1x128, quantize._quantize_1x128),
        (quantize.quantize_128x128, quantize._quantize_128x128),
    ):
        room._of_thread.prepared.clear()
        assert_same(op(x.cuda(), False), cpu(x, False))
        assert len(room._of_thread.prepared) == 1


@on_gpu
@both
def test_more_than_2_to_31_elements(launch, cpu):
    repeats, n, k = 300, 1024, 7168
    assert repeats * n * k > 2**31
    matrix = spread(n, k)
    expected_data, expected_scale_inv = (t.cuda() for t in cpu(matrix, False))
    x = matrix.cuda().repeat(repeats, 1, 1)
    data, scale_inv = launch(x, False)
    assert bool((data.view(torch.uint8) == expected_data.view(torch.uint8)).all())
    assert bool((scale_inv == expected_scale_inv).all())
    if launch is launch_quantize_1x128:
        data, scale_inv = launch(x.flatten(0, 1), False)
        assert bool((data.view(x.shape).view(torch.uint8) == expected_data.view(torch.uint8)).all())
        assert bool((scale_inv.view(repeats, n, -1) == expected_scale_inv).all())


@on_gpu
@both
def test_graphs_replay_with_new_numbers(launch, cpu):
    x = spread(40, 384).cuda()
    room._of_thread.prepared.clear()  # preparing while a graph is captured must be allowed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = launch(x, False)
    for _ in range(3):
        x.copy_(spread(40, 384))
        graph.replay()
        assert_same(ours, cpu(x.cpu(), False))


@on_gpu
@both
def test_the_current_stream_is_taken(launch, cpu):
    x, stream = spread(2000, 1024), torch.cuda.Stream()
    expected = cpu(x, False)
    with torch.cuda.stream(stream):
        on_device = torch.zeros_like(x, device="cuda")
        torch.cuda._sleep(50_000_000)
        on_device.copy_(x.cuda())
        ours = launch(on_device, False)
    stream.synchronize()
    assert_same(ours, expected)


@on_gpu
@both
def test_programmatic_launches_wait_for_what_they_read(launch, cpu):
    sources = [spread(64, 7168) for _ in range(8)]
    x = torch.empty_like(sources[0], device="cuda")
    on_device, results = [source.cuda() for source in sources], []
    for source in on_device:
        x.copy_(source)
        results.append(launch(x, False, programmatic=True))
    results += [launch(source, False, programmatic=True) for source in on_device]
    for ours, source in zip(results, sources * 2, strict=True):
        assert_same(ours, cpu(source, False))
