"""Tokens and gradients that come as codes: the bits are those of what was quantized."""

from itertools import chain

import pytest
import torch

from moefp8.functional import parts as parts_room
from moefp8.functional.expert_parts import CallTensors
from moefp8.functional.experts import ExpertsInputs, experts, experts_saving, routed_experts
from moefp8.functional.experts_backward import experts_backward
from moefp8.functional.experts_records import experts_kernels
from moefp8.kernels import E4M3
from moefp8.kernels.common.activation import SWIGLU
from moefp8.kernels.gemm.sizes import Sizes
from tests.functional.cases import tokens_of, weights_of
from tests.functional.experts.quantized_cases import (
    SHAPES,
    Codes,
    Floats,
    Placed,
    backward,
    case_of,
    forward,
)
from tests.functional.experts.records import forward_bytes
from tests.gpu import same_bits
from tests.records import TARGET
from tests.routing.cases import CODE_PLACES, SCALE_PLACES
from tests.sampling import pairs

E, H, I, K = 5, 144, 200, 2
NAN, INF = float("nan"), float("inf")
ops = torch.ops.moefp8


# ---- The bits ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["distinct", "out of range", "nowhere"])
def test_codes_give_the_bits_of_their_tokens(shape, kind):
    made = case_of(SHAPES[shape], kind)
    for masked in (False, True):
        y, expected = (forward(made, given, masked) for given in (Codes(), Floats()))
        assert (y.dtype, y.shape, y.is_contiguous()) == (torch.bfloat16, made.x.shape, True)
        assert same_bits(y, expected)
        addend = tokens_of(*made.x.shape)
        added = forward(made, Codes(), masked, addend)
        assert same_bits(added, forward(made, Floats(), masked, addend))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["distinct", "out of range", "nowhere"])
def test_codes_give_the_gradients_of_what_was_quantized(shape, kind):
    made = case_of(SHAPES[shape], kind)
    found, expected = (backward(made, given) for given in (Codes(), Floats()))
    assert [x.dtype for x in found] == [*[torch.bfloat16] * 3, torch.float32]
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_bad_scales_stay_with_their_token(bad):
    made = case_of((6, 2, E, H, I))
    codes, scales = ops.quantize_1x128(made.x, False)
    rest = made.ids, made.top_k_weights, *made.weights, SWIGLU, False, 0, None, None
    clean = experts(codes, *rest, scales)
    scales[2, 1] = bad
    y = experts(codes, *rest, scales)
    others = [0, 1, 3, 4, 5]
    assert not y[2].isfinite().any()
    assert torch.equal(y[others], clean[others])


# ---- As they are launched ----


KINDS = "distinct", "repeated", "out of range", "nowhere"


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "no token"])
@pytest.mark.parametrize("kind", KINDS)
def test_launches_take_codes(gpu, shape, kind):
    """They are as many as of tokens, and each is one that is listed for them."""
    made = case_of(SHAPES[shape], kind)
    (num_tokens, h), top_k, e = made.x.shape, made.ids.shape[1], made.num_experts
    for masked in (False, True):
        assert same_bits(forward(made, Codes(), masked), forward(made, Floats(), masked))
        ours, theirs = gpu.launched[-8:-4], gpu.launched[-4:]
        assert [x.kernel for x in ours[1:]] == [x.kernel for x in theirs[1:]]
        sizes = Sizes(num_tokens, top_k, e, h, made.weights.down_proj.shape[2], masked)
        listed = (
            experts_kernels(TARGET, sizes, CallTensors(E4M3, is_aligned=x)) for x in (True, False)
        )
        assert ours[0].kernel in chain(*listed)
    for ours, theirs in zip(backward(made, Codes()), backward(made, Floats()), strict=True):
        assert same_bits(ours, theirs)


def test_choices_of_codes_may_be_counted_before(gpu):
    made = case_of((1025, 8, 10, 16, 32))
    ours, theirs = (backward(made, given) for given in (Codes(), Floats()))
    assert all(map(same_bits, ours, theirs))
    counted = [x for x in gpu.launched if x.kernel.name.startswith("dispatch")]
    assert [x.kernel.name for x in counted[:2]] == ["dispatch_kernel<Codes, true, false, true>"] * 2


PLACES: dict[str, Placed] = {
    "transposed": lambda x: x.T.contiguous().T,
    "one number": lambda x: x[:1, :1].expand(x.shape),
}


WIDTHS = 144, 136, 129
LAYOUTS = pairs(WIDTHS, [*(CODE_PLACES | PLACES).values()], [*(SCALE_PLACES | PLACES).values()])


@pytest.mark.parametrize("h", WIDTHS)
def test_codes_and_scales_may_lie_anywhere(gpu, h):
    """One layout after the other: what was prepared for one serves no other."""
    made = case_of((6, 3, 4, h, 160))
    for place, scale_place in [places for width, *places in LAYOUTS if width == h]:
        found = [backward(made, Codes(place, scale_place)) for _ in range(2)]
        copied = (lambda x, f=f: f(x).contiguous() for f in (place, scale_place))
        expected = backward(made, Codes(*copied))
        for ours in found:
            assert all(map(same_bits, ours, expected))


@pytest.mark.parametrize(
    ("masked", "num_tokens", "scale_place"),
    pairs([False, True], [20, 97], ["own", "rows", "apart"]),
)
def test_many_codes_go_in_parts(gpu, monkeypatch, masked, num_tokens, scale_place):
    made = case_of((num_tokens, 2, 4, 144, 272), "repeated")
    codes, addend = Codes(scale_place=SCALE_PLACES[scale_place]), tokens_of(num_tokens, 144)
    size = forward_bytes(Sizes(num_tokens, 2, 4, 144, 272, masked))
    for parts in (2, 5):
        monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", size // parts)
        gpu.prepared().clear()
        gpu.launched.clear()
        y = forward(made, codes, masked, addend)
        assert len(gpu.launched) >= 4 * parts
        assert same_bits(y, forward(made, Floats(), masked, addend))
        assert all(map(same_bits, backward(made, codes), backward(made, Floats())))


@pytest.mark.parametrize(("num_tokens", "h", "i"), [(0, 144, 128), (5, 0, 128), (5, 128, 0)])
def test_without_work_no_codes_are_read(gpu, num_tokens, h, i):
    made = case_of((num_tokens, 2, 3, h, i))
    y, _, *gradients = backward(made, Codes())
    expected = forward(made, Floats()), *(torch.zeros_like(x) for x in gradients)
    assert all(map(same_bits, (y, *gradients), expected))
    assert gpu.launched == []


# ---- What is refused ----


def arguments() -> dict:
    """Of all three ops; each takes what it knows."""
    ids, x = torch.zeros(4, K, dtype=torch.int64), tokens_of(4, H)
    codes, scales = ops.quantize_1x128(x, False)
    weights = dict(zip(WEIGHTS, weights_of(E, H, I), strict=True))
    rest = {"top_k_index": ids, "top_k_weights": torch.ones(4, K), **weights}
    gate_up = torch.zeros(4 * K, 2, I).bfloat16()
    return {
        **rest,
        "hidden_states": codes,
        "hidden_states_scale_inv": scales,
        "grad": codes,
        "grad_scale_inv": scales,
        "gate_up": gate_up,
        "gate_up_scale_inv": None,
        **{f"activation_{name}": x for name, x in SWIGLU._asdict().items()},
        "masked": False,
        "keep_transposed": False,
    }


WEIGHTS = "gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"
OPS = {"hidden_states": (experts, experts_saving), "grad": (experts_backward,)}


def call(op, given: dict):
    defaults = {x.name: x.default_value for x in op.overload._schema.arguments}
    return op.overload(*(given.get(name, default) for name, default in defaults.items()))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(
    ("error", "part", "change", "message"),
    [
        (TypeError, "", torch.Tensor.bfloat16, "{} must be float8_e4m3fn where {}_scale_inv is"
         " given, got bfloat16; give None"),
        (TypeError, "", lambda x: x.view(torch.float8_e5m2), "{} must be float8_e4m3fn where"),
        (TypeError, "_scale_inv", lambda x: None, "{} must be bfloat16 or float16 or float32, or"
         " come with {}_scale_inv, got float8_e4m3fn"),
        (TypeError, "_scale_inv", torch.Tensor.half, "{}_scale_inv must be float32, got float16"),
        (ValueError, "_scale_inv", lambda x: x[0], "{}_scale_inv must have 2 dimensions"),
        (ValueError, "_scale_inv", lambda x: x[1:], r"{}_scale_inv must be \[T, ceil\(H/128\)\] "
         r"for {} \[T, H\] = \[4, 2\], got \[3, 2\]"),
        (ValueError, "_scale_inv", lambda x: x[:, :1], r"= \[4, 2\], got \[4, 1\]"),
        (ValueError, "_scale_inv", lambda x: x.to("meta"), "on one device, got .*_inv on meta"),
        (ValueError, "", lambda x: x[None], "{} must have 2 dimensions"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(request, launched, name, error, part, change, message):
    """Kernels that have been prepared for what is right are no excuse."""
    if launched and "on meta" in message:
        pytest.skip("the emulated GPU has the index of `meta`")
    if launched:
        request.getfixturevalue("gpu")
    for op in OPS[name]:
        given = arguments()
        call(op, given)
        given[name + part] = change(given[name + part])
        for _ in range(2):
            with pytest.raises(error, match=f"^experts.*: .*{message.format(name, name)}"):
                call(op, given)


@pytest.mark.parametrize("name", OPS)
def test_other_operations_take_no_codes(name):
    codes = arguments()[name]
    for op in (ops.quantize_gradient_1x128, lambda x: ops.quantize_1x128(x, False)):
        with pytest.raises(TypeError, match=r"must be bfloat16 or .*got float8_e4m3fn"):
            op(codes)


# ---- Gradients, and as an op ----


def test_codes_have_no_gradient_and_weights_of_choices_have():
    made = case_of((6, 2, E, H, I))
    codes, scales = ops.quantize_1x128(made.x, False)
    leaves = [made.top_k_weights.clone().requires_grad_() for _ in range(2)]
    rest = *made.weights, SWIGLU, False, 0, None, None
    for x, scale_inv, leaf in ((codes, scales, leaves[0]), (made.x, None, leaves[1])):
        given = ExpertsInputs(x, made.ids, leaf, *rest, scale_inv)
        routed_experts("a layer", given).backward(made.grad)
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    given = ExpertsInputs(codes, made.ids, leaf, *rest, scales.requires_grad_())
    with pytest.raises(NotImplementedError, match=r"^a layer: codes of hidden states .* detach"):
        routed_experts("a layer", given)


@pytest.mark.parametrize("op", [experts, experts_saving, experts_backward])
def test_ops_agree_with_their_fake_bodies(op):
    given, told = arguments(), op.overload._schema.arguments
    values = tuple(given.get(x.name, x.default_value) for x in told)
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # "test_schema" knows no FP8
    torch.library.opcheck(op.overload, values, test_utils=checks)
