"""Weights quantized both ways, on the CPU and on a GPU: every byte, in memory that held others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from moefp8.quant.both import empty_both, quantize_128x128_both, quantize_128x128_both_into
from moefp8.testing import sizes
from tests.gpu import on_cpu_and_gpu, on_gpu, poison
from tests.quant.both_cases import DTYPES, SHAPES, assert_same, expected_of, run_into, weights

pytestmark = pytest.mark.filterwarnings("error:.*portable PyTorch body")
NAN, INF = float("nan"), float("inf")


def assert_right(w: torch.Tensor, parts: int) -> None:
    memory = empty_both(w, parts)
    poison(str(w.device), *(x.untyped_storage().nbytes() for x in memory))
    assert_same(quantize_128x128_both(w, parts), expected_of(w, parts))


@pytest.mark.parametrize("shape", SHAPES)
@on_cpu_and_gpu
def test_bits_are_those_of_quantize_and_transpose(device, shape):
    for dtype in DTYPES:
        for parts in (1, 2, 3):
            if shape[-2] % parts == 0:
                assert_right(weights(*shape, dtype=dtype, device=device), parts)
        wide = weights(*shape[:-1], shape[-1] + 19, dtype=dtype, device=device)
        assert_right(wide[..., 3 : shape[-1] + 3], 1)
        assert_right(wide[..., 16 : shape[-1] + 16], 1)


@given(
    batch=st.lists(st.integers(0, 2), max_size=1),
    n=sizes(150),
    k=sizes(150),
    parts=sizes(3, 1),
    dtype=st.sampled_from(DTYPES),
)
def test_any_size(batch, n, k, parts, dtype):
    assert_right(weights(*batch, n * parts, k, dtype=dtype), parts)


@pytest.mark.parametrize("dtype", DTYPES)
@on_cpu_and_gpu
def test_nan_and_infinity_stay_in_their_block(device, dtype):
    w = weights(2, 260, 392, dtype=dtype, device=device)
    w[0, 3, 7], w[0, 140, 140], w[1, 131, 5], w[1, 259, 391] = NAN, -INF, -NAN, INF
    w[1, 128:, 256:] = 0
    assert_right(w, 1)
    assert_right(w, 2)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_pattern(dtype):
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    if dtype == torch.float32:
        bits = torch.randint(-(1 << 31), 1 << 31, (512 * 512,)).to(torch.int32)
    w = bits.view(dtype).view(-1, 256)[torch.randperm(len(bits) // 256)]
    finite = w.nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    for x in (w, finite, finite.clamp(-1, 1)):
        assert_right(x.cuda(), 1)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((4, 1408, 2048), 2), ((8, 768, 2048), 1), ((1000, 4000), 1), ((3, 1234, 777), 2)],
)
@on_gpu
def test_more_tiles_than_a_gpu_takes_at_once(shape, parts):
    """The last of these with nothing aligned."""
    for dtype in (torch.bfloat16, torch.float32):
        assert_right(weights(*shape, dtype=dtype, device="cuda"), parts)


@pytest.mark.parametrize("where", [(0, 0, 0), (16, 32, 16), (0, 16, 256), (3, 2, 1)])
@on_cpu_and_gpu
def test_nothing_else_is_written(device, where):
    for shape, parts in (((2, 96, 48), 2), ((131, 130), 1), ((3, 7, 160), 1), ((1, 1, 1), 1)):
        run_into(weights(*shape, device=device), parts, *where)


def test_strided_rows_and_matrices_are_read_as_they_are():
    every = weights(5, 40, 4, 32)
    assert_right(every[:, ::2, 1, 3:20], 1)
    assert_right(every.transpose(0, 1)[..., 2, :], 5)


def test_parts_have_blocks_of_their_own():
    """Up does not change what becomes of gate, though it begins within 128 rows of it."""
    gate, up = weights(40, 24), weights(40, 24) * 1000
    both, alone = quantize_128x128_both(torch.cat([gate, up]), 2), quantize_128x128_both(gate)
    assert torch.equal(both.data[:40].view(torch.uint8), alone.data.view(torch.uint8))
    assert torch.equal(both.scale_inv[:1], alone.scale_inv)
    assert both.scale_inv.shape == (2, 1)
    assert both.transposed.shape == (24, 256)


def test_a_trace_sees_the_same_strides():
    w = weights(2, 6, 5)
    expected = quantize_128x128_both(w, 2)
    with FakeTensorMode() as mode:
        found = quantize_128x128_both(mode.from_tensor(w), 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
        )


def test_the_op_keeps_the_rules_of_torch():
    checks = "test_autograd_registration", "test_faketensor"
    w = weights(6, 5)
    arguments = w, 2, *empty_both(w, 2)
    torch.library.opcheck(quantize_128x128_both_into.overload, arguments, test_utils=checks)


def test_bad_weights_are_named():
    w = weights(6, 5)
    with pytest.raises(TypeError, match="w must be bfloat16 or float16 or float32, got float64"):
        quantize_128x128_both(w.double())
    with pytest.raises(ValueError, match=r"w must be \[N, K\] or \[E, N, K\], got shape \[6\]"):
        quantize_128x128_both(w[:, 0])
    with pytest.raises(ValueError, match=r"last dimension of w must be contiguous"):
        quantize_128x128_both(w.mT)
    for parts in (0, -1, 4):
        with pytest.raises(ValueError, match=f"divide N = 6, got {parts}"):
            quantize_128x128_both(w, parts)


@pytest.mark.parametrize("launched", [False, True])
def test_bad_memory_is_named(request, launched):
    if launched:
        request.getfixturevalue("gpu")
    w = weights(6, 5)
    good = empty_both(w, 2)

    def run(**other: torch.Tensor) -> None:
        quantize_128x128_both_into(w, 2, *good._replace(**other))

    run()
    with pytest.raises(TypeError, match="data must be float8_e4m3fn, got bfloat16"):
        run(data=w)
    with pytest.raises(ValueError, match=r"data must be the shape of w = \[6, 5\], got \[5, 6\]"):
        run(data=good.data.mT)
    with pytest.raises(ValueError, match="data must be contiguous"):
        run(data=empty_both(w.mT.contiguous(), 1).data.mT)
    with pytest.raises(TypeError, match="scale_inv must be float32"):
        run(scale_inv=good.scale_inv.half())
    with pytest.raises(ValueError, match=r"scale_inv must be .* = \[2, 1\], got \[1, 1\]"):
        run(scale_inv=good.scale_inv[:1])
    with pytest.raises(ValueError, match=r"last dimension of transposed must be contiguous"):
        run(transposed=good.transposed.mT.contiguous().mT)
    with pytest.raises(ValueError, match="transposed must have 2 dimensions"):
        run(transposed=good.transposed[None])
    for columns in (slice(4), slice(7), slice(0, 256, 1)):
        shaped = torch.cat([good.transposed.view(torch.uint8)] * 2, -1)[:, columns]
        if shaped.shape[-1] != 256:
            with pytest.raises(ValueError, match=r"parts = 2 from N = 6 to 256, got \[5, "):
                run(transposed=shaped.contiguous().view(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"from N = 6 to 256, got \[5, 512\]"):
        run(transposed=torch.empty(5, 512, dtype=torch.float8_e4m3fn))
