"""The GEMM that sums over tokens as it is launched, without a GPU: see `tests/fakes`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels import jit
from moefp8.kernels.gemm.k_grouped import KGroupedInputs, k_grouped_gemm
from moefp8.testing import sizes
from tests.fakes.emulator import emulated
from tests.kernels.gemm.cases import GROUPED_PLACES
from tests.kernels.gemm.k_grouped.cases import (
    COUNTS,
    OUTPUTS,
    SCALE_PLACES,
    expected_of,
    inputs,
    inputs_of,
    placed,
    run_and_compare,
    sides,
)

OPERANDS = KGroupedInputs._fields[:4]


# ---- Where operands lie ----


place, of_scales = (st.sampled_from(sorted(x)) for x in (GROUPED_PLACES, SCALE_PLACES))


@settings(max_examples=100)
@given(
    counts=st.lists(st.sampled_from((0, 1, 31, 32, 33, 127, 128, 129)), min_size=1, max_size=5),
    m=sizes(600, 1),
    n=sizes(300, 1),
    output=st.sampled_from(sorted(OUTPUTS)),
    blocks_b=st.booleans(),
    offsets=st.booleans(),
    before=st.sampled_from((0, 1, 130)),
    places=st.fixed_dictionaries(
        {"a": place, "b": place, "d": place, "a_scale_inv": of_scales, "b_scale_inv": of_scales}
    ),
    step=st.sampled_from((1, 2)),
)
def test_every_layout_is_addressed_rightly(
    counts, m, n, output, blocks_b, offsets, before, places, step
):
    """step: how far apart the offsets lie in memory."""
    if not offsets:
        counts, before = [max(sum(counts), 1)], 0
    made = inputs_of(sides(counts, m, n, blocks_b=blocks_b), output, offsets=offsets, before=before)
    made = placed(made, **places)
    if offsets:
        made = made._replace(expert_offsets=made.expert_offsets.repeat_interleave(step)[::step])
    with emulated() as gpu:
        run_and_compare(made)
    assert len(gpu.launched) == 1


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("where", GROUPED_PLACES)
def test_what_tma_cannot_address_is_copied_and_nothing_else(gpu, name, where):
    made = placed(inputs("one has all", 48, 24, "bf16"), **{name: where})
    run_and_compare(made)
    (launched,) = gpu.launched
    for operand in OPERANDS:
        x, its_map = getattr(made, operand), getattr(launched.maps, operand.replace("_inv", "s"))
        copied = operand == name and not GROUPED_PLACES[where].fits
        assert (its_map.address != x.data_ptr()) == copied


@pytest.mark.parametrize("name", ["a_scale_inv", "b_scale_inv"])
@pytest.mark.parametrize("where", SCALE_PLACES)
def test_scales_are_copied_only_if_they_must(gpu, name, where):
    made = inputs("one has all", 50, 50, "bf16")
    made = placed(made, a_scale_inv="wider", b_scale_inv="wider")
    made = placed(made, **{name: where})
    run_and_compare(made)
    (launched,) = gpu.launched
    its_map = getattr(launched.maps, name.replace("_inv", "s"))
    is_read_in_place = its_map.address == getattr(made, name).data_ptr()
    assert is_read_in_place == SCALE_PLACES[where].fits


@pytest.mark.parametrize("features", [48, 50])
def test_contiguous_scales_are_read_in_place_where_rows_are_multiples_of_16_bytes(gpu, features):
    made = inputs("one has all", features, features, "bf16")
    run_and_compare(made)
    (launched,) = gpu.launched
    addresses = launched.maps.a_scales.address, launched.maps.b_scales.address
    is_read_in_place = addresses == (made.a_scale_inv.data_ptr(), made.b_scale_inv.data_ptr())
    assert is_read_in_place == (features % 4 == 0)


def test_views_of_row_major_codes_are_read_in_place(gpu):
    """Codes [features, tokens] with whole blocks need no copy: blocks are a view of them."""
    made = inputs_of(sides([384], 40, 72), "bf16", offsets=False)
    rows = [x.transpose(0, 1).reshape(x.shape[1], -1) for x in (made.a, made.b)]
    a, b = (x.unflatten(1, (-1, 128)).transpose(0, 1) for x in rows)
    run_and_compare(made._replace(a=a, b=b))
    (launched,) = gpu.launched
    assert [launched.maps.a.address, launched.maps.b.address] == [x.data_ptr() for x in rows]


@pytest.mark.parametrize("stride", [0, 1, 7, 2**50])
@pytest.mark.parametrize("output", OUTPUTS)
def test_what_one_row_or_one_expert_says_of_its_stride_is_void(gpu, stride, output):
    made = inputs_of(sides([5], 1, 112), output)
    void = {
        name: x.as_strided(
            x.shape, [stride if x.shape[i] == 1 else x.stride(i) for i in range(x.ndim)]
        )
        for name, x in made._asdict().items()
        if name in (*OPERANDS, "d")
    }
    expected = expected_of(made)
    k_grouped_gemm(*made._replace(**void))
    assert torch.equal(made.d, expected.to(made.d.dtype))
    (launched,) = gpu.launched
    assert [x.address for x in launched.maps[:2]] == [made.a.data_ptr(), made.b.data_ptr()]


# ---- How d is written ----


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("where", GROUPED_PLACES)
@pytest.mark.parametrize("n", [24, 28, 30])
@pytest.mark.parametrize("counts", [[20, 0, 130], [200]])
def test_d_leaves_through_shared_memory_where_tma_can_address_it(gpu, output, where, n, counts):
    made = placed(inputs_of(sides(counts, 70, n), output), d=where)
    run_and_compare(made)
    (launched,) = gpu.launched
    size = made.d.element_size()
    fits = GROUPED_PLACES[where].fits or (where == "odd steps" and len(counts) == 1)
    assert launched.config.stages_output == (fits and n * size % 16 == 0)
    assert launched.arguments.d == made.d.data_ptr()
    if fits and n * size % 16 == 0:
        assert launched.arguments.aligned


def test_d_of_an_expert_and_of_all_are_one_launch_each(gpu):
    made = inputs("one expert", 70, 24, "bf16")
    run_and_compare(made)
    launched = gpu.launched[0]
    assert launched.arguments.num_experts == 1
    assert launched.arguments.expert_offsets is None
    assert launched.maps.d.shape == [24, 70, 1]


def test_codes_behind_the_last_token_count_up_to_the_next_32(gpu):
    """Which is why they must be zeros there; behind that they may be anything."""
    made = inputs_of(sides([129, 5], 3, 8), "fp32")
    expected = expected_of(made)
    a, b = (x.view(torch.uint8) for x in (made.a, made.b))
    for count, block in ((1, 1), (5, 2)):
        assert not a[block, :, count:32].any()
        assert bool((a[block, :, 32:] == 0x7F).all())
    k_grouped_gemm(*made)
    assert torch.equal(made.d.double(), expected)
    a[2, 0, 31] = b[2, :, 31] = 0x38  # 1.0
    k_grouped_gemm(*made)
    assert torch.equal(made.d[0].double(), expected[0])
    assert torch.equal(made.d[1, 1:].double(), expected[1, 1:])
    scales = (made.a_scale_inv[2, 0] * made.b_scale_inv[2]).double()
    assert torch.equal(made.d[1, 0].double(), expected[1, 0] + scales)


# ---- Configurations ----


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 7])
@pytest.mark.parametrize(("m", "n"), [(257, 520), (1600, 130), (5, 1000), (2900, 300)])
@pytest.mark.parametrize("blocks_b", [False, True])
def test_num_sms_limits_the_grid(gpu, limit, m, n, blocks_b):
    kernels.set_num_sms(limit)
    run_and_compare(inputs_of(sides([20, 0, 30], m, n, blocks_b=blocks_b), "bf16"))
    (launched,) = gpu.launched
    assert launched.grid <= max(limit or gpu.sms, launched.cluster)
    assert launched.cluster == (2 if blocks_b else 1)


def test_a_pair_of_ctas_is_for_more_than_one_tile_of_columns(gpu):
    for n in (1, 128, 129, 256):
        run_and_compare(inputs_of(sides([20], 5, n, blocks_b=True), "bf16"))
    assert [x.cluster for x in gpu.launched] == [1, 1, 2, 2]


# ---- Without work, and without a kernel ----


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("offsets", [False, True])
def test_without_work_nothing_is_launched(gpu, output, offsets):
    dtype, accumulates = OUTPUTS[output]
    for num_blocks, m, n in ((0, 4, 8), (3, 0, 8), (3, 4, 0)):
        a, b = (torch.zeros(num_blocks, x, 128).to(kernels.E4M3) for x in (m, n))
        scales = torch.ones(num_blocks, m), torch.ones(num_blocks, n)
        d = torch.full((2, m, n) if offsets else (m, n), 7.0, dtype=dtype)
        given = torch.zeros(3, dtype=torch.int32) if offsets else None
        for _ in range(2):
            operands = a, scales[0], b, scales[1]
            k_grouped_gemm(*operands, d, given, 128 * num_blocks, accumulates)
        assert bool((d == (7.0 if accumulates else 0.0)).all())
    assert gpu.launched == []


@pytest.mark.usefixtures("gpu")
def test_sizes_beyond_the_coordinates_are_refused():
    with torch.device("meta"):
        a, b = (torch.empty(1, x, 128, dtype=kernels.E4M3) for x in (2**31, 8))
        scales = torch.empty(1, 2**31), torch.empty(1, 8)
        d = torch.empty(2**31, 8)
    made = KGroupedInputs(a, scales[0], b, scales[1], d, None, 128)
    with pytest.raises(
        ValueError, match=r"M, N and K must be at most .* got 2147483648, 8 and 128"
    ):
        k_grouped_gemm(*made)


def test_without_a_kernel_there_is_an_error(gpu, monkeypatch):
    def fail(kernel, device_index):
        raise jit.JitError("no usable NVRTC")

    made = inputs("one has all", 5, 8, "bf16")
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "load", fail)
        with pytest.raises(jit.JitError, match="no usable NVRTC"):
            k_grouped_gemm(*made)
    assert bool(made.d.isnan().all())
    run_and_compare(made)  # once the cause is gone


# ---- What is kept ----


def test_addresses_are_looked_at_in_each_call(gpu):
    for _ in range(3):
        run_and_compare(inputs_of(sides([20, 0, 300], 48, 136), "bf16"))
        run_and_compare(inputs_of(sides([0, 319, 1], 48, 136), "bf16"))
    offsets = torch.zeros(9, dtype=torch.int32)
    made = inputs_of(sides([20, 0, 300], 48, 136), "bf16")
    for first in range(3):  # offsets may lie at any address
        given = offsets[first : first + 4].copy_(made.expert_offsets)
        run_and_compare(made._replace(expert_offsets=given))
    assert len(gpu.launched) == 9
    assert len(gpu.prepared()) == 1


@pytest.mark.parametrize("output", OUTPUTS)
def test_whether_d_is_aligned_is_looked_at_in_each_call(gpu, output):
    made = inputs_of(sides([20, 0, 300], 48, 136), output)
    memory = torch.zeros(made.d.numel() + 16, dtype=made.d.dtype)
    for start in (0, 1, 16, 1, 0):
        d = memory[start : start + made.d.numel()].view(made.d.shape)
        run_and_compare(made._replace(d=d.copy_(made.d)))
        assert gpu.launched[-1].config.stages_output == (start % 16 == 0)
    assert len(gpu.prepared()) == 2


def test_with_offsets_the_number_of_tokens_means_nothing(gpu):
    made = inputs_of(sides([20, 0, 300], 48, 136), "bf16")
    for num_tokens in (0, 7, -1, 320, 10**6):
        run_and_compare(made._replace(num_tokens=num_tokens))
    assert len(gpu.prepared()) == 1


def test_whatever_decides_a_launch_is_in_its_key(gpu):
    made = inputs_of(sides([20, 0, 300], 48, 136), "fp32")
    more = inputs_of(sides([20, 0, 300], 48, 136), "fp32", before=70)
    alone = inputs_of(sides([384], 48, 136), "fp32", offsets=False)
    fewer = inputs_of(sides([383], 48, 136), "fp32", offsets=False)
    calls = [
        made,
        made._replace(accumulates=True, d=torch.zeros_like(made.d)),
        inputs_of(sides([20, 0, 300], 48, 136, blocks_b=True), "fp32"),
        inputs_of(sides([20, 0, 300], 48, 136), "bf16"),
        inputs_of(sides([20, 0, 300], 48, 144), "fp32"),
        inputs_of(sides([20, 0, 300], 56, 136), "fp32"),
        inputs_of(sides([320], 48, 136), "fp32"),
        more,
        alone,
        fewer,
        placed(made, d="aligned columns"),
        placed(made, d="odd address"),
        placed(made, a="rows in turn"),
        placed(made, b="halves"),
        placed(made, a_scale_inv="wider"),
        placed(made, b_scale_inv="wider"),
    ]
    for number, each in enumerate(calls, 1):
        run_and_compare(each)
        assert len(gpu.prepared()) == number
    kernels.set_num_sms(3)
    run_and_compare(made)
    assert len(gpu.prepared()) == len(calls) + 1
    for each in calls:
        run_and_compare(each)


@pytest.mark.parametrize("name", COUNTS)
def test_the_op_launches_every_case(gpu, name):
    for output in OUTPUTS:
        for blocks_b in (False, True):
            run_and_compare(inputs(name, 70, 264, output, blocks_b=blocks_b))
    assert len(gpu.launched) == 6


@pytest.mark.parametrize("seed", range(4))
def test_any_offsets_keep_within_d(gpu, seed):
    """What is written then means nothing."""
    made = inputs_of(sides([20, 0, 300, 7], 48, 136), "bf16")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        offsets = torch.randint(-(2**31), 2**31, (5,), dtype=torch.int64, generator=generator)
        small = torch.randint(-300, 900, (5,), generator=generator)
        keeps = torch.rand(5, generator=generator) < 0.4
        made.expert_offsets.copy_(torch.where(keeps, offsets, small))
        k_grouped_gemm(*made)
    assert len(gpu.launched) == 5
