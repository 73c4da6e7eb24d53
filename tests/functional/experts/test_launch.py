"""The launcher of the routed experts without a GPU: `Emulator` stands for libcuda."""

import pytest
import torch

from moefp8 import kernels
from moefp8.functional import parts as parts_room
from moefp8.kernels.common.activation import SWIGLU, Activation
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.sizes import Sizes, mean_load
from moefp8.kernels.gemm.sm90.expert_configs import choose_experts_configs, experts_configs
from moefp8.kernels.gemm.sm90.tuned import ConfigSource
from tests.fakes.emulator import emulated
from tests.functional.cases import (
    DOWN_FAMILIES,
    EXPERTS_FAMILIES,
    GATE_UP_FAMILIES,
    LOADS_AT_EDGES,
    assert_right,
    body,
    every_other,
    ids_of_loads,
    inputs,
    run,
    tokens_of,
    weights_of,
)
from tests.functional.experts.records import forward_bytes
from tests.gpu import NUM_SMS
from tests.layers.cases import assert_matches_up_to_codes
from tests.routing.cases import ids_of

DTYPES = torch.bfloat16, torch.float16, torch.float32
SHAPES = {  # T, k, E, H, I
    "one token": (1, 2, 4, 128, 128),
    "few": (5, 2, 6, 256, 144),
    "some for each": (70, 3, 2, 160, 272),
    "many": (150, 4, 3, 272, 16),
    "many experts": (9, 8, 40, 144, 128),
    "more choices than experts": (6, 9, 4, 128, 384),
    "counted": (1025, 8, 10, 16, 32),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["distinct", "repeated", "out of range", "one expert"])
def test_launches_compute_what_the_body_does(gpu, shape, masked, kind):
    num_tokens, top_k, e, h, i = SHAPES[shape]
    assert_right(*inputs(num_tokens, h, top_k, e, kind), weights_of(e, h, i), SWIGLU, masked)
    names = ["count"] * (shape == "counted") + ["dispatch", "gemm", "gemm", "combine"]
    assert [made.kernel.name.split("_")[0] for made in gpu.launched] == names


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["distinct", "repeated", "out of range"])
@pytest.mark.parametrize("rank", [(0, 1), (3, 8), (9, 9)])  # experts before, and in all others
def test_a_rank_computes_what_its_experts_do(gpu, shape, masked, kind, rank):
    """It takes the ids of the whole model as they are."""
    (num_tokens, top_k, e, h, i), (first, others) = SHAPES[shape], rank
    rank = first, e + others
    arguments = inputs(num_tokens, h, top_k, e + others, kind)
    assert_right(*arguments, weights_of(e, h, i), SWIGLU, masked, rank)
    dispatch = next(made for made in gpu.launched if made.kernel.name.startswith("dispatch"))
    assert dispatch.arguments.routing.first_expert == first
    assert len(gpu.launched) == (5 if shape == "counted" else 4)


def test_parts_and_copies_are_of_the_same_rank(gpu, monkeypatch):
    (x, *choices), weights = inputs(50, 144, 2, 20, "repeated"), weights_of(4, 144, 272)
    expected = run(x, *choices, weights, rank=(5, 20))
    assert expected.any()
    copied = run(x.T.contiguous().T, *choices, weights, rank=(5, 20))
    assert_matches_up_to_codes(copied, expected)
    monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", len(gpu.workspaces[0]) // 3)
    gpu.prepared().clear()
    gpu.launched.clear()
    assert_matches_up_to_codes(run(x, *choices, weights, rank=(5, 20)), expected)
    assert len(gpu.launched) >= 3 * 4


def addends(num_tokens: int, h: int) -> dict[str, torch.Tensor]:
    """The same values where they may lie."""
    addend = tokens_of(num_tokens, h)
    return {
        "aligned": addend,
        "unaligned": torch.empty(num_tokens * h + 1).bfloat16()[1:].view_as(addend).copy_(addend),
        "in wide rows": torch.empty(num_tokens, h + 8).bfloat16()[:, :h].copy_(addend),
        "transposed": addend.T.contiguous().T,
    }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_tokens", "h"), [(9, 144), (1, 136), (30, 100), (7, 3)])
def test_combine_adds_an_addend(gpu, masked, num_tokens, h):
    arguments = *inputs(num_tokens, h), weights_of(3, h, 128), SWIGLU, masked
    y, places = run(*arguments), addends(num_tokens, h)
    for place, addend in places.items():
        for _ in range(2):
            gpu.launched.clear()
            added = run(*arguments, (0, None), addend)
            assert torch.equal(added, y + places["aligned"]), place
            assert len(gpu.launched) == 4
            in_words = h % 8 == 0 and place != "unaligned"  # others are aligned, or copied
            assert gpu.launched[-1].kernel.name.endswith(f"{str(in_words).lower()}>")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("activation", [SWIGLU, Activation("geglu_tanh", 0.25)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights_dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_any_dtype_and_strides(gpu, masked, activation, dtype, weights_dtype, id_dtype):
    x = tokens_of(12, 200)[:, :144].to(dtype)[::2]
    ids = ids_of("distinct", 6, 3, 5).to(id_dtype).T.contiguous().T
    top_k_weights = torch.rand(6, 6).to(weights_dtype)[:, ::2]
    arguments = x, ids, top_k_weights, weights_of(5, 144, 160), activation, masked
    assert_right(*arguments)
    x = x.mT.contiguous().mT  # the elements of a token do not lie side by side: a copy is taken
    assert_right(x, *arguments[1:])
    if activation.limit:
        clamped, free = body(*arguments), body(*arguments[:4], SWIGLU, masked)
        assert not torch.equal(clamped, free)
    limit = gpu.launched[1].arguments.gate_up.activation.limit
    assert limit == (activation.limit or float("inf"))


@pytest.mark.parametrize(
    ("limit", "takes"),
    # 4 experts: 3 pairs of tiles with 64 outputs each, of gate and up; 5 tiles of down.
    [(None, (False, False)), (24, (False, False)), (23, (True, False)), (19, (True, True))],
)
def test_more_tiles_than_clusters_are_taken_from_a_counter(gpu, limit, takes):
    """The emulator checks that each counter begins at zero, also when memory is used again."""
    kernels.set_num_sms(limit)
    arguments, weights = inputs(160, 528, 2, 4), weights_of(4, 528, 384)
    for _ in range(2):
        run(*arguments, weights)
    first, second = (made.arguments.groups.tile_counter for made in gpu.launched[-3:-1])
    assert (first is not None, second is not None) == takes
    assert first is None or first != second
    run(*(x[:2] for x in arguments), weights)  # one for each expert
    assert [made.arguments.groups.tile_counter for made in gpu.launched[-3:-1]] == [None, None]


@pytest.mark.parametrize(("h", "takes"), [(7152, False), (7168, True)])
def test_equal_tiles_are_taken_from_a_counter_if_they_are_long(gpu, h, takes):
    """Four experts have one token each, about; tiles of gate and up are long, those of down not."""
    kernels.set_num_sms(2)
    run(*inputs(2, h, 2, 4), weights_of(4, h, 400))
    first, second = (made.arguments.groups.tile_counter for made in gpu.launched[1:3])
    assert (first is not None, second is not None) == (takes, False)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "guess"),
    # A choice for every eighth expert makes a guess; a mean of 200 tokens has two tiles of 128.
    [(1, 2, 17, 0), (1, 2, 16, 1), (9, 2, 16, 1), (200, 2, 2, 2)],
)
def test_first_tiles_are_guessed_from_the_mean_load(gpu, num_tokens, top_k, num_experts, guess):
    run(*inputs(num_tokens, 144, top_k, num_experts), weights_of(num_experts, 144, 128))
    gate_up, down = (made.arguments.groups for made in gpu.launched[-3:-1])
    assert (gate_up.expected_tiles, down.expected_tiles) == (guess, 0)


@pytest.mark.parametrize("family", EXPERTS_FAMILIES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("limit", [None, 2])
def test_every_family_is_launched_rightly(family, masked, limit):
    gate_up, down = EXPERTS_FAMILIES[family]
    with emulated(down, gate_up) as gpu:
        kernels.set_num_sms(limit)
        for num_tokens, h, i in ((3, 144, 272), (200, 272, 400)):
            assert_right(*inputs(num_tokens, h), weights_of(3, h, i), SWIGLU, masked)
            configs = [made.config for made in gpu.launched[-3:-1]]
            assert configs[0 if gate_up else 1] == (gate_up or down)


@pytest.mark.parametrize("family", ["a tail", "three math groups", "two buffers, two math groups"])
@pytest.mark.parametrize("masked", [False, True])
def test_tiles_end_where_groups_do(family, masked):
    """The emulator sees to it that each token of a group meets each weight."""
    ids, weights = ids_of_loads(LOADS_AT_EDGES), weights_of(len(LOADS_AT_EDGES), 16, 16)
    with emulated(DOWN_FAMILIES[family], GATE_UP_FAMILIES[family]):
        assert_right(tokens_of(len(ids), 16), ids, torch.rand(len(ids), 1), weights, SWIGLU, masked)


def test_strided_weights_are_taken_where_they_lie(gpu):
    weights = every_other(weights_of(6, 144, 272))
    assert_right(*inputs(9, 144), weights)
    _, first, second, _ = gpu.launched
    assert first.b_maps[0].address == weights.gate_up_proj.data_ptr()
    assert first.b_maps[1].address == weights.gate_up_proj[:, 272:].data_ptr()
    assert second.b_maps[0].address == weights.down_proj.data_ptr()
    assert first.arguments.weight_scales == weights.gate_up_proj_scale_inv.data_ptr()
    scales = weights.gate_up_proj_scale_inv[:, 3:]
    assert first.arguments.gate_up.up_scales == scales.data_ptr()


# ---- What is launched how ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_kernels"), [(9, 4), (4097, 5)])
def test_all_are_launched_before_the_one_before_ends(gpu, masked, num_tokens, num_kernels):
    run(*inputs(num_tokens, 144), weights_of(3, 144, 272), SWIGLU, masked)
    assert [made.programmatic for made in gpu.launched] == [True] * num_kernels
    assert {made.stream for made in gpu.launched} == {7}
    *_, first, second, _ = gpu.launched
    # The first GEMM reads bounds that the kernel right before it writes; the second older ones.
    assert [made.arguments.groups.bounds_ready for made in (first, second)] == [False, True]
    layout = GroupLayout.MASKED if masked else GroupLayout.OFFSETS
    assert all(f"GroupLayout::{layout.value}" in made.kernel.name for made in (first, second))
    assert first.arguments.groups.bounds == second.arguments.groups.bounds


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_launched_serves_all_routings(gpu, masked):
    """A CUDA graph may do so too: what the device is told depends on no id."""
    weights, (x, ids, top_k_weights) = weights_of(3, 144, 272), inputs(9, 144)
    told = set()
    for kind in ("distinct", "repeated", "out of range", "one expert"):
        ids.copy_(ids_of(kind, 9, 2, 3))
        gpu.prepared().clear()
        assert_right(x, ids, top_k_weights, weights, SWIGLU, masked)
        made = gpu.launched[-4:]
        told.add((*[bytes(x.arguments) for x in made[:3]], *[x.grid for x in made]))
    assert len(told) == 1


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "active", "load"),
    [
        (1, 8, 256, 8, 1),
        (64, 8, 256, 256, 2),
        (65, 8, 256, 256, 3),
        (4096, 8, 256, 256, 128),
        (1, 1, 1, 1, 1),
        (1, 9, 2, 2, 5),
    ],
)
def test_configurations_go_by_the_load_of_experts_that_have_tokens(
    num_tokens, top_k, num_experts, active, load
):
    layer = Sizes(num_tokens, top_k, num_experts, 256, 128, False)
    assert mean_load(layer) == (active, load)
    expected = choose_experts_configs(load, active, 256, 128, NUM_SMS)
    assert experts_configs(ConfigSource(NUM_SMS, NUM_SMS), layer) == expected


@pytest.mark.parametrize(
    ("num_tokens", "active", "load"),
    [(1, 8, 1), (4, 32, 1), (32, 32, 1), (33, 32, 2), (128, 32, 4), (4096, 32, 128)],
)
def test_a_rank_has_the_load_of_the_whole_model(num_tokens, active, load):
    """One of 8 ranks of DeepSeek-V3: of 128 tokens, 4 come to an expert, not 32."""
    rank = Sizes(num_tokens, 8, 32, 7168, 2048, False, num_global_experts=256)
    assert mean_load(rank) == (active, load)
    whole = rank._replace(num_experts=256, num_global_experts=None)
    assert mean_load(whole)[1] == load
    expected = choose_experts_configs(load, active, 7168, 2048, NUM_SMS)
    assert experts_configs(ConfigSource(NUM_SMS, NUM_SMS), rank) == expected


def test_what_comes_to_the_only_expert_of_a_rank_is_a_mean():
    """So its tiles hold more, as those of any rank do."""
    source, rank = ConfigSource(NUM_SMS, NUM_SMS), Sizes(960, 1, 1, 2048, 768, False, 8)
    alone = Sizes(120, 1, 1, 2048, 768, False)
    assert mean_load(rank) == mean_load(alone) == (1, 120)
    tails = [[config.tail for config in experts_configs(source, x)] for x in (rank, alone)]
    assert tails == [[24, 24], [0, 0]]


@pytest.mark.parametrize(
    ("groups", "h", "i", "most"),
    [(256, 7168, 2048, 136), (128, 2048, 768, 152), (8, 4096, 14336, 152), (1, 2048, 768, 152)],
)
def test_groups_have_tails_while_most_need_no_second_tile(groups, h, i, most):
    """Larger loads have tiles of 192; an expert that all tokens take has other ones."""

    def tails_and_rows(tokens) -> set[tuple[int, int]]:
        both = choose_experts_configs(tokens, groups, h, i, NUM_SMS, exact=groups == 1)
        return {(config.tail, config.wgmma_m) for config in both}

    assert tails_and_rows(129) == tails_and_rows(most) == {(24, 128)}
    assert tails_and_rows(most + 1) == {(0, 192 if groups > 1 else 128)}


def test_num_sms_limits_the_grids_of_the_gemms(gpu):
    arguments = *inputs(300, 144), weights_of(3, 144, 272)
    for limit in (None, 4, 1):
        kernels.set_num_sms(limit)
        assert_right(*arguments)
    grids = [[made.grid for made in gpu.launched[i : i + 2]] for i in (1, 5, 9)]
    assert max(grids[0]) > 4 >= max(grids[1])
    assert grids[2] == [1, 1]


# ---- Without work ----


@pytest.mark.parametrize(
    ("num_tokens", "h", "i"), [(0, 128, 128), (5, 0, 128), (5, 128, 0), (0, 0, 0)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_without_work_nothing_is_launched(gpu, num_tokens, h, i, masked):
    arguments = *inputs(num_tokens, h), weights_of(3, h, i), SWIGLU, masked
    zeros, addend = torch.zeros(num_tokens, h).bfloat16(), tokens_of(num_tokens, h)
    for call in (run, body):
        assert torch.equal(call(*arguments), zeros)
        assert torch.equal(call(*arguments, addend=addend), addend)
    assert gpu.launched == []


# ---- Parts ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 50, 97])
def test_many_tokens_go_in_parts(gpu, monkeypatch, masked, num_tokens):
    arguments = *inputs(num_tokens, 144, 2, 4), weights_of(4, 144, 272), SWIGLU, masked
    whole, addend = run(*arguments), tokens_of(num_tokens, 144)
    assert len(gpu.launched) == 4
    size = forward_bytes(Sizes(num_tokens, 2, 4, 144, 272, masked))
    assert {len(memory) for memory in gpu.workspaces} == {size}
    least = forward_bytes(Sizes(1, 2, 4, 144, 272, masked))
    for limit in (size, max(least, size // 3), max(least, size // 20)):
        monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", limit)
        for made in (gpu.prepared(), gpu.launched, gpu.workspaces):
            made.clear()
        assert_matches_up_to_codes(run(*arguments), whole)
        parts = len(gpu.launched) // 4
        bound = max(limit, least + limit // 2)
        assert max(len(memory) for memory in gpu.workspaces) <= bound
        assert parts == 1 if bound >= size else parts >= min(num_tokens, -(-size // bound))
        added = run(*arguments, addend=addend.T.contiguous().T)
        assert torch.equal(added, run(*arguments) + addend)


def test_sizes_of_common_workspaces():
    """DeepSeek-V3's layer: 16.5 KB for each row, of which those of the results are 14."""
    of_prefill = Sizes(4096, 8, 256, 7168, 2048, False)
    assert 16_400 < forward_bytes(of_prefill) / (4096 * 8) < 16_500
    of_decode = Sizes(64, 8, 256, 7168, 2048, True)
    assert 16_400 < forward_bytes(of_decode) / (64 * 256) < 16_500
