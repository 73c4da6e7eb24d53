"""The routed experts on a GPU: against the portable body, and bit for bit against themselves."""

import copy

import pytest
import torch

import moefp8
from moefp8 import GroupedExperts
from moefp8.functional import parts as parts_room
from moefp8.kernels import set_num_sms
from moefp8.kernels.common.activation import KINDS, SWIGLU, Activation
from moefp8.kernels.gemm.sizes import Sizes
from moefp8.kernels.gemm.sm90.gemms import Sm90
from tests.functional.cases import (
    EXPERTS_FAMILIES,
    GATE_UP_FAMILIES,
    LOADS_AT_EDGES,
    body,
    ids_here,
    ids_of_loads,
    run,
    tokens_of,
    weights_of,
)
from tests.functional.experts.records import forward_bytes
from tests.functional.gpu_cases import E, H, I, K, inputs, poison
from tests.gpu import NEEDS_GPU, no_synchronisation, slow
from tests.kernels.gemm.cases import choosing
from tests.layers.cases import assert_close

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("error:.*portable PyTorch body"),
]
DTYPES = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")


# ---- Against the portable body ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "size"),
    [
        (1, 1, 1, 128, 128), (1, 8, 2, 256, 128), (2, 256, 8, 1024, 256), (7, 5, 3, 144, 272),
        (16, 64, 6, 2048, 1408), (33, 4, 4, 512, 100), (65, 3, 2, 100, 200), (130, 6, 9, 129, 257),
        (200, 7, 1, 3, 5), (300, 12, 12, 1, 1), (512, 16, 4, 1024, 512), (700, 9, 2, 264, 136),
        (1025, 32, 8, 384, 640), (4096, 8, 2, 512, 256), (3, 1, 5, 7168, 2048),
        (4097, 8, 2, 512, 256), (90, 6, 2, 4224, 4352),
        *slow(
            (64, 128, 8, 2048, 768), (37, 384, 40, 160, 144), (2100, 500, 4, 264, 144),
            (1500, 1024, 6, 128, 128),
        ),
    ],
)  # fmt: skip
def test_any_shape_is_right(num_tokens, num_experts, top_k, hidden_size, size, masked):
    weights = weights_of(num_experts, hidden_size, size, "cuda")
    for kind in ("distinct", "out of range", "one expert"):
        arguments = inputs(num_tokens, top_k, num_experts, hidden_size, kind)
        expected = body(*arguments, weights)
        poison()
        with no_synchronisation():
            y = run(*arguments, weights, SWIGLU, masked)
        assert (y.shape, y.dtype) == (expected.shape, torch.bfloat16)
        assert_close(y, expected, size)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 40, 400])
def test_any_dtype_and_strides(layer, num_tokens, masked):
    x, ids, top_k_weights = inputs(num_tokens)
    for dtype in DTYPES:
        tokens, of_choices = x.to(dtype), top_k_weights.to(dtype)
        expected = run(tokens, ids, of_choices, layer, SWIGLU, masked)
        assert_close(expected, body(tokens, ids, of_choices, layer), I)
        wide = torch.zeros(num_tokens * 2, H + 3, dtype=dtype, device="cuda")[::2, 1 : H + 1]
        others = wide.copy_(tokens), ids.int(), of_choices.T.contiguous().T
        assert torch.equal(run(*others, layer, SWIGLU, masked), expected)
        others = tokens.T.contiguous().T, ids.T.contiguous().T, of_choices
        assert torch.equal(run(*others, layer, SWIGLU, masked), expected)


@pytest.mark.parametrize("limit", [None, 0.0, 0.2, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_count(layer, kind, limit):
    activation = Activation(kind, limit)
    for num_tokens in (3, 60, 500):
        arguments = inputs(num_tokens)
        y = run(*arguments, layer, activation)
        assert_close(y, body(*arguments, layer, activation), I)
        if limit is not None and limit < 3:
            assert not torch.equal(y, run(*arguments, layer))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 50, 800, 2100])  # the last one's choices are counted
def test_choices_of_no_expert_count_nothing(layer, num_tokens, masked):
    x, ids, top_k_weights = inputs(num_tokens)
    is_here = torch.rand(num_tokens, K, device="cuda") < 0.6
    expected = run(x, ids, top_k_weights.masked_fill(~is_here, 0), layer, SWIGLU, masked)
    for elsewhere, weight in ((E, 1.0), (E, NAN), (-1, INF), (2**40, 1e30), (-(2**40), NAN)):
        held = ids.masked_fill(~is_here, elsewhere)
        poison()
        y = run(x, held, top_k_weights.masked_fill(~is_here, weight), layer, SWIGLU, masked)
        assert torch.equal(y, expected)
    nowhere = run(x, ids * 0 + E, top_k_weights * NAN, layer, SWIGLU, masked)
    assert bool((nowhere == 0).all())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 50, 800, 2100])  # the last one's choices are counted
@pytest.mark.parametrize("kind", ["distinct", "out of range"])
def test_a_rank_takes_the_ids_of_the_whole_model(layer, num_tokens, masked, kind):
    """Tiles are others than those of ids that are mapped before, and the bits are the same."""
    x, ids, top_k_weights = inputs(num_tokens, num_experts=40, kind=kind)
    for first in (0, 7, 40 - E):
        by_hand = ids_here(ids, E, first)
        expected = run(x, by_hand, top_k_weights, layer, SWIGLU, masked)
        assert_close(expected, body(x, by_hand, top_k_weights, layer), I)
        poison()
        with no_synchronisation():
            y = run(x, ids, top_k_weights, layer, SWIGLU, masked, (first, 40))
        assert torch.equal(y, expected)
        narrow = ids.clamp(-(2**31), 2**31 - 1).int()
        assert torch.equal(run(x, narrow, top_k_weights, layer, SWIGLU, masked, (first, 40)), y)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("num_tokens", [1, 32, 400, 2100])
def test_one_graph_of_a_rank_serves_all_routings(num_tokens, layout):
    """It holds the kernels of the layer alone."""
    whole = GroupedExperts(E, H, I, layout=layout, device="cuda")
    part = moefp8.shard(copy.deepcopy(whole), {"": "experts"}, 1, 4)
    memory, graph = inputs(num_tokens), torch.cuda.CUDAGraph()
    with torch.inference_mode():
        part(*memory)
        with torch.cuda.graph(graph):
            y = part(*memory)
        for kind in ("one expert", "distinct", "out of range", "repeated"):
            for old, new in zip(memory, inputs(num_tokens, kind=kind), strict=True):
                old.copy_(new)
            graph.replay()
            x, ids, top_k_weights = memory
            elsewhere = (ids < E // 4) | (ids >= E // 2)
            assert torch.equal(y, whole(x, ids.masked_fill(elsewhere, E), top_k_weights))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            part(*memory)
            torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "kernel" in event.name.lower()]
    assert not [name for name in kernels if "at::native" in name], kernels


@pytest.mark.parametrize("num_tokens", [0, 4])
@pytest.mark.parametrize(("h", "i"), [(128, 0), (0, 128), (0, 0), (128, 128)])
def test_empty_sizes(num_tokens, h, i):
    weights = weights_of(3, h, i, "cuda")
    y = run(*inputs(num_tokens, 2, 3, h), weights)
    assert y.shape == (num_tokens, h)
    assert i > 0 or bool((y == 0).all())


@pytest.mark.parametrize("expert", [0, 7, E - 1])
@pytest.mark.parametrize("masked", [False, True])
def test_all_tokens_of_one_expert(layer, expert, masked):
    for num_tokens in (1, 63, 129, 3000, 8193):
        x, ids, top_k_weights = inputs(num_tokens, 1)
        ids.fill_(expert)
        y = run(x, ids, top_k_weights, layer, SWIGLU, masked)
        assert_close(y, body(x, ids, top_k_weights, layer), I)


# ---- Bit for bit ----


@pytest.mark.parametrize("num_tokens", [1, 9, 70, 500])
def test_every_family_gives_the_same_bits(layer, num_tokens):
    """They are the same also where the family would not be chosen."""
    for weights, hidden_size, size in ((layer, H, I), (weights_of(E, 264, 200, "cuda"), 264, 200)):
        check_every_family(*inputs(num_tokens, hidden_size=hidden_size), weights, size=size)


def test_every_family_ends_tiles_where_groups_end():
    ids, weights = ids_of_loads(LOADS_AT_EDGES).cuda(), weights_of(19, 264, 200, "cuda")
    tokens, of_choices = tokens_of(len(ids), 264, "cuda"), torch.ones(len(ids), 1, device="cuda")
    check_every_family(tokens, ids, of_choices, weights, size=200)


def check_every_family(*arguments, size: int) -> None:
    expected, first = body(*arguments), None
    for name, (gate_up, down) in EXPERTS_FAMILIES.items():
        with choosing(down, gate_up):
            for masked in (False, True):
                poison()
                y = run(*arguments, SWIGLU, masked)
                assert_close(y, expected, size)
                first = y if first is None else first
                assert torch.equal(y, first), (name, masked)


@pytest.mark.parametrize(
    ("family", "num_tokens"),
    [*((family, 300) for family in GATE_UP_FAMILIES), *((None, n) for n in (1, 40, 300, 4000))],
)
@pytest.mark.usefixtures("new_driver")
def test_a_limit_of_sms_changes_no_bit(layer, family, num_tokens):
    arguments = inputs(num_tokens)
    with choosing(gate_up=GATE_UP_FAMILIES.get(family)):
        expected = run(*arguments, layer)
        for limit in (1, 2, 3, 131, 10_000):
            set_num_sms(limit)
            assert torch.equal(run(*arguments, layer), expected)


@pytest.mark.parametrize("family", EXPERTS_FAMILIES)
@pytest.mark.usefixtures("new_driver")
def test_who_takes_which_tile_changes_no_bit(family, monkeypatch):
    """Loops along K of 13 and 9 k-blocks, so that the next tile is asked for on the way."""
    gate_up, down = EXPERTS_FAMILIES[family]
    weights = weights_of(6, 1664, 1152, "cuda")
    made = [inputs(200, 2, 6, 1664) for _ in range(3)]  # in turns: what is left is wrong
    expected: list[torch.Tensor] = []
    for take in (False, True):
        monkeypatch.setattr(Sm90, "takes_tiles", lambda *_, take=take: take)
        with choosing(down, gate_up):
            for limit in (2, 5, 16, None):
                set_num_sms(limit)
                poison()
                results = [run(*arguments, weights) for arguments in 2 * made]
                expected = expected or results[:3]
                for y, right in zip(results, 2 * expected, strict=True):
                    assert torch.equal(y, right), (take, limit)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("h", "i"), [(H, I), (2048, 768), (264, 200)])
def test_a_token_depends_on_no_other(masked, h, i):
    weights = weights_of(E, h, i, "cuda")
    x, ids, top_k_weights = inputs(1024, hidden_size=h)
    expected = run(x, ids, top_k_weights, weights, SWIGLU, masked)
    for num_tokens in (1, 2, 7, 64, 300, 1024):
        for _ in range(3):
            some = torch.randperm(1024)[:num_tokens].cuda()
            y = run(x[some], ids[some], top_k_weights[some], weights, SWIGLU, masked)
            assert torch.equal(y, expected[some]), num_tokens


@pytest.mark.parametrize("num_tokens", [1, 5, 90, 1500, 2100])
def test_masked_equals_contiguous(layer, num_tokens):
    for kind in ("distinct", "repeated", "out of range", "one expert", "nowhere"):
        arguments = inputs(num_tokens, kind=kind)
        assert torch.equal(run(*arguments, layer), run(*arguments, layer, SWIGLU, True))


@pytest.mark.parametrize("masked", [False, True])
def test_parts_equal_the_whole(layer, monkeypatch, new_driver, masked):
    arguments = inputs(777, kind="out of range")
    expected = run(*arguments, layer, SWIGLU, masked)
    size = forward_bytes(Sizes(777, K, E, H, I, masked))
    for parts in (2, 5, 40):
        monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", size // parts)
        new_driver.prepared().clear()
        assert torch.equal(run(*arguments, layer, SWIGLU, masked), expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9, 130, 2100])
@pytest.mark.parametrize(("h", "i"), [(H, I), (264, 200), (100, 200), (3, 5)])
def test_an_addend_is_added_as_it_would_be_behind(
    monkeypatch, new_driver, num_tokens, masked, h, i
):
    """Also where it is not aligned, or copied, and where the tokens go in parts."""
    weights = weights_of(E, h, i, "cuda")
    arguments = *inputs(num_tokens, hidden_size=h, kind="out of range"), weights, SWIGLU, masked
    addend = tokens_of(num_tokens, h, "cuda")
    unaligned = torch.empty(num_tokens * h + 1, device="cuda").bfloat16()[1:].view_as(addend)
    unaligned.copy_(addend)
    y = run(*arguments)
    assert_close(run(*arguments, addend=addend), body(*arguments[:4], addend=addend), i)
    for place in (addend, unaligned, addend.T.contiguous().T):
        poison()
        with no_synchronisation():
            added = run(*arguments, addend=place)
        assert torch.equal(added, y + addend)
        assert torch.equal(run(*arguments), y)
    size = forward_bytes(Sizes(num_tokens, K, E, h, i, masked))
    for parts in (2, 5):
        monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", size // parts)
        new_driver.prepared().clear()
        assert torch.equal(run(*arguments, addend=addend), y + addend)


@pytest.mark.parametrize("masked", [False, True])
def test_an_addend_is_read_when_it_is_written(layer, masked):
    """It is written right before the call, and over right behind it."""
    arguments = *inputs(300), layer, SWIGLU, masked
    y, values = run(*arguments), [tokens_of(300, H, "cuda") for _ in range(10)]
    addend, results = torch.empty_like(y), []
    for value in values:
        addend.copy_(value)
        results.append(run(*arguments, addend=addend))
        addend.fill_(NAN)
    for value, added in zip(values, results, strict=True):
        assert torch.equal(added, y + value)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("num_tokens", [5, 100, 900])
def test_bad_numbers_stay_with_their_token(layer, bad, num_tokens):
    x, ids, top_k_weights = inputs(num_tokens)
    clean = run(x, ids, top_k_weights, layer)
    others = torch.arange(num_tokens, device="cuda") != 3
    x[3, H // 2 + 1] = bad
    for masked in (False, True):
        for limit in (None, 1e30):
            y = run(x, ids, top_k_weights, layer, Activation(limit=limit), masked)
            assert bool(y[3].isnan().all())
            assert torch.equal(y[others], clean[others])
    x[3, H // 2 + 1] = 0
    top_k_weights[3, 1] = bad
    y = run(x, ids, top_k_weights, layer)
    assert not bool(y[3].isfinite().any())
    assert torch.equal(y[others], clean[others])
