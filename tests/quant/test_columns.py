"""Column codes on the CPU and on a GPU: bit for bit, whatever experts have."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from moefp8.kernels import jit
from moefp8.kernels.gemm.k_grouped import k_grouped_gemm
from moefp8.quant.columns import (
    first_block,
    num_column_blocks,
    quantize_1x128_and_128x1,
    quantize_128x1,
)
from moefp8.quant.quantize import quantize_1x128
from tests.gpu import no_synchronisation, on_gpu, same_bits
from tests.quant.columns_cases import (
    COUNTS,
    DTYPES,
    NUM_ROWS_OF_ONE,
    assert_right,
    assert_same,
    awkward,
    check_both_ops,
    gathered,
    offsets_of,
)

pytestmark = pytest.mark.filterwarnings("error:.*portable PyTorch body")
of_blocks = pytest.mark.parametrize("blocks", [False, True], ids=["128x1", "128x128"])


def made(
    name: str, k: int = 9, *, finite: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    counts = COUNTS[name]
    num_rows = NUM_ROWS_OF_ONE if counts is None else sum(counts)
    x = awkward(num_rows, k, torch.bfloat16, finite)
    return x, None if counts is None else offsets_of(counts)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_codes_equal_the_reference_bit_for_bit(name, ue8m0):
    x, offsets = made(name)
    assert_right(quantize_128x1(x, offsets, None, ue8m0, 1e-4), x, offsets, ue8m0)
    row_to_token = torch.randint(-2, len(x) + 2, (len(x) + 5,), dtype=torch.int32)
    found = quantize_128x1(x, offsets, row_to_token, ue8m0, 1e-4)
    assert_right(found, gathered(x, row_to_token), offsets, ue8m0)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("finite", [False, True])
def test_codes_of_blocks_equal_the_reference_bit_for_bit(name, finite):
    """Infinite numbers spoil whole blocks of 128x128, so there are cases without them."""
    for k, ue8m0, min_amax in ((140, False, 2.0**-60), (9, True, 64.0)):
        x, offsets = made(name, k, finite=finite)
        options = ue8m0, min_amax, True
        found = quantize_128x1(x, offsets, None, *options)
        assert_right(found, x, offsets, *options)
        row_to_token = torch.randint(-2, len(x) + 2, (len(x) + 5,), dtype=torch.int32)
        found = quantize_128x1(x, offsets, row_to_token, *options)
        assert_right(found, gathered(x, row_to_token), offsets, *options)


@of_blocks
@pytest.mark.parametrize("name", COUNTS)
def test_both_ways_are_those_of_one_way(name, blocks):
    x, offsets = made(name, 140)
    row_data, row_scale_inv, *columns = quantize_1x128_and_128x1(
        x, offsets, False, 2.0**-60, blocks
    )
    expected = quantize_1x128(x, False, 2.0**-60)
    assert same_bits(row_data, expected[0])
    assert same_bits(row_scale_inv, expected[1])
    assert row_scale_inv.stride() == expected[1].stride()
    theirs = quantize_128x1(x, offsets, None, False, 2.0**-60, blocks)
    assert_same(columns, theirs, offsets, len(x))


def test_a_bad_number_spoils_its_own_block_only():
    x = torch.randn(300, 6).bfloat16()
    offsets = offsets_of([130, 170])
    clean = quantize_128x1(x, offsets, None, False, 1e-4)
    x[140, 2], x[5, 3] = math.nan, math.inf
    data, scale_inv = quantize_128x1(x, offsets, None, False, 1e-4)
    bad = torch.zeros_like(scale_inv, dtype=torch.bool)
    bad[first_block(130, 1), 2] = bad[0, 3] = True
    used = torch.tensor([0, 1, 2, 3])
    finite = scale_inv.isfinite()
    assert torch.equal(~finite[used], bad[used])
    good = ~bad[used]
    assert torch.equal(scale_inv[used][good], clean[1][used][good])
    codes, before = (y.view(torch.uint8)[used] for y in (data, clean[0]))
    assert torch.equal(codes[good][:, :32], before[good][:, :32])


def test_a_bad_number_spoils_its_own_block_of_128x128_only():
    """Also where the block has few tokens, which the next expert's follow, or few features."""
    x, offsets = torch.randn(300, 260).bfloat16(), offsets_of([130, 170])
    clean = quantize_128x1(x, offsets, None, False, 1e-4, True)
    places = {(5, 3): (0, 0), (129, 255): (1, 1), (130, 256): (2, 2), (299, 0): (3, 0)}
    for value in (math.nan, math.inf):
        for place, block in places.items():
            dirty = x.clone()
            dirty[place] = value
            data, scale_inv = quantize_128x1(dirty, offsets, None, False, 1e-4, True)
            good = torch.ones(4, 3, dtype=torch.bool)
            good[block] = False
            assert torch.equal(scale_inv[:4].isfinite(), good)
            assert torch.equal(scale_inv[:4][good], clean[1][:4][good])
            for i, features in enumerate((slice(0, 128), slice(128, 256), slice(256, 260))):
                for j, count in enumerate((128, 2, 128, 42)):
                    if good[j, i]:
                        codes, before = (y.view(torch.uint8)[j, features] for y in (data, clean[0]))
                        assert torch.equal(codes[:, :count], before[:, :count])


def test_the_gemm_of_gradients_takes_both_forms():
    counts = [130, 0, 17]
    offsets, num_rows = offsets_of(counts), sum(counts)
    x, dy = torch.randn(num_rows, 140), torch.randn(num_rows, 24)
    a = quantize_128x1(dy, offsets, None, False, 1e-4)
    for blocks in (False, True):
        b = quantize_128x1(x, offsets, None, False, 1e-4, blocks)
        d = torch.empty(3, 24, 140)
        k_grouped_gemm(*a, *b, d, offsets, num_rows)
        for expert, (begin, count) in enumerate(zip(offsets.tolist(), counts, strict=False)):
            rows = slice(begin, begin + count)
            expected = dy[rows].T @ x[rows]
            error = (d[expert] - expected).norm()
            assert error <= 0.05 * expected.norm()


def test_blocks_of_experts_do_not_meet():
    """Whatever they have: the room is for the worst case, and the worst case needs it."""
    for counts in ([0] * 5, [1] * 7, [128] * 3, [129, 127, 1], [127] * 9, [3, 1000, 0, 128]):
        begin = end = 0
        for expert, count in enumerate(counts):
            assert first_block(begin, expert) >= end
            end = first_block(begin, expert) + -(-count // 128)
            begin += count
        assert end <= num_column_blocks(begin, len(counts))
    assert num_column_blocks(129, None) == 2


@pytest.mark.parametrize("with_offsets", [False, True])
def test_a_trace_sees_the_same_layout(with_offsets):
    x, offsets = awkward(200, 9, torch.float16), offsets_of([100, 90]) if with_offsets else None
    row_to_token = torch.arange(150, dtype=torch.int32)
    for op, arguments in (
        (quantize_128x1, (x, offsets, row_to_token, False, 1e-4)),
        (quantize_1x128_and_128x1, (x, offsets, False, 1e-4)),
        (quantize_128x1, (x, offsets, row_to_token, False, 1e-4, True)),
        (quantize_1x128_and_128x1, (x, offsets, False, 1e-4, True)),
    ):
        expected = op(*arguments)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(y) if torch.is_tensor(y) else y for y in arguments]
            found = op(*fakes)
        assert [y.shape for y in found] == [y.shape for y in expected]
        assert [y.stride() for y in found] == [y.stride() for y in expected]


def test_the_ops_keep_the_rules_of_torch():
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    x = torch.randn(128, 8)  # without offsets and of whole blocks, all that is given is defined
    for blocks in (False, True):
        for op, arguments in (
            (quantize_128x1, (x, None, None, False, 1e-4, blocks)),
            (quantize_1x128_and_128x1, (x, None, False, 1e-4, blocks)),
        ):
            torch.library.opcheck(op.overload, arguments, test_utils=checks)


@pytest.mark.parametrize("launched", [False, True])
def test_bad_input_is_named(request, launched):
    if launched:
        request.getfixturevalue("gpu")
    x, offsets = torch.zeros(4, 8), torch.zeros(3, dtype=torch.int32)
    for op, name, more in (
        (quantize_128x1, "quantize_128x1", (None,)),
        (quantize_1x128_and_128x1, "quantize_1x128_and_128x1", ()),
    ):
        rest = (*more, False, 1e-4)
        with pytest.raises(TypeError, match=f"{name}: x must be .*float32, got int32"):
            op(x.int(), None, *rest)
        with pytest.raises(ValueError, match=rf"{name}: x must have 2 dimensions, got shape \[4\]"):
            op(x[:, 0], None, *rest)
        with pytest.raises(TypeError, match=f"{name}: expert_offsets must be int32, got int64"):
            op(x, offsets.long(), *rest)
        with pytest.raises(ValueError, match=rf"{name}: expert_offsets must be \[E \+ 1\].*\[1\]"):
            op(x, offsets[:1], *rest)
    with pytest.raises(TypeError, match="row_to_token must be int32, got float32"):
        quantize_128x1(x, None, x[0], False, 1e-4)
    with pytest.raises(ValueError, match="one device, got x on cpu, expert_offsets on meta"):
        quantize_128x1(x, offsets.to("meta"), None, False, 1e-4)


# ---- On a GPU ----


@on_gpu
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_equals_the_cpu(name, dtype):
    for k, ue8m0 in ((256, False), (136, True), (8, False), (1, False), (131, True), (520, False)):
        check_both_ops(name, k, dtype, "cuda", ue8m0)
        check_both_ops(name, k, dtype, "cuda", ue8m0, shift=3)
        check_both_ops(name, k, dtype, "cuda", ue8m0, blocks=True)
        check_both_ops(name, k, dtype, "cuda", ue8m0, blocks=True, finite=True)
        check_both_ops(name, k, dtype, "cuda", ue8m0, shift=3, blocks=True, finite=True)


@on_gpu
def test_gpu_reads_rows_as_they_lie():
    base = awkward(300, 400, torch.bfloat16)
    offsets = offsets_of([100, 23, 17])
    for view in (
        lambda x: x[:, 8:264],
        lambda x: x[::2, :200],
        lambda x: x[:, 1:257],
        lambda x: x.T,
        lambda x: x[:1].expand(140, 400),
        lambda x: x[3:4, :128].expand(140, 128),
    ):
        expected = quantize_1x128_and_128x1(view(base), offsets, False, 1e-4)
        found = quantize_1x128_and_128x1(view(base.cuda()), offsets.cuda(), False, 1e-4)
        assert_same(found, expected, offsets, len(view(base)))


@on_gpu
@of_blocks
def test_gpu_waits_for_nothing(blocks):
    counts = [300, 0, 17, 2000, 128]
    x, offsets = awkward(sum(counts), 768, torch.bfloat16), offsets_of(counts)
    arguments = x.cuda(), offsets.cuda()
    with jit.using(jit.Driver()) as driver, no_synchronisation():
        found = quantize_1x128_and_128x1(*arguments, True, 1e-4, blocks)
        columns = quantize_128x1(*arguments, None, True, 1e-4, blocks)
        assert len(driver.prepared()) == 2
    expected = quantize_1x128_and_128x1(x, offsets, True, 1e-4, blocks)
    assert_same(found, expected, offsets, len(x))
    assert_same(columns, found[2:], offsets, len(x))


@on_gpu
def test_gpu_survives_any_offsets():
    """What is written then means nothing, but it stays where it belongs."""
    x = torch.randn(500, 264, device="cuda").bfloat16()
    for _ in range(20):
        offsets = torch.randint(-(2**31), 2**31, (9,), dtype=torch.int64).int()
        offsets[torch.rand(9) < 0.6] = int(torch.randint(-300, 900, ()))
        row_to_token = torch.randint(-(2**31), 2**31, (700,), dtype=torch.int64).int().cuda()
        for blocks in (False, True):
            quantize_1x128_and_128x1(x, offsets.cuda(), False, 1e-4, blocks)
            quantize_128x1(x, offsets.cuda(), row_to_token, False, 1e-4, blocks)
    torch.cuda.synchronize()


@on_gpu
@of_blocks
def test_gpu_takes_more_than_2_to_31_elements(blocks):
    repeats, rows, k = 300, 1024, 7168
    assert repeats * rows * k > 2**31
    x = torch.randn(rows, k).bfloat16()
    expected = [y.cuda() for y in quantize_1x128_and_128x1(x, None, False, 1e-4, blocks)]
    row_data, row_scale_inv, data, scale_inv = quantize_1x128_and_128x1(
        x.cuda().repeat(repeats, 1), None, False, 1e-4, blocks
    )
    bytes_of = [y.view(torch.uint8) for y in (row_data, expected[0], data, expected[2])]
    assert bool((bytes_of[0].view(repeats, rows, k) == bytes_of[1]).all())
    assert bool((bytes_of[2].view(repeats, rows // 128, k, 128) == bytes_of[3]).all())
    assert bool((row_scale_inv.T.view(-1, repeats, rows) == expected[1].T[:, None]).all())
    assert bool((scale_inv.view(repeats, rows // 128, -1) == expected[3]).all())
