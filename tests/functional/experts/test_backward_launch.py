"""The launcher of the gradients of experts without a GPU: `Emulator` stands for libcuda."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from moefp8 import GroupedExperts, kernels
from moefp8.functional import parts as parts_room
from moefp8.kernels.common.activation import SWIGLU, Activation
from moefp8.kernels.gemm.sizes import Sizes
from moefp8.quant import quantize_1x128
from tests.fakes.emulator import emulated
from tests.functional.cases import (
    DOWN_FAMILIES,
    GATE_UP_FAMILIES,
    every_other,
    inputs,
    run,
    tokens_of,
    weights_of,
)
from tests.functional.experts.backward_cases import (
    Case,
    Gradients,
    assert_saved,
    assert_weights_close,
    backward,
    backward_body,
    backward_of_codes,
    case,
    contiguous_when_saved,
    rows_of_body,
    saving,
)
from tests.functional.experts.records import backward_bytes, forward_bytes
from tests.layers.cases import assert_matches_up_to_codes
from tests.routing.cases import ids_of

SHAPES = {  # T, k, E, H, I
    "one token": (1, 2, 4, 128, 128),
    "few": (5, 2, 6, 256, 144),
    "some for each": (40, 3, 2, 160, 272),
    "many": (70, 4, 3, 272, 16),
    "more choices than experts": (6, 9, 4, 128, 384),
    "multiples of 4": (6, 2, 3, 100, 36),
    "odd": (4, 3, 2, 129, 257),
    "tiny": (3, 1, 2, 3, 5),
}
KINDS = {"distinct": False, "repeated": True, "out of range": True, "one expert": False}  # is FP8
DTYPES = torch.bfloat16, torch.float16, torch.float32
KERNELS = ["transpose", "transpose", "dispatch", "gemm", "activation", "gemm", "combine"]


def names_of(launched) -> list[str]:
    return [made.kernel.name.split("_")[0] for made in launched]


def assert_right(made: Case, fp8: bool = False) -> Gradients:
    """Check forward and backward against their bodies, and return what was launched."""
    y, gate_up = saving(made)
    assert torch.equal(y, run(*made[:3], made.weights, made.activation, rank=made.rank))
    rows = rows_of_body(made, gate_up)
    assert_saved(made, rows)
    found, right = backward(made, gate_up, fp8), backward_body(made, rows, fp8)
    assert_matches_up_to_codes(found.hidden_states, right.hidden_states)
    assert_weights_close(made, rows, found, right)
    return found


# ---- What is computed ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_launches_compute_what_the_body_does(gpu, shape, kind):
    num_tokens, top_k, e, h, i = SHAPES[shape]
    made = case(num_tokens, h, top_k, weights_of(e, h, i), kind)
    found = assert_right(made, KINDS[kind])
    assert bool(found.hidden_states.any()) == bool((made.here < e).any())
    assert names_of(gpu.launched)[-7:] == KERNELS


def test_choices_may_be_counted_before(gpu):
    made, gate_up = case(1025, 16, 8, weights_of(10, 16, 32)), torch.randn(8200, 2, 32).bfloat16()
    found, right = backward(made, gate_up), backward_body(made, rows_of_body(made, gate_up))
    assert_matches_up_to_codes(found.hidden_states, right.hidden_states)
    assert names_of(gpu.launched) == [*KERNELS[:2], "count", *KERNELS[2:]]


@pytest.mark.parametrize("kind", ["distinct", "repeated", "out of range"])
@pytest.mark.parametrize("rank", [(0, 5), (3, 12), (9, 13)])  # experts behind, around and before
def test_a_rank_computes_what_its_experts_do(gpu, kind, rank):
    assert_right(case(30, 144, 3, weights_of(4, 144, 200), kind, rank=rank), KINDS[kind])
    dispatch = gpu.launched[-5]
    assert dispatch.arguments.routing.first_expert == rank[0]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("limit", [0.0, 0.25, 4.0])
def test_where_the_limit_holds_there_is_no_gradient(gpu, limit, fp8):
    activation = Activation(limit=limit)
    made = case(9, 144, 2, weights_of(3, 144, 272), activation=activation)
    found = assert_right(made, fp8)
    assert gpu.launched[-3].arguments.activation.limit == limit
    free = backward(made._replace(activation=SWIGLU), saving(made)[1], fp8)
    assert not torch.equal(found.hidden_states, free.hidden_states)
    if limit == 0 and not fp8:  # of FP8, zeros are at the limit, which does not hold them
        assert not found.hidden_states.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("weights_dtype", "id_dtype"),
    [(torch.bfloat16, torch.int32), (torch.float16, torch.int64), (torch.float32, torch.int32)],
)
def test_any_dtype_and_strides(gpu, dtype, weights_dtype, id_dtype):
    made = case(6, 144, 3, every_other(weights_of(10, 144, 160)))
    wide = torch.rand(6, 6).to(weights_dtype)
    assert_right(
        made._replace(
            ids=made.ids.to(id_dtype).T.contiguous().T,
            top_k_weights=wide[:, ::2],
            grad=(made.grad * 2.0**20).to(dtype),  # FP16 holds nothing small
        )
    )
    assert gpu.launched[-1].arguments.weight_choice_bytes == 4  # those of combine are its own


def test_a_gradient_may_lie_anywhere(gpu):
    """Also as that of a sum does, whose rows are one, or all elements are."""
    made = case(6, 144, 2, weights_of(3, 144, 160))
    _, gate_up = saving(made)
    grad = made.grad
    unaligned = torch.empty(6 * 144 + 1).bfloat16()[1:].view_as(grad).copy_(grad)
    in_wide_rows = torch.empty(12, 152).bfloat16()[::2, :144].copy_(grad)
    for place in (grad.T.contiguous().T, unaligned, in_wide_rows):
        found = backward(made._replace(grad=place), gate_up)
        assert all(map(torch.equal, found, backward(made, gate_up)))
    for expanded in (grad[:1].expand(6, -1), grad[:1, :1].expand(6, 144)):
        found = backward(made._replace(grad=expanded), gate_up)
        expected = backward(made._replace(grad=expanded.contiguous()), gate_up)
        assert all(map(torch.equal, found, expected))


def test_small_gradients_are_no_zeros(gpu):
    """The floor of the amax of activations would make them zeros."""
    made = case(6, 144, 2, weights_of(3, 144, 160))
    _, gate_up = saving(made)
    found = backward(made, gate_up)
    smaller = backward(made._replace(grad=made.grad * 2.0**-20), gate_up)
    for x, y in zip(found, smaller, strict=True):
        assert torch.equal(x * 2.0**-20, y)
    least = {made.arguments.min_amax for made in (gpu.launched[-5], gpu.launched[-3])}
    assert least == {kernels.common.blocks.MIN_GRADIENT_AMAX}


@pytest.mark.parametrize("family", GATE_UP_FAMILIES)
def test_every_family_saves_gate_and_up(family):
    with emulated(gate_up=GATE_UP_FAMILIES[family]) as gpu:
        for num_tokens, i in ((3, 272), (110, 100)):
            made = case(num_tokens, 144, 2, weights_of(3, 144, i), "repeated")
            y, gate_up = saving(made)
            assert gpu.gemms[-2].config == replace(GATE_UP_FAMILIES[family], saves_gate_up=True)
            assert_saved(made, rows_of_body(made, gate_up))
            assert torch.equal(y, run(*made[:3], made.weights))


@pytest.mark.parametrize(
    ("num_experts", "num_tokens", "tile"),
    [(2, 700, (192, 128)), (1, 700, (128, 256)), (2, 200, (128, 128))],
)
def test_saving_gate_and_up_of_many_tokens_takes_tall_tiles(gpu, num_experts, num_tokens, tile):
    """The bits stay those of a forward that saves nothing."""
    made = case(num_tokens, 144, num_experts, weights_of(num_experts, 144, 160), "distinct")
    y, gate_up = saving(made)
    config = gpu.gemms[-2].config
    assert (config.cta_tile, config.saves_gate_up) == (tile, True)
    assert_saved(made, rows_of_body(made, gate_up))
    assert torch.equal(y, run(*made[:3], made.weights))
    if num_tokens == 700:
        assert gpu.gemms[-2].config.cta_tile == (128, 256)


@pytest.mark.parametrize("family", DOWN_FAMILIES)
def test_every_family_multiplies_gradients(family):
    with emulated(DOWN_FAMILIES[family]) as gpu:
        for num_tokens, i in ((3, 272), (110, 100)):
            assert_right(case(num_tokens, 144, 2, weights_of(3, 144, i), "repeated"))
            assert [made.config for made in gpu.gemms[-2:]] == [DOWN_FAMILIES[family]] * 2


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_layer_differentiates(gpu, layout, saved_dtype):
    """What is saved is contiguous, whatever the layout of the layer is."""
    layer = GroupedExperts(3, 144, 272, layout=layout, saved_dtype=saved_dtype)
    made = case(9, 144, 2, weights_of(3, 144, 272))
    weights = made.weights._replace(**{x: getattr(layer, x) for x in made.weights._fields})
    leaves = [made.x.requires_grad_(), made.top_k_weights.requires_grad_(), tokens_of(9, 144)]
    leaves[2].requires_grad_()
    y = layer(leaves[0], made.ids, leaves[1], addend=leaves[2])
    assert gpu.gemms[0].config.saves_gate_up
    found = torch.autograd.grad(y, leaves, made.grad)
    made = made._replace(x=made.x.detach(), weights=weights)
    expected = backward(made, saving(made)[1], saved_dtype != torch.bfloat16)
    assert all(map(torch.equal, found, (*expected, made.grad)))
    with torch.no_grad():
        assert torch.equal(layer(leaves[0], made.ids, leaves[1], addend=leaves[2]), y)


@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_saved_may_have_been_offloaded(gpu, saved_dtype):
    """Hooks that do so may drop the gaps between rows, and the order of scales."""
    layer = GroupedExperts(3, 144, 260, saved_dtype=saved_dtype)
    (x, ids, top_k_weights), grad = inputs(9, 144), tokens_of(9, 144)
    leaves, found = (x.requires_grad_(), top_k_weights.requires_grad_()), []
    for hook in (nullcontext(), contiguous_when_saved()):
        with hook:
            y = layer(leaves[0], ids, leaves[1])
        found.append(torch.autograd.grad(y, leaves, grad))
    assert all(map(torch.equal, *found))


def test_codes_that_were_saved_may_have_any_address(gpu):
    """A kernel loads eight of them at once."""
    made = case(6, 144, 2, weights_of(3, 144, 160))
    codes, scales = quantize_1x128(saving(made)[1].flatten(0, 1))
    expected = backward_of_codes(made, codes, scales)
    unaligned = torch.empty(codes.numel() + 1, dtype=codes.dtype)[1:].view_as(codes).copy_(codes)
    found = backward_of_codes(made, unaligned, scales)
    assert all(map(torch.equal, found, expected))
    assert gpu.launched[-3].arguments.saved % 8 == 0


# ---- What is launched how ----


def test_all_are_launched_before_the_one_before_ends(gpu):
    made = case(9, 144, 2, weights_of(3, 144, 272))
    _, gate_up = saving(made)
    gpu.launched.clear()
    backward(made, gate_up)
    assert [x.programmatic for x in gpu.launched] == [False] * 2 + [True] * 5
    assert {x.stream for x in gpu.launched} == {7}
    first, second = gpu.gemms
    assert [x.arguments.groups.bounds_ready for x in (first, second)] == [False, True]
    assert first.arguments.groups.bounds == second.arguments.groups.bounds


def test_other_layers_of_one_layout_prepare_nothing(gpu):
    """The third call and later ones are a graph, which gets the addresses of each call."""
    for layer in range(5):
        made = case(9, 144, 2, weights_of(3, 144, 272))
        rows = saving(made)[1]
        found, right = backward(made, rows), backward_body(made, rows)
        assert_matches_up_to_codes(found.hidden_states, right.hidden_states)
        assert_weights_close(made, rows, found, right)
        if layer == 0:
            prepared, loaded = len(gpu.prepared()), len(gpu.kernels)
    assert (len(gpu.prepared()), len(gpu.kernels)) == (prepared, loaded)
    assert names_of(gpu.launched)[-7:] == KERNELS


def test_whatever_decides_a_launch_is_prepared_for_once(gpu):
    made = case(9, 144, 2, weights_of(3, 144, 272))
    _, gate_up = saving(made)
    grad, unaligned = made.grad, torch.empty(9 * 144 + 1).bfloat16()[1:].view(9, 144)
    scales = made.weights.down_proj_scale_inv.mT.contiguous().mT
    variants = [
        (made, False),
        (made, True),
        (Case(*(x[:8] for x in made[:4]), made.weights), False),
        (made._replace(grad=grad.float()), False),
        (made._replace(grad=unaligned.copy_(grad)), False),
        (made._replace(grad=torch.empty(9, 152).bfloat16()[:, :144].copy_(grad)), False),
        (made._replace(ids=made.ids.int()), False),
        (made._replace(top_k_weights=made.top_k_weights.T.contiguous().T), False),
        (made._replace(top_k_weights=made.top_k_weights.half()), False),
        (made._replace(activation=Activation(limit=1e30)), False),
        (made._replace(weights=made.weights._replace(down_proj_scale_inv=scales)), False),
        (made._replace(rank=(1, 10)), False),
        (made._replace(rank=(1, 90)), False),
    ]
    for i in range(3):
        for variant, fp8 in variants:
            rows = len(variant.x) * 2
            backward(variant, gate_up[:rows], fp8)
        kept = [key for key in gpu.prepared() if key[0] == "experts_backward"]
        assert len(kept) == len(variants), i
    for limit in (3, None):
        kernels.set_num_sms(limit)
        backward(made, gate_up)
    kept = [key for key in gpu.prepared() if key[0] == "experts_backward"]
    assert len(kept) == len(variants) + 1


def test_what_is_launched_serves_all_routings(gpu):
    """A CUDA graph may do so too: what the device is told depends on no id."""
    made, told = case(9, 144, 2, weights_of(3, 144, 272)), set()
    gate_up = torch.randn(18, 2, 272).bfloat16()
    for kind in ("distinct", "repeated", "out of range", "one expert"):
        made.ids.copy_(ids_of(kind, 9, 2, 3))
        gpu.prepared().clear()
        found = backward(made, gate_up)
        rows = rows_of_body(made, gate_up)
        if kind == "distinct":
            right = backward_body(made, rows)
            assert_matches_up_to_codes(found.hidden_states, right.hidden_states)
        told.add(tuple(x.grid for x in gpu.launched[-7:]))
    assert len(told) == 1


def test_num_sms_limits_the_grids_of_the_gemms(gpu):
    """The emulator checks that each counter of tiles begins at zero."""
    made = case(160, 272, 2, weights_of(4, 272, 384))
    for limit in (None, 4, 1):
        kernels.set_num_sms(limit)
        assert_right(made)
        first, second = gpu.gemms[-2:]
        assert limit is None or max(first.grid, second.grid) <= limit
        counters = [x.arguments.groups.tile_counter for x in (first, second)]
        if limit == 4:
            assert None not in counters
            assert counters[0] != counters[1]


# ---- Without work ----


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "h", "i"), [(0, 128, 128), (5, 0, 128), (5, 128, 0), (0, 0, 0)]
)
def test_without_work_nothing_is_launched(gpu, num_tokens, h, i, fp8):
    made = case(num_tokens, h, 2, weights_of(3, h, i))
    gate_up = torch.ones(num_tokens * 2, 2, i).bfloat16()
    found = backward(made, gate_up, fp8)
    assert all(map(torch.equal, found, backward_body(made, gate_up, fp8)))
    assert torch.equal(found.hidden_states, torch.zeros(num_tokens, h).bfloat16())
    assert torch.equal(found.top_k_weights, torch.zeros(num_tokens, 2))
    assert "gemm" not in names_of(gpu.launched)


def test_tokens_whose_experts_are_elsewhere_have_zeros(gpu):
    """Also where a weight is NaN, or what was saved is not defined."""
    made = case(9, 144, 2, weights_of(3, 144, 272), "nowhere")
    made.top_k_weights.fill_(torch.nan)
    found = backward(made, torch.full((18, 2, 272), torch.nan).bfloat16())
    assert not found.hidden_states.any()
    assert not found.top_k_weights.any()


# ---- Parts ----


@pytest.mark.parametrize(("num_tokens", "fp8"), [(1, False), (2, True), (37, False), (37, True)])
def test_many_tokens_go_in_the_parts_of_the_forward(gpu, monkeypatch, num_tokens, fp8):
    made = case(num_tokens, 144, 2, weights_of(4, 144, 272), "repeated")
    whole = backward(made, saving(made)[1], fp8)
    size = max(len(memory) for memory in gpu.workspaces)
    one = Sizes(1, 2, 4, 144, 272, False)
    least = max(forward_bytes(one), backward_bytes(one))
    for limit in {max(least, size // parts) for parts in (1, 3, 11)}:
        monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", limit)
        for kept in (gpu.prepared(), gpu.launched, gpu.workspaces):
            kept.clear()
        found = backward(made, saving(made)[1], fp8)
        assert_matches_up_to_codes(found.hidden_states, whole.hidden_states)
        assert torch.allclose(found.top_k_weights, whole.top_k_weights, rtol=1e-4)
        bound = max(limit, least + limit // 2)
        assert max(len(memory) for memory in gpu.workspaces) <= bound
        names = names_of(gpu.launched)
        assert names.count("activation") >= min(num_tokens, -(-size // bound))
        assert names.count("dispatch") == 2 * names.count("activation")
        assert names.count("transpose") == 2
