"""Transposed codes, on the CPU and on a GPU: every byte, in memory that held others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from moefp8.quant import BlockScaled, dequantize, quantize_128x128
from moefp8.quant.transpose import empty_transposed, transpose_codes, transpose_codes_into
from moefp8.testing import sizes
from tests.gpu import on_cpu_and_gpu, on_gpu, poison
from tests.quant.transpose_cases import LAYOUTS, SHAPES, codes, expected_of, run_into

pytestmark = pytest.mark.filterwarnings("error:.*portable PyTorch body")


def assert_right(w: torch.Tensor, parts: int) -> None:
    """The result, and in memory all rows with what lies between them."""
    *batch, n, k = w.shape
    columns = n if parts == 1 else parts * (-(-(n // parts) // 128) * 128)
    pitch = -(-columns // 16) * 16
    poison(str(w.device), torch.Size([*batch, k, pitch]).numel())
    found = transpose_codes(w, parts)
    assert found.shape == (*batch, k, columns)
    if found.numel():
        assert found.stride()[-2:] == (pitch, 1)
        assert found.ndim == 2 or found.stride(0) == k * pitch
        memory = found.as_strided((*batch, k, pitch), found.stride())
        width = pitch if parts == 1 else columns // parts
        assert torch.equal(memory.view(torch.uint8), expected_of(w, parts, width))


@pytest.mark.parametrize("shape", SHAPES)
@on_cpu_and_gpu
def test_every_code_comes_to_its_place(device, shape):
    *_, n, k = shape
    for parts in (1, 2, 3):
        if n % parts == 0:
            assert_right(codes(*shape, device=device), parts)
    assert_right(codes(*shape[:-1], k + 19, device=device)[..., 3 : k + 3], 1)
    assert_right(codes(*shape[:-1], k + 32, device=device)[..., 16 : k + 16], 1)


@given(batch=st.lists(st.integers(0, 3), max_size=1), n=sizes(150), k=sizes(150), parts=sizes(3, 1))
def test_any_size(batch, n, k, parts):
    assert_right(codes(*batch, n * parts, k), parts)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((4, 1408, 2048), 2), ((8, 768, 2048), 1), ((1000, 4000), 1), ((3, 1234, 777), 2)],
)
@on_gpu
def test_more_tiles_than_a_gpu_takes_at_once(shape, parts):
    """The last of these with nothing aligned."""
    assert_right(codes(*shape, device="cuda"), parts)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_cpu_and_gpu
def test_nothing_else_is_written(device, layout):
    for shape, parts in (((2, 96, 48), 2), ((131, 130), 1), ((3, 7, 160), 1), ((1, 1, 1), 1)):
        run_into(codes(*shape, device=device), parts, layout)


@on_cpu_and_gpu
def test_two_tensors_go_side_by_side(device):
    """As gate and up that were one tensor do."""
    gate, up = codes(72, 144, device=device), codes(72, 144, device=device)
    out = empty_transposed(gate, (144, 256))
    transpose_codes_into(gate, 1, out[:, :128])
    transpose_codes_into(up, 1, out[:, 128:])
    both = transpose_codes(torch.cat([gate, up]), 2)
    assert torch.equal(out.view(torch.uint8), both.view(torch.uint8))


def test_memory_for_it_lies_as_the_result_does():
    w = codes(3, 40, 9)
    memory, found = empty_transposed(w, (3, 9, 40)), transpose_codes(w)
    assert (memory.shape, memory.stride()) == (found.shape, found.stride())
    assert found.stride() == (9 * 48, 48, 1)


def test_the_scales_are_transposed_too():
    q = quantize_128x128(torch.randn(2, 200, 300))
    transposed = BlockScaled(transpose_codes(q.data), q.scale_inv.mT)
    assert torch.equal(dequantize(transposed), dequantize(q).mT)


def test_strided_rows_and_matrices_are_read_as_they_are():
    every = codes(5, 40, 4, 32)
    assert_right(every[:, ::2, 1, 3:20], 1)
    assert_right(every.transpose(0, 1)[..., 2, :], 5)


def test_a_trace_sees_the_same_strides():
    w = codes(2, 6, 5)
    expected = transpose_codes(w, 2)
    with FakeTensorMode() as mode:
        found = transpose_codes(mode.from_tensor(w), 2)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())


def test_the_op_keeps_the_rules_of_torch():
    checks = "test_autograd_registration", "test_faketensor"
    arguments = codes(6, 5), 2, codes(5, 8)
    torch.library.opcheck(transpose_codes_into.overload, arguments, test_utils=checks)


def test_bad_input_is_named():
    w = codes(6, 5)
    with pytest.raises(TypeError, match="w must be float8_e4m3fn, got uint8"):
        transpose_codes(w.view(torch.uint8))
    with pytest.raises(ValueError, match=r"w must be \[N, K\] or \[E, N, K\], got shape \[6\]"):
        transpose_codes(w[:, 0])
    with pytest.raises(ValueError, match=r"last dimension of w must be contiguous"):
        transpose_codes(w.mT)
    for parts in (0, -1, 4):
        with pytest.raises(ValueError, match=f"divide N = 6, got {parts}"):
            transpose_codes(w, parts)


@pytest.mark.parametrize("launched", [False, True])
def test_a_bad_destination_is_named(request, launched):
    if launched:
        request.getfixturevalue("gpu")
    w = codes(6, 5)
    for shape in ((5, 4), (4, 6), (5, 7), (0, 6)):
        with pytest.raises(ValueError, match=r"out must be \[5, 'columns'\].*parts = 2"):
            transpose_codes_into(w, 2, codes(*shape))
    with pytest.raises(ValueError, match="out must have 2 dimensions"):
        transpose_codes_into(w, 2, codes(1, 5, 6))
    with pytest.raises(TypeError, match="out must be float8_e4m3fn, got bfloat16"):
        transpose_codes_into(w, 2, codes(5, 6).bfloat16())
    with pytest.raises(ValueError, match=r"last dimension of out must be contiguous"):
        transpose_codes_into(w, 2, codes(6, 5).mT)
