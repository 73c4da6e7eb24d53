"""The GEMM that sums over tokens, on the CPU and on a GPU: whatever experts have."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses import FakeTensorMode

from moefp8.kernels import E4M3
from moefp8.kernels.gemm.k_grouped import KGroupedInputs, k_grouped_gemm
from moefp8.quant.columns import quantize_128x1
from moefp8.testing import relative_error
from tests.gpu import on_cpu_and_gpu
from tests.kernels.gemm.k_grouped.cases import (
    COUNTS,
    OUTPUTS,
    Sides,
    assert_right,
    expected_of,
    inputs,
    inputs_of,
    run_and_compare,
    sides,
)
from tests.quant.columns_cases import offsets_of

pytestmark = pytest.mark.filterwarnings("error:.*portable PyTorch body")
SHAPES = (1, 1), (3, 8), (70, 101), (130, 264)


@on_cpu_and_gpu
@pytest.mark.parametrize("blocks_b", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("name", COUNTS)
def test_sums_are_exact(device, name, output, blocks_b):
    """What no token has is NaN, and is not seen; experts without tokens get zeros, or nothing."""
    for m, n in SHAPES:
        run_and_compare(inputs(name, m, n, output, device, blocks_b=blocks_b))
    run_and_compare(inputs(name, 9, 130, output, device, blocks_b=blocks_b, before=77))


@on_cpu_and_gpu
@pytest.mark.parametrize("blocks_b", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("name", COUNTS)
def test_any_numbers_are_right(device, name, output, blocks_b):
    made = inputs(name, 70, 200, output, device, blocks_b=blocks_b, exact=False)
    expected = expected_of(made)
    k_grouped_gemm(*made)
    assert_right(made, expected)


@on_cpu_and_gpu
@pytest.mark.parametrize("output", OUTPUTS)
def test_it_multiplies_what_tokens_are_quantized_to(device, output):
    """From x [T, K] and offsets on, as a backward does."""
    offsets = offsets_of([100, 0, 130, 20]).to(device)
    x, y = torch.randn(250, 72, device=device), torch.randn(250, 136, device=device)
    a, b = (quantize_128x1(z, offsets, None, False, 2.0**-60) for z in (x, y))
    made = inputs_of(sides([100, 0, 130, 20], 72, 136, device), output)
    made = KGroupedInputs(*a, *b, *made[4:])
    start = made.d.double() if made.accumulates else 0.0
    expected = expected_of(made)
    k_grouped_gemm(*made)
    assert_right(made, expected)
    for e, (begin, end) in enumerate(pairwise(offsets.tolist())):
        exact = x[begin:end].double().T @ y[begin:end].double()
        assert relative_error((expected - start)[e].flatten(), exact.flatten()) < 0.04


@on_cpu_and_gpu
@pytest.mark.parametrize("output", OUTPUTS)
def test_an_expert_has_the_bits_of_its_own(device, output):
    """Whatever others have, and wherever its tokens begin."""
    counts, m, n = [200, 0, 77, 128, 33], 66, 136
    made = sides(counts, m, n, device, exact=False)
    together = inputs_of(made, output)
    before = together.d.clone()
    k_grouped_gemm(*together)
    others = sides([1, 300, 0, 129, 40], m, n, device, exact=False)
    for expert in range(len(counts)):
        mixed = [
            [mine[expert] if e == expert else x for e, x in enumerate(theirs)]
            for mine, theirs in zip(made, others, strict=True)
        ]
        for its, offsets in ((Sides(*mixed), True), (alone(made, expert), False)):
            found = inputs_of(its, output, offsets=offsets)
            d = found.d[expert] if offsets else found.d
            d.copy_(before[expert])
            k_grouped_gemm(*found)
            assert torch.equal(d, together.d[expert]), (expert, offsets)


def alone(made: Sides, expert: int) -> Sides:
    return Sides(*([side[expert]] for side in made))


@on_cpu_and_gpu
def test_what_is_added_twice_is_twice_there(device):
    made = inputs("around a step and a block", 70, 136, "fp32 +=", device)
    once = expected_of(made) - made.d
    expected = made.d + 2 * once
    for _ in range(2):
        k_grouped_gemm(*made)
    assert torch.equal(made.d.double(), expected)


@on_cpu_and_gpu
def test_a_bad_number_reaches_its_feature_of_its_expert_alone(device):
    made = inputs("around a step and a block", 20, 24, "fp32", device)
    expert = block = 4  # its 33 tokens begin at the 64th
    assert int(made.expert_offsets[expert]) == 64
    made.a.view(torch.uint8)[block, 7, 32] = 0x7F
    made.b_scale_inv[block, 11] = torch.inf
    k_grouped_gemm(*made)
    is_bad = torch.zeros(made.d.shape, dtype=torch.bool)
    is_bad[expert, 7] = is_bad[expert, :, 11] = True
    assert torch.equal(~made.d.isfinite().cpu(), is_bad)


def test_the_cpu_sees_nothing_behind_the_last_token():
    """A kernel multiplies zeros there, up to the next multiple of 32."""
    made = inputs("around a step and a block", 5, 6, "fp32")
    expected = expected_of(made)
    for x in (made.a, made.b):
        x.view(torch.uint8)[1, :, 1:] = 0x7F  # the block of an expert with one token
    k_grouped_gemm(*made)
    assert torch.equal(made.d.double(), expected)


@on_cpu_and_gpu
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("num_experts", "m", "n"), [(0, 4, 8), (3, 0, 8), (3, 4, 0), (3, 4, 8)])
def test_of_nothing_comes_nothing(device, output, num_experts, m, n):
    """Without blocks, without features, without experts."""
    dtype, accumulates = OUTPUTS[output]
    codes = torch.empty(0, max(m, n), 128, device=device).to(E4M3)
    scales = torch.empty(0, max(m, n), device=device)
    d = torch.full((num_experts, m, n), 7.0, dtype=dtype, device=device)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    operands = codes[:, :m], scales[:, :m], codes[:, :n], scales[:, :n]
    made = KGroupedInputs(*operands, d, offsets, 0, accumulates)
    k_grouped_gemm(*made)
    assert bool((made.d == (7.0 if accumulates else 0.0)).all())
    if num_experts:
        d = made.d[0].fill_(7.0)
        k_grouped_gemm(*made[:4], d, None, 0, accumulates)
        assert bool((d == (7.0 if accumulates else 0.0)).all())


# ---- The reference ----


def lose_a_token(x: KGroupedInputs) -> None:
    x.a.view(torch.uint8)[1, :, 0] = 0


def lose_a_feature(x: KGroupedInputs) -> None:
    x.b.view(torch.uint8)[:, 3] = 0


def shift_a_scale(x: KGroupedInputs) -> None:
    x.b_scale_inv[1] = x.b_scale_inv[1].roll(1)


def lose_the_last_block(x: KGroupedInputs) -> None:
    x.a_scale_inv[-1] = 0


def spoil_a_code(x: KGroupedInputs) -> None:
    x.a.view(torch.uint8)[0, 0, 0] = 0x7F


@pytest.mark.parametrize(
    "change",
    [lose_a_token, lose_a_feature, shift_a_scale, lose_the_last_block, spoil_a_code],
)
def test_results_of_wrong_operands_are_refused(change):
    made = inputs("one expert", 40, 72, "bf16", exact=False)
    expected = expected_of(made)
    change(made)
    k_grouped_gemm(*made)
    with pytest.raises(AssertionError, match="rows are off"):
        assert_right(made, expected)


def test_zeros_are_refused():
    made = inputs("one expert", 40, 72, "bf16", exact=False)
    made.d.zero_()
    with pytest.raises(AssertionError, match="rows are off"):
        assert_right(made, expected_of(made))


# ---- As an op ----


def test_the_op_keeps_the_rules_of_torch():
    checks = "test_autograd_registration", "test_faketensor"  # its schema test multiplies FP8
    for name in ("one expert", "one has all"):
        for output in ("bf16", "fp32 +="):
            made = tuple(inputs(name, 5, 9, output))
            torch.library.opcheck(k_grouped_gemm.overload, made, test_utils=checks)


def test_a_trace_checks_as_a_call_does():
    made = inputs("one has all", 5, 9, "fp32")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if torch.is_tensor(x) else x for x in made]
        assert k_grouped_gemm(*fakes) is None
        fakes[4] = fakes[4].half()
        with pytest.raises(TypeError, match="d must be bfloat16 or float32, got float16"):
            k_grouped_gemm(*fakes)


def test_d_is_counted_as_written_and_has_no_gradient():
    made = inputs("one has all", 5, 9, "fp32")
    version = made.d._version
    k_grouped_gemm(*made)
    assert made.d._version > version
    with pytest.raises(ValueError, match="d must not require a gradient"):
        k_grouped_gemm(*made._replace(d=made.d.requires_grad_()))


# ---- Refusals ----


class Refusal(NamedTuple):
    """An argument is changed, and what an error says then."""

    argument: str
    change: Callable[[Any], Any]
    error: type[Exception]
    told: str


def half(x: torch.Tensor) -> torch.Tensor:
    return x.half()


def columns_first(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


REFUSALS = {
    "a of another dtype": Refusal(
        "a", lambda x: x.float(), TypeError, "a must be float8_e4m3fn, got float32"
    ),
    "b of another dtype": Refusal("b", half, TypeError, "b must be float8_e4m3fn, got float16"),
    "a of two dimensions": Refusal(
        "a", lambda x: x[0], ValueError, r"a must have 3 dimensions, got shape \[5, 128\]"
    ),
    "a of one dimension": Refusal(
        "a", lambda x: x[0, 0], ValueError, r"a must have 3 dimensions, got shape \[128\]"
    ),
    "b of four dimensions": Refusal(
        "b", lambda x: x[None], ValueError, r"b must have 3 dimensions, got shape \[1, 8, 9, 128\]"
    ),
    "blocks of 64": Refusal(
        "a", lambda x: x[..., :64], ValueError, r"a must be \[B, features, 128\].*\[8, 5, 64\]"
    ),
    "codes that lie apart": Refusal(
        "b", columns_first, ValueError, r"b must be .* 128 codes side by side, .*\[1152, 1, 9\]"
    ),
    "fewer blocks of b": Refusal(
        "b", lambda x: x[1:], ValueError, r"b must be \[B, N, 128\].* \[8, 9, 128\], got \[7, 9,"
    ),
    "scales of another dtype": Refusal(
        "a_scale_inv", half, TypeError, "a_scale_inv must be float32, got float16"
    ),
    "scales of one dimension": Refusal(
        "b_scale_inv", lambda x: x[0], ValueError, "b_scale_inv must have 2 dimensions, got shape"
    ),
    "scales of fewer features": Refusal(
        "a_scale_inv",
        lambda x: x[:, 1:],
        ValueError,
        r"a_scale_inv must be \[B, features\] = \[8, 5\], got \[8, 4\]",
    ),
    "scales of fewer blocks": Refusal(
        "b_scale_inv",
        lambda x: x[1:],
        ValueError,
        r"b_scale_inv must be \[B, features\] = \[8, 9\], got \[7, 9\]",
    ),
    "d of another dtype": Refusal(
        "d", half, TypeError, "d must be bfloat16 or float32, got float16"
    ),
    "d of a single expert": Refusal(
        "d", lambda x: x[0], ValueError, r"d must be \[E, M, N\] = \[3, 5, 9\], got \[5, 9\]"
    ),
    "d transposed": Refusal(
        "d", columns_first, ValueError, r"rows of d must be contiguous, got strides \[45, 1, 5\]"
    ),
    "offsets of another dtype": Refusal(
        "expert_offsets",
        lambda x: x.long(),
        TypeError,
        "expert_offsets must be int32, got int64",
    ),
    "offsets of two dimensions": Refusal(
        "expert_offsets",
        lambda x: x[None],
        ValueError,
        r"expert_offsets must have 1 dimensions, got shape \[1, 4\]",
    ),
    "no offsets for experts": Refusal(
        "expert_offsets",
        lambda x: None,
        ValueError,
        r"d must be \[M, N\] = \[5, 9\], got \[3, 5, 9\]",
    ),
    "offsets of fewer experts": Refusal(
        "expert_offsets",
        lambda x: x[1:],
        ValueError,
        r"d must be \[E, M, N\] = \[2, 5, 9\], got \[3, 5, 9\]",
    ),
    "sums in BF16": Refusal(
        "accumulates", lambda x: True, TypeError, "d must be float32, got bfloat16"
    ),
    "two devices": Refusal(
        "d", lambda x: x.to("meta"), ValueError, "one device, got a on cpu, .*d on meta"
    ),
}


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_named(request, name, launched):
    argument, change, error, told = REFUSALS[name]
    made = inputs("one has all", 5, 9, "bf16")
    if launched:
        request.getfixturevalue("gpu")
    with pytest.raises(error, match=f"k_grouped_gemm: .*{told}"):
        k_grouped_gemm(*made._replace(**{argument: change(getattr(made, argument))}))


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("num_tokens", [-200, -5, 0, 256, 385])
def test_without_offsets_the_blocks_are_those_of_the_tokens(request, num_tokens, launched):
    made = inputs("one expert", 5, 9, "bf16")  # three blocks
    if launched:
        request.getfixturevalue("gpu")
    with pytest.raises(ValueError, match=f"num_tokens.* = {num_tokens}, got 3|got {num_tokens}"):
        k_grouped_gemm(*made._replace(num_tokens=num_tokens))
    none = made._replace(**{name: getattr(made, name)[:0] for name in made._fields[:4]})
    if num_tokens < 0:
        with pytest.raises(ValueError, match=f"num_tokens must be at least 0, got {num_tokens}"):
            k_grouped_gemm(*none._replace(num_tokens=num_tokens))


@pytest.mark.parametrize(
    ("offsets", "told"),
    [
        ([0, 0, 1200, 1200], r"\[0, 0, 1200, 1200\]"),
        ([-1, 0, 700, 700], r"\[-1, 0, 700, 700\]"),
        ([0, 5, 4, 4], r"\[0, 5, 4, 4\]"),
    ],
)
def test_the_cpu_refuses_offsets_that_lead_out_of_the_blocks(offsets, told):
    made = inputs("one has all", 5, 9, "bf16")
    made.expert_offsets.copy_(torch.tensor(offsets))
    with pytest.raises(ValueError, match=f"expert_offsets must rise .*8 blocks of a, got {told}"):
        k_grouped_gemm(*made)
    assert bool(made.d.isnan().all())
