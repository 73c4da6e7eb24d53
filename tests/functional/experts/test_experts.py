"""The op of the routed experts on the CPU, and how modules take it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import moefp8
from moefp8 import GroupedExperts, MoE
from moefp8.functional.experts import experts as op
from moefp8.kernels.common.activation import KINDS, SWIGLU, Activation
from moefp8.kernels.registry import as_in_schema
from moefp8.testing import relative_error, routings, sizes
from tests import naive
from tests.functional.cases import (
    Calls,
    Weights,
    body,
    every_other,
    inputs,
    run,
    tokens_of,
    weights_of,
)
from tests.gpu import same_bits
from tests.layers.cases import assert_matches_up_to_codes

E, H, I, K = 5, 144, 200, 2
DTYPES = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")


def assert_right(x, ids, top_k_weights, weights, activation=SWIGLU) -> None:
    expected = naive.fp8_experts(x, ids, top_k_weights, *weights, activation)
    for masked in (False, True):
        y = run(x, ids, top_k_weights, weights, activation, masked)
        assert (y.dtype, y.is_contiguous()) == (torch.bfloat16, True)
        assert_matches_up_to_codes(y, expected)


# ---- Whether it is right ----


@settings(max_examples=25)
@given(
    routing=routings(E, K, max_tokens=8),
    h=sizes(300, 1),
    i=sizes(300, 1),
    activation=st.sampled_from([Activation(kind, x) for kind in KINDS for x in (None, 0.3)]),
    dtype=st.sampled_from(DTYPES),
    id_dtype=st.sampled_from((torch.int32, torch.int64)),
    weights_dtype=st.sampled_from(DTYPES),
)
def test_it_is_right(routing, h, i, activation, dtype, id_dtype, weights_dtype):
    index, top_k_weights = routing
    x = tokens_of(len(index), h).to(dtype)
    assert_right(
        x, index.to(id_dtype), top_k_weights.to(weights_dtype), weights_of(E, h, i), activation
    )


@pytest.mark.parametrize("top_k", [1, 9, 12, 40])
def test_any_number_of_choices(top_k):
    """There may be more choices than experts, so that some are named more than once."""
    assert_right(*inputs(4, H, top_k, E, "repeated"), weights_of(E, H, I))


def test_strides_do_not_matter():
    (x, ids, top_k_weights), weights = inputs(6, H, 2, E), every_other(weights_of(2 * E, H, I))
    expected = run(x, ids, top_k_weights, Weights(*(y.clone() for y in weights)))
    wide = torch.zeros(12, H + 3, dtype=x.dtype)[::2, 1 : H + 1].copy_(x)
    for tokens in (x, wide, x.T.contiguous().T):
        y = run(tokens, ids.T.contiguous().T, top_k_weights.T.contiguous().T, weights)
        assert torch.equal(y, expected)


def on_codes(change):
    return lambda x: change(x.view(torch.uint8)).view(torch.float8_e4m3fn)


def doubled(*at: int):
    return lambda x: x.index_put(tuple(map(torch.tensor, at)), 2 * x[at])


WRONG = {
    "a lost expert": {"down_proj": on_codes(lambda x: x.index_fill(0, torch.tensor([3]), 0))},
    "gate and up swapped": {
        "gate_up_proj": on_codes(lambda x: x.roll(I, 1)),
        "gate_up_proj_scale_inv": lambda x: x.roll(2, 1),
    },
    "a scale of gate": {"gate_up_proj_scale_inv": doubled(2, 1, 1)},
    "a scale of up": {"gate_up_proj_scale_inv": doubled(2, 3, 0)},
    "another expert": {"down_proj": on_codes(lambda x: x.roll(1, 0))},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_reference_rejects_other_weights(wrong):
    weights, ids = weights_of(E, H, I), torch.arange(E).repeat(2)[:, None]
    x, ones = tokens_of(2 * E, H), torch.ones(2 * E, 1)
    assert_right(x, ids, ones, weights)
    changed = {name: change(getattr(weights, name)) for name, change in WRONG[wrong].items()}
    with pytest.raises(AssertionError, match="rows are off by more than"):
        assert_matches_up_to_codes(
            run(x, ids, ones, weights._replace(**changed)),
            naive.fp8_experts(x, ids, ones, *weights),
        )


def test_the_reference_rejects_other_routings():
    weights, (x, ids, top_k_weights) = weights_of(E, H, I), inputs(8, H, 2, E)
    expected = naive.fp8_experts(x, ids, top_k_weights, *weights)
    one = torch.zeros(8, 2, dtype=torch.bool)
    one[5, 1] = True
    for wrong in (
        (x, ids, torch.ones(8, 2)),
        (x, ids, top_k_weights.masked_fill(one, 0)),
        (x, ids.masked_fill(one, E), top_k_weights),
        (x, ids.flip(1), top_k_weights),
        (x.roll(1, 0), ids, top_k_weights),
        (x * 0, ids, top_k_weights),
    ):
        with pytest.raises(AssertionError, match="rows are off by more than"):
            assert_matches_up_to_codes(run(*wrong, weights), expected)
    with pytest.raises(AssertionError, match="rows are off by more than"):  # limits count
        assert_matches_up_to_codes(
            run(x, ids, top_k_weights, weights, Activation(limit=0.2)), expected
        )


@pytest.mark.parametrize("masked", [False, True])
def test_ranks_sum_up_to_the_whole(masked):
    """The op of a rank is that of its experts, with all other choices masked by hand."""
    weights, (x, ids, top_k_weights) = weights_of(E, H, I), inputs(30, H, 3, E + 1, "repeated")
    whole, total = run(x, ids, top_k_weights, weights, SWIGLU, masked), torch.zeros(30, H)
    for first, end in ((0, 2), (2, 3), (3, E)):
        part, rank = Weights(*(y[first:end] for y in weights)), (first, E)
        y = run(x, ids, top_k_weights, part, SWIGLU, masked, rank)
        assert_matches_up_to_codes(y, body(x, ids, top_k_weights, part, SWIGLU, masked, rank))
        elsewhere = (ids < first) | (ids >= end)
        by_hand = ids.masked_fill(elsewhere, E), top_k_weights.masked_fill(elsewhere, 0)
        assert_matches_up_to_codes(y, run(x, *by_hand, weights, SWIGLU, masked))
        assert (y[elsewhere.all(1)] == 0).all()
        total += y.float()
    assert relative_error(total, whole) < 1e-2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_tokens", "h", "i"), [(9, H, I), (4, 100, 36), (0, H, I), (5, H, 0)])
def test_an_addend_is_added_as_it_would_be_behind(masked, num_tokens, h, i):
    """To the bit; also where tokens have no expert here, and where experts are empty."""
    x, ids, top_k_weights = inputs(num_tokens, h, 2, E + 1, "repeated")
    arguments = x, ids, top_k_weights, weights_of(E, h, i), SWIGLU, masked
    y, addend = run(*arguments), tokens_of(num_tokens, h)
    addend[:1, :4] = torch.tensor([NAN, INF, -0.0, 0.0])
    assert same_bits(run(*arguments, addend=addend), y + addend)
    assert same_bits(run(*arguments, addend=addend.T.contiguous().T), y + addend)
    assert same_bits(run(*arguments, addend=-y), y - y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_adds_to_what_it_returns(dtype):
    layer = GroupedExperts(E, H, I)
    x, ids, top_k_weights = inputs(12, H, 2, E)
    x, addend = x.to(dtype), tokens_of(12, H)
    y = layer(x, ids, top_k_weights, addend=addend)
    assert y.dtype == dtype
    assert torch.equal(y, (layer(x, ids, top_k_weights).bfloat16() + addend).to(dtype))
    in_rows = layer(x.view(3, 4, H), ids, top_k_weights, addend=addend.view(3, 4, H))
    assert torch.equal(in_rows, y.view(3, 4, H))


# ---- Rows that stand for themselves ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weight", [NAN, INF, -INF, 1e30, 0.0])
def test_a_choice_that_is_held_elsewhere_counts_nothing(masked, weight):
    weights, x = weights_of(E, H, I), tokens_of(4, H)
    ids = torch.tensor([[1, 3], [E, 3], [1, E], [E, E]])
    top_k_weights = torch.rand(4, 2)
    y = run(x, ids, top_k_weights.masked_fill(ids == E, weight), weights, SWIGLU, masked)
    zero = run(x, ids, top_k_weights.masked_fill(ids == E, 0.0), weights, SWIGLU, masked)
    assert torch.equal(y, zero)
    assert bool((y[3] == 0).all())
    assert bool((y[:3] != 0).any(1).all())


def test_an_expert_named_twice_counts_twice():
    weights, x = weights_of(E, H, I), tokens_of(3, H)
    ids, top_k_weights = torch.tensor([[2, 2], [4, 1], [0, 0]]), torch.rand(3, 2)
    assert_right(x, ids, top_k_weights, weights)
    of_sum = run(x, ids[:, :1], top_k_weights.sum(1, keepdim=True), weights)
    y = run(x, ids, top_k_weights, weights)
    assert relative_error(y[::2], of_sum[::2]) < 6e-3
    assert relative_error(y[1:2], of_sum[1:2]) > 0.1


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_numbers_stay_with_their_token(masked, bad):
    weights, x = weights_of(E, H, I), tokens_of(6, H)
    ids, top_k_weights = torch.tensor([[1, 3]] * 5 + [[E, E]]), torch.rand(6, 2)
    clean = run(x, ids, top_k_weights, weights, SWIGLU, masked)
    others = [0, 1, 3, 4]
    x[2, 9] = x[5, 9] = bad
    y = run(x, ids, top_k_weights, weights, SWIGLU, masked)
    assert bool(y[2].isnan().all())
    assert torch.equal(y[others], clean[others])
    assert bool((y[5] == 0).all())
    x[2, 9] = 0
    top_k_weights[3, 1] = bad
    y = run(x, ids, top_k_weights, weights, SWIGLU, masked)
    assert not bool(y[3].isfinite().any())
    assert bool(y[others[:2]].isfinite().all())


def test_a_token_depends_on_no_other():
    """On the CPU the order of FP32 sums, which products choose by the number of rows, depends on
    others, and nothing else; on a GPU not a bit does.
    """
    weights, arguments = weights_of(E, H, I), inputs(40, H, 2, E)
    all_of_them = run(*arguments, weights)
    for num_tokens in (1, 2, 7, 39):
        some = torch.randperm(40)[:num_tokens]
        y = run(*(x[some] for x in arguments), weights)
        assert_matches_up_to_codes(y, all_of_them[some])


# ---- What it refuses ----


def arguments() -> list:
    ids = torch.zeros(4, 2, dtype=torch.int64)
    return [tokens_of(4, H), ids, torch.ones(4, 2), *weights_of(E, H, I), SWIGLU, False]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


X, IDS, SCORES, GATE_UP, GATE_UP_SCALES, DOWN, DOWN_SCALES, LIMIT = range(8)
WRONG_DTYPES = [  # an argument, how it is changed, what is said
    (X, torch.Tensor.double, "hidden_states must be bfloat16 or .* got float64"),
    (IDS, torch.Tensor.short, "top_k_index must be int32 or int64, got int16"),
    (SCORES, torch.Tensor.long, "top_k_weights must be bfloat16 or .*got int64"),
    (GATE_UP, torch.Tensor.float, "gate_up_proj must .*e4m3fn, got float32"),
    (GATE_UP_SCALES, torch.Tensor.half, "gate_up.*_inv must be float32, got float16"),
    (DOWN, lambda x: x.view(torch.uint8), "down_proj must be .*e4m3fn, got uint8"),
]
_SCALES = r"gate_up_proj_scale_inv must be \[E, 2 ceil\(I/128\), ceil\(H/128\)\] = \[5, 4, 2\], got"
_OF_LIMIT = "swiglu_limit must be at least 0.* got"
_OF_DOWN = r"down_proj_scale_inv must be \[E, ceil\(H/128\), ceil\(I/128\)\] = \[5, 2, 2\], got \[4"
_WEIGHTS = r"gate_up_proj must be \[E, 2I, H\] for down_proj \[E, H, I\] = \[5, 400, 144\], got .*3"
WRONG_VALUES = [
    (X, lambda x: x[None], r"hidden_states must have 2 .* shape \[1, 4, 144\]"),
    (X, lambda x: x[:3], r"top_k_index must be \[T, k\] = \[3, 2\], got \[4, 2\]"),
    (X, lambda x: x[:, :99], r"hidden_states .* \[T, H\] = \[4, 144\], got \[4, 99\]"),
    (IDS, lambda x: x[0], r"top_k_index must have 2 dimensions, got shape \[2\]"),
    (IDS, lambda x: x[:, :0], r"weights .* as top_k_index = \[4, 0\], got \[4, 2\]"),
    (IDS, lambda x: x - 1, r"index must be in \[0, E\] for E = 5 .*got ids from -1 to -1"),
    (IDS, lambda x: x + E + 1, r"in \[0, E\] for E = 5 .*got ids from 6 to 6"),
    (SCORES, lambda x: x[:, :1], r"as top_k_index = \[4, 2\], got \[4, 1\]"),
    (GATE_UP, lambda x: x[:, :-1], _WEIGHTS),
    (GATE_UP, transposed, r"gate_up_proj must be contiguous, got strides \[57600, 1, 400\]"),
    (GATE_UP_SCALES, lambda x: x[:, :3], _SCALES),
    (DOWN, lambda x: x[0], r"down_proj must have 3 .* got shape \[144, 200\]"),
    (DOWN, transposed, r"down_proj must be contiguous, got strides .* call .contiguous\(\)"),
    (DOWN, lambda x: x.to("meta"), "on one device, got hidden_states on cpu, .*down_proj on meta"),
    (DOWN_SCALES, lambda x: x[1:], _OF_DOWN),
    *(
        (LIMIT, lambda x, y=y: Activation(limit=y), "swiglu_limit must be at least 0.* got")
        for y in (-1.0, NAN)
    ),
]


@pytest.mark.parametrize(
    ("error", "index", "change", "message"),
    [*((TypeError, *x) for x in WRONG_DTYPES), *((ValueError, *x) for x in WRONG_VALUES)],
)
@pytest.mark.parametrize("launched", [False, True])
def test_bad_arguments_are_named(request, launched, error, index, change, message):
    """Kernels that have been prepared for what is right are no excuse."""
    if launched and ("got ids" in message or "on meta" in message):
        pytest.skip("a launcher reads no ids, and the emulated GPU has the index of `meta`")
    gpu = request.getfixturevalue("gpu") if launched else None
    made = arguments()
    op(*made)
    made[index] = change(made[index])
    for _ in range(2):
        with pytest.raises(error, match=f"^experts: .*{message}"):
            op(*made)
    assert gpu is None or len(gpu.prepared()) == 1


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(
    ("error", "addend", "message"),
    [
        (TypeError, torch.ones(4, H), "addend must be bfloat16, got float32"),
        (ValueError, tokens_of(4, H)[0], r"addend must have 2 dimensions, got shape \[144\]"),
        (ValueError, tokens_of(1, H), r"be \[T, H\] as hidden_states = \[4, 144\], got \[1, 144\]"),
        (ValueError, tokens_of(4, H).T, r"= \[4, 144\], got \[144, 4\]"),
        (ValueError, tokens_of(4, H).to("meta"), "on one device, got .*addend on meta"),
    ],
)
def test_a_bad_addend_is_named(request, launched, error, addend, message):
    if launched and addend.is_meta:
        pytest.skip("the emulated GPU has the index of `meta`")
    if launched:
        request.getfixturevalue("gpu")
    for _ in range(2):
        with pytest.raises(error, match=f"^experts: .*{message}"):
            op(*arguments(), 0, None, addend)


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("rank", [(-1, 9), (5, 9), (1, None), (0, 4), (0, 0)])
def test_a_rank_is_a_part_of_its_model(request, launched, rank):
    if launched:
        request.getfixturevalue("gpu")
    told = r"^experts: expert_offset must be in \[0, num_global_experts - E\] for E = 5 .* got"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{told} {rank[0]}"):
            op(*arguments(), *rank)


def test_ids_of_a_rank_are_those_of_the_whole_model():
    made = arguments()
    for ids in (made[IDS] + 10, made[IDS] - 1):
        made[IDS] = ids
        with pytest.raises(ValueError, match=r"top_k_index must be in \[0, E\] for E = 9 experts"):
            op(*made, 2, 9)
    made[IDS] = torch.full_like(ids, 9)
    assert not op(*made, 2, 9).any()


def test_there_must_be_choices_and_experts():
    made = arguments()
    made[IDS : SCORES + 1] = made[IDS][:, :0], made[SCORES][:, :0]
    with pytest.raises(ValueError, match=r"^experts: k and E must be .* got k = 0 and E = 5"):
        op(*made)
    made = arguments()
    made[GATE_UP:-2] = [x[:0] for x in made[GATE_UP:-2]]
    with pytest.raises(ValueError, match=r"^experts: k and E must be .* got k = 2 and E = 0"):
        op(*made)


# ---- As an op ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("activation", [SWIGLU, Activation("gpt_oss", 1.5)])
@pytest.mark.parametrize("rank", [(), (3, 20), (0, None, tokens_of(4, H))])
def test_the_op_is_what_it_says(masked, activation, rank):
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # "test_schema" knows no FP8
    made = [*arguments()[:-2], activation, masked, *rank]
    before = [x.clone() for x in made[:7]]
    torch.library.opcheck(op.overload, as_in_schema(made), test_utils=checks)
    y = op(*made)
    for x, was in zip(made[:7], before, strict=True):
        assert torch.equal(x.view(torch.uint8), was.view(torch.uint8))
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert "!" not in str(op.overload._schema)


def test_the_result_has_no_graph_and_heeds_no_autocast():
    made = arguments()
    expected = op(*made)
    made[X].requires_grad_()
    with torch.autocast("cpu"):
        y = op(*made)
    assert not y.requires_grad
    assert torch.equal(y, expected)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dynamic", [None, True])
def test_experts_compile_whole_for_any_number_of_tokens(layout, num_ranks, dynamic):
    torch._dynamo.reset()
    layer = GroupedExperts(num_ranks * E, H, I, layout=layout)
    layer = moefp8.shard(layer, {"": "experts"}, num_ranks - 1, num_ranks)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
    for calls, num_tokens in enumerate((9, 4, 30)):
        arguments = inputs(num_tokens, H, 2, num_ranks * E)
        if calls == 0:
            for x in arguments:
                torch._dynamo.mark_dynamic(x, 0)
        with torch.inference_mode():
            assert torch.equal(compiled(*arguments), layer(*arguments))
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_a_layer_is_one_op_for_all_of_its_experts(layout):
    """No routing makes the graph larger."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    moe = MoE(H, I, E, K, layout=layout)
    x = tokens_of(7, H)
    with torch.inference_mode():
        compiled = torch.compile(moe, backend=keep, fullgraph=True)
        assert torch.equal(compiled(x), moe(x))
    (graph,) = graphs
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("experts" in call for call in calls) == 1
    assert not any("grouped" in call for call in calls)


def test_layers_hand_over_what_they_are():
    """They hand over their weights as they lie, their limit and their layout."""
    layer = GroupedExperts(E, H, I, swiglu_limit=0.5, layout="masked")
    x, ids, top_k_weights = inputs(3, H, 2, E)
    options = "activation_limit", "masked", "expert_offset", "num_global_experts", "addend"
    with Calls("experts") as calls:
        y = layer(x, ids, top_k_weights)
        for layer.layout in ("auto", "contiguous"):
            layer.activation = SWIGLU
            layer(x.float(), ids, top_k_weights)
        layer.expert_offset, layer.num_global_experts = 3, 20
        layer(x, ids, top_k_weights, addend=x)
    first, *others, last = ([call[name] for name in options] for call in calls.came)
    assert first == [0.5, True, 0, None, None]
    assert others == 2 * [[None, False, 0, None, None]]
    assert last[:-1] == [None, False, 3, 20]
    assert torch.equal(last[-1], x)
    weights = Weights(*(calls.came[0][name].detach() for name in Weights._fields))
    for name, ours in weights._asdict().items():
        assert ours.data_ptr() == getattr(layer, name).data_ptr()
    assert torch.equal(y, run(x, ids, top_k_weights, weights, Activation(limit=0.5)))
