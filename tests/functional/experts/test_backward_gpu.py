"""Gradients of the routed experts on a GPU: against the portable body, and bit for bit.

A backward gets the gate and up that the GPU saved, and so does the body. Then only sums are in
another order, and some of the codes between the GEMMs are the next ones.
"""

import gc

import pytest
import torch

from moefp8.functional import parts as parts_room
from moefp8.functional.experts import ExpertsInputs, launch_experts
from moefp8.kernels import set_num_sms
from moefp8.kernels.common.activation import KINDS, SWIGLU, Activation
from moefp8.kernels.gemm.sizes import Sizes
from moefp8.kernels.gemm.sm90.gemms import Sm90
from moefp8.testing import assert_matches_reference
from tests.functional.cases import (
    DOWN_FAMILIES,
    EXPERTS_FAMILIES,
    GATE_UP_FAMILIES,
    LOADS_AT_EDGES,
    Weights,
    ids_of_loads,
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
    case,
    rows_of_body,
    saving,
)
from tests.functional.experts.records import backward_bytes, forward_bytes
from tests.functional.gpu_cases import E, H, I, K, poison
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


def both(made: Case, fp8: bool = False) -> tuple[torch.Tensor, Gradients]:
    """What is saved and the gradients, in poisoned memory; nothing waits for the GPU."""
    poison()
    with no_synchronisation():
        _, gate_up = saving(made)
        found = backward(made, gate_up, fp8, False)
    return gate_up, found


def assert_right(made: Case, fp8: bool = False) -> Gradients:
    """Check the forward and the backward, and return the gradients."""
    y, gate_up = saving(made)
    assert torch.equal(y, run(*made[:3], made.weights, made.activation, rank=made.rank))
    rows = rows_of_body(made, gate_up)
    assert_saved(made, rows, 4e-3 if rows.shape[2] >= 64 else 5e-2)
    again, found = both(made, fp8)
    assert torch.equal(rows_of_body(made, again), rows)
    right = backward_body(made, rows, fp8)
    assert_hidden_states_close(made, found.hidden_states, right.hidden_states)
    assert_weights_close(made, rows, found, right)
    return found


def assert_hidden_states_close(made: Case, found: torch.Tensor, right: torch.Tensor) -> None:
    """In small layers sums of few terms may cancel: all tokens are judged together, as if alike."""
    _, h, i = made.weights.down_proj.shape
    if min(h, i) >= 64:
        assert_close(found, right, i)
    else:
        sizes = made.grad.double().norm(dim=-1, keepdim=True)
        rows = ((x.double() / sizes).view(1, -1) for x in (found, right))
        assert_matches_reference(*rows, 3e-2)


def assert_same(ours: Gradients, theirs: Gradients, what: object = None) -> None:
    """To the bit."""
    for name, x, y in zip(Gradients._fields, ours, theirs, strict=True):
        assert torch.equal(x, y), (name, what)


# ---- Against the portable body ----


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "size"),
    [
        (1, 1, 1, 128, 128), (1, 8, 2, 256, 128), (2, 256, 8, 1024, 256), (7, 5, 3, 144, 272),
        (16, 64, 6, 2048, 1408), (33, 4, 4, 512, 100), (65, 3, 2, 100, 200), (130, 6, 9, 129, 257),
        (200, 7, 1, 3, 5), (300, 12, 12, 1, 1), (512, 16, 4, 1024, 512), (700, 9, 2, 264, 136),
        (1025, 32, 8, 384, 640), (4096, 8, 2, 512, 256), (3, 1, 5, 7168, 2048),
        (90, 6, 2, 4224, 4352),
        *slow((64, 128, 8, 2048, 768), (37, 384, 40, 160, 144), (2100, 500, 4, 264, 144)),
    ],
)  # fmt: skip
def test_any_shape_is_right(num_tokens, num_experts, top_k, hidden_size, size, fp8):
    weights = weights_of(num_experts, hidden_size, size, "cuda")
    for kind in ("distinct", "out of range", "one expert"):
        assert_right(case(num_tokens, hidden_size, top_k, weights, kind), fp8)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("limit", [0.0, 0.2, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_where_the_limit_holds_there_is_no_gradient(layer, kind, limit, fp8):
    activation = Activation(kind, limit)
    for num_tokens in (3, 60, 500):
        found = assert_right(case(num_tokens, H, K, layer, activation=activation), fp8)
        # Codes of up may be zero where up is not; at a limit of 0, nothing holds them.
        assert bool(found.hidden_states.any()) == (limit > 0) or fp8 or kind == "gpt_oss"


@pytest.mark.parametrize("num_tokens", [1, 40, 400])
def test_any_dtype_and_strides(layer, num_tokens):
    made = case(num_tokens, H, K, layer)
    made = made._replace(grad=made.grad * 2.0**20)  # FP16 holds nothing small
    for dtype in DTYPES:
        made = made._replace(grad=made.grad.to(dtype), top_k_weights=made.top_k_weights.to(dtype))
        expected, (_, gate_up) = assert_right(made), saving(made)
        wide = torch.zeros(num_tokens * 2, H + 3, dtype=dtype, device="cuda")[::2, 1 : H + 1]
        for grad in (wide.copy_(made.grad), made.grad.T.contiguous().T):
            others = made.ids.int(), made.top_k_weights.T.contiguous().T, grad
            assert_same(backward(Case(made.x, *others, layer), gate_up), expected)
        of_sum = made.grad[:1, :1].expand(num_tokens, H)
        assert_same(
            backward(made._replace(grad=of_sum), gate_up),
            backward(made._replace(grad=of_sum.contiguous()), gate_up),
        )


@pytest.mark.parametrize("num_tokens", [1, 50, 800, 2100])  # the last one's choices are counted
@pytest.mark.parametrize("kind", ["distinct", "out of range"])
@pytest.mark.parametrize("first", [0, 7, 40 - E])
def test_a_rank_takes_the_ids_of_the_whole_model(layer, num_tokens, kind, first):
    assert_right(case(num_tokens, H, K, layer, kind, rank=(first, 40)))


@pytest.mark.parametrize("num_tokens", [1, 50, 800, 2100])
def test_choices_of_no_expert_count_nothing(layer, num_tokens):
    made = case(num_tokens, H, K, layer)
    is_here = torch.rand(num_tokens, K, device="cuda") < 0.6
    held = made._replace(ids=made.ids.masked_fill(~is_here, E))
    _, expected = both(held)
    assert bool((expected.top_k_weights[~is_here] == 0).all())
    for elsewhere, weight in ((E, NAN), (-1, INF), (2**40, 1e30), (-(2**40), NAN)):
        others = made._replace(
            ids=made.ids.masked_fill(~is_here, elsewhere),
            top_k_weights=made.top_k_weights.masked_fill(~is_here, weight),
        )
        assert_same(both(others)[1], expected)


@pytest.mark.parametrize("num_tokens", [0, 4])
@pytest.mark.parametrize(("h", "i"), [(128, 0), (0, 128), (0, 0), (128, 128)])
def test_empty_sizes(num_tokens, h, i):
    made = case(num_tokens, h, 2, weights_of(3, h, i, "cuda"))
    _, found = both(made)
    assert [x.shape for x in found] == [(num_tokens, h), (num_tokens, 2)]
    assert (i > 0 and h > 0) or not any(x.any() for x in found)


# ---- What the forward saves ----


@pytest.mark.parametrize("num_tokens", [1, 9, 70, 500])
def test_every_family_saves_the_same_bits(layer, num_tokens):
    for weights, h in ((layer, H), (weights_of(E, 264, 200, "cuda"), 264)):
        check_every_family(case(num_tokens, h, K, weights, "out of range"))


@pytest.mark.parametrize(("num_experts", "h", "i"), [(4, 512, 384), (16, 2048, 768), (1, 512, 384)])
@pytest.mark.parametrize("num_tokens", [200, 1700, 4000])
def test_the_tiles_of_many_tokens_save_the_same_bits(num_experts, h, i, num_tokens):
    """Those of a forward that saves nothing are others."""
    made = case(num_tokens, h, min(2, num_experts), weights_of(num_experts, h, i, "cuda"))
    y, gate_up = saving(made)
    assert_saved(made, rows_of_body(made, gate_up))
    assert torch.equal(y, run(*made[:3], made.weights))


def test_every_family_ends_tiles_where_groups_end():
    check_every_family(case_at_edges())


def case_at_edges() -> Case:
    ids, weights = ids_of_loads(LOADS_AT_EDGES).cuda(), weights_of(19, 264, 200, "cuda")
    x, grad = (tokens_of(len(ids), 264, "cuda") for _ in range(2))
    return Case(x, ids, torch.ones(len(ids), 1, device="cuda"), grad, weights)


def check_every_family(made: Case) -> None:
    """Those of gate and up leave the same, and those of others make the same gradients of it."""
    y, gate_up = saving(made)
    rows, expected = rows_of_body(made, gate_up), backward(made, gate_up, keeps=False)
    assert_saved(made, rows)
    for name, (of_gate_up, others) in EXPERTS_FAMILIES.items():
        with choosing(others, of_gate_up):
            poison()
            if of_gate_up is not None:
                found = saving(made)
                assert torch.equal(found[0], y), name
                assert torch.equal(rows_of_body(made, found[1]), rows), name
            else:
                assert_same(backward(made, gate_up, keeps=False), expected, name)


@pytest.mark.parametrize("family", GATE_UP_FAMILIES)
@pytest.mark.parametrize("size", [384, 200, 100, 36])
def test_nothing_else_is_written(family, size):
    """Neither rows of no choice, nor what lies behind the 8 bytes that a row ends in."""
    weights, pitch = weights_of(E, 264, size, "cuda"), -(-size // 8) * 8
    for num_tokens in (1, 60, 600):
        made = case(num_tokens, 264, K, weights, "out of range")
        memory = torch.full((num_tokens * K + 2, 2, pitch), NAN, device="cuda").bfloat16()
        gate_up = memory[1:-1, :, :size]
        with choosing(gate_up=GATE_UP_FAMILIES[family]):
            launch_experts(ExpertsInputs(*made[:3], *weights, SWIGLU, False), gate_up)
        num_rows = int((made.here < E).sum())
        assert not gate_up[:num_rows].isnan().any()
        assert bool(memory[0].isnan().all())
        assert bool(memory[1 + num_rows :].isnan().all())
        assert bool(memory[..., -(-size // 4) * 4 :].isnan().all())


# ---- Bit for bit ----


@pytest.mark.parametrize(
    ("family", "num_tokens"),
    [*((family, 300) for family in DOWN_FAMILIES), *((None, n) for n in (1, 40, 300, 4000))],
)
@pytest.mark.usefixtures("new_driver")
def test_a_limit_of_sms_changes_no_bit(layer, family, num_tokens):
    made = case(num_tokens, H, K, layer)
    with choosing(DOWN_FAMILIES.get(family)):
        gate_up, expected = both(made)
        for limit in (1, 2, 3, 131, 10_000):
            set_num_sms(limit)
            again, found = both(made)
            assert torch.equal(again, gate_up), limit
            assert_same(found, expected, limit)


@pytest.mark.parametrize("family", EXPERTS_FAMILIES)
@pytest.mark.usefixtures("new_driver")
def test_who_takes_which_tile_changes_no_bit(family, monkeypatch):
    """Loops along K of 13 and 9 k-blocks, so that the next tile is asked for on the way."""
    gate_up, down = EXPERTS_FAMILIES[family]
    weights = weights_of(6, 1664, 1152, "cuda")
    made = [case(200, 1664, 2, weights) for _ in range(3)]  # in turns: what is left is wrong
    expected: list = []
    for take in (False, True):
        monkeypatch.setattr(Sm90, "takes_tiles", lambda *_, take=take: take)
        with choosing(down, gate_up):
            for limit in (2, 5, 16, None):
                set_num_sms(limit)
                results = [both(x) for x in 2 * made]
                expected = expected or results[:3]
                for (saved, found), (rows, right) in zip(results, 2 * expected, strict=True):
                    assert torch.equal(saved, rows), (take, limit)
                    assert_same(found, right, (take, limit))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("h", "i"), [(H, I), (2048, 768), (264, 200), (100, 36)])
def test_a_token_depends_on_no_other(h, i, fp8):
    made = case(1024, h, K, weights_of(E, h, i, "cuda"))
    _, expected = both(made, fp8)
    for num_tokens in (1, 2, 7, 64, 300, 1024):
        for _ in range(3):
            some = torch.randperm(1024)[:num_tokens].cuda()
            _, found = both(Case(*(x[some] for x in made[:4]), made.weights), fp8)
            assert_same(found, Gradients(*(x[some] for x in expected)), num_tokens)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9, 130, 2100])
def test_runs_are_the_same(layer, num_tokens, fp8):
    made = case(num_tokens, H, K, layer, "repeated")
    gate_up, expected = both(made, fp8)
    for _ in range(5):
        again, found = both(made, fp8)
        assert torch.equal(again, gate_up)
        assert_same(found, expected)


@pytest.mark.parametrize("fp8", [False, True])
def test_parts_equal_the_whole(layer, monkeypatch, new_driver, fp8):
    made = case(777, H, K, layer, "out of range")
    _, expected = both(made, fp8)
    sizes = Sizes(777, K, E, H, I, False)
    size = max(forward_bytes(sizes), backward_bytes(sizes))
    for parts in (2, 5, 40, 10_000):
        monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", size // parts)
        new_driver.prepared().clear()
        assert_same(both(made, fp8)[1], expected, parts)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("num_tokens", [5, 100, 900])
def test_bad_numbers_stay_with_their_token(layer, bad, num_tokens, fp8):
    made = case(num_tokens, H, K, layer)
    _, clean = both(made, fp8)
    others = torch.arange(num_tokens, device="cuda") != 3
    for name in ("x", "grad", "top_k_weights"):
        changed = getattr(made, name).clone()
        changed[3, 1] = bad
        _, found = both(made._replace(**{name: changed}), fp8)
        assert not found.hidden_states[3].isfinite().any(), name
        if name == "top_k_weights":  # its own gradient does not depend on it
            assert torch.equal(found.top_k_weights, clean.top_k_weights)
        else:
            assert not found.top_k_weights[3].isfinite().any(), name
        assert_same(*(Gradients(*(x[others] for x in y)) for y in (found, clean)), name)


def test_small_gradients_are_no_zeros(layer):
    made = case(60, H, K, layer)
    gate_up, expected = both(made)
    for scale in (2.0**10, 2.0**-10, 2.0**-20):
        found = backward(made._replace(grad=made.grad * scale), gate_up, keeps=False)
        assert_same(found, Gradients(*(x * scale for x in expected)), scale)


# ---- Streams and memory ----


def test_new_addresses_and_other_layers_prepare_nothing(layer, new_driver):
    others: list[Weights] = [weights_of(E, H, I, "cuda") for _ in range(2)]
    for weights in (layer, *others):
        assert_right(case(70, H, K, weights))
        prepared = new_driver.prepared()
        if weights is layer:
            num_prepared = len(prepared)
    assert len(prepared) == num_prepared


def test_streams_run_side_by_side(layer):
    made = [case(num_tokens, H, K, layer) for num_tokens in (3, 64, 65, 700, 2100)]
    expected = [both(x)[1] for x in made]
    streams = [torch.cuda.Stream() for _ in made]
    torch.cuda.synchronize()
    results: list[list[Gradients]] = [[] for _ in made]
    for _ in range(20):
        for arguments, stream, of_stream in zip(made, streams, results, strict=True):
            with torch.cuda.stream(stream):
                of_stream.append(backward(arguments, saving(arguments)[1], keeps=False))
    torch.cuda.synchronize()
    for of_stream, right in zip(results, expected, strict=True):
        for found in of_stream:
            assert_same(found, right)


def test_calls_in_a_row_do_not_meet(layer):
    """Calls share a workspace, and what they read is written right before, and over behind."""
    made = [case(n, H, K, layer) for n in (1, 300, 2, 64, 2100, 1000, 5, 300)]
    saved = [saving(x)[1] for x in made]
    expected = [backward(*x, keeps=False) for x in zip(made, saved, strict=True)]
    for _ in range(10):
        results = []
        with no_synchronisation():
            for arguments, gate_up in zip(made, saved, strict=True):
                late = Case(*(x + 0 for x in arguments[:4]), layer)
                rows = torch.empty_like(gate_up).copy_(gate_up)
                results.append(backward(late, rows, keeps=False))
                for x in (*late[:4], rows):
                    x.zero_()
        for found, right in zip(results, expected, strict=True):
            assert_same(found, right)


def test_memory_is_given_back(layer):
    made = case(500, H, K, layer)
    gate_up, _ = both(made)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for num_tokens in (500, 20, 1):
        both(Case(*(x[:num_tokens] for x in made[:4]), layer))
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    found = backward(made, gate_up, keeps=False)
    size = backward_bytes(Sizes(500, K, E, H, I, False))
    size += sum(x.numel() for x in (layer.gate_up_proj, layer.down_proj))  # transposed
    results = sum(x.nbytes for x in found)
    assert torch.cuda.max_memory_allocated() - before <= size + results + (4 << 20)


def test_gradients_are_not_all_alike(layer):
    """The tests above would pass if all were zeros."""
    _, found = both(case(60, H, K, layer))
    with pytest.raises(AssertionError):
        assert_matches_reference(found.hidden_states, torch.zeros_like(found.hidden_states))
    assert len(found.top_k_weights.unique()) > 200
