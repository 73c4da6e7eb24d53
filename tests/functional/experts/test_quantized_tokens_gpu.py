"""Codes of tokens and of gradients on a GPU: bit for bit what the tokens themselves give."""

import pytest
import torch

from moefp8.functional import parts as parts_room
from moefp8.kernels.common.activation import SWIGLU
from moefp8.kernels.gemm.sizes import Sizes
from tests.functional.cases import tokens_of
from tests.functional.experts.backward_cases import Case, case
from tests.functional.experts.quantized_cases import (
    SHAPES,
    Codes,
    Floats,
    Given,
    backward,
    case_of,
    forward,
)
from tests.functional.experts.records import forward_bytes
from tests.functional.gpu_cases import E, H, I, K, poison
from tests.gpu import NEEDS_GPU, no_synchronisation, same_bits, slow
from tests.routing.cases import CODE_PLACES, SCALE_PLACES

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("error:.*portable PyTorch body"),
]
KINDS = "distinct", "repeated", "out of range", "one expert", "nowhere"
NAN, INF = float("nan"), float("inf")


def check(made: Case, codes: Given, masked: bool = False) -> None:
    """Of codes and of floats, in poisoned memory; addends and what a forward saves, too."""
    addend = tokens_of(*made.x.shape, "cuda")
    poison()
    found = [forward(made, x, masked, y) for x in (codes, Floats()) for y in (None, addend)]
    assert same_bits(found[0], found[2])
    assert same_bits(found[1], found[3])
    poison()
    ours, theirs = (backward(made, x) for x in (codes, Floats()))
    assert all(map(same_bits, ours, theirs))


@pytest.mark.parametrize("shape", SHAPES)
def test_small_shapes(shape):
    for kind in KINDS:
        for masked in (False, True):
            check(case_of(SHAPES[shape], kind, "cuda"), Codes(), masked)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "size"),
    [
        (1, 1, 1, 128, 128), (1, 8, 2, 256, 128), (2, 256, 8, 1024, 256), (7, 5, 3, 144, 272),
        (16, 64, 6, 2048, 1408), (33, 4, 4, 512, 100), (64, 128, 8, 2048, 768),
        (65, 3, 2, 100, 200), (130, 6, 9, 129, 257), (300, 12, 12, 1, 1),
        (700, 9, 2, 264, 136), (1025, 32, 8, 384, 640), (4096, 8, 2, 512, 256),
        (37, 384, 40, 160, 144), (3, 1, 5, 7168, 2048), (128, 32, 8, 7168, 2048),
        (4097, 8, 2, 512, 256), (2100, 500, 4, 264, 144), (1500, 1024, 6, 128, 128),
    ],
)  # fmt: skip
def test_any_shape(num_tokens, num_experts, top_k, hidden_size, size, masked):
    for kind in ("distinct", "out of range"):
        shape = num_tokens, top_k, num_experts, hidden_size, size
        check(case_of(shape, kind, "cuda"), Codes(), masked)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 50, 800, 2100])  # the last one's choices are counted
def test_a_rank(layer, num_tokens, masked):
    """Most tokens have no expert here."""
    for first in (0, 7, 400 - E):
        check(case(num_tokens, H, K, layer, "distinct", rank=(first, 400)), Codes(), masked)


@pytest.mark.parametrize("h", [264, *slow(H, 129)])
@pytest.mark.parametrize("num_tokens", [3, 90, 2100])
def test_codes_and_scales_may_lie_anywhere(num_tokens, h):
    made = case_of((num_tokens, 3, 6, h, 160), "distinct", "cuda")
    for place in (*CODE_PLACES.values(), lambda x: x.T.contiguous().T):
        for scale_place in SCALE_PLACES.values():
            found = backward(made, Codes(place, scale_place))
            copied = (lambda x, f=f: f(x).contiguous() for f in (place, scale_place))
            assert all(map(same_bits, found, backward(made, Codes(*copied))))


@pytest.mark.parametrize("masked", [False, True])
def test_parts_equal_the_whole(layer, monkeypatch, new_driver, masked):
    made = case(777, H, K, layer, "out of range")
    expected, gradients = forward(made, Floats(), masked), backward(made, Floats())
    size = forward_bytes(Sizes(777, K, E, H, I, masked))
    for parts in (2, 5, 40):
        monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", size // parts)
        new_driver.prepared().clear()
        for scale_place in SCALE_PLACES.values() if parts == 2 else [SCALE_PLACES["own"]]:
            if scale_place is not SCALE_PLACES["one row"]:
                codes = Codes(scale_place=scale_place)
                assert torch.equal(forward(made, codes, masked), expected)
                y, _, *found = backward(made, codes)  # rows lie part by part
                assert all(map(torch.equal, (y, *found), (gradients[0], *gradients[2:])))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("num_tokens", [5, 100, 900])
def test_bad_scales_stay_with_their_token(layer, bad, num_tokens):
    def spoilt(scales: torch.Tensor) -> torch.Tensor:
        return scales.index_fill(0, torch.tensor([3], device="cuda"), bad)

    made = case(num_tokens, H, K, layer)
    others = torch.arange(num_tokens, device="cuda") != 3
    y, _, dx, of_weights = backward(made, Codes(scale_place=spoilt))
    clean, _, *gradients = backward(made, Codes())
    assert not y[3].isfinite().any()
    assert torch.equal(y[others], clean[others])
    for found, expected in zip((dx, of_weights), gradients, strict=True):
        assert not found[3].isfinite().any()
        assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("num_tokens", [1, 32, 2100])
def test_calls_wait_for_nothing_and_read_what_was_written_last(layer, num_tokens):
    """Codes and scales are written right before a call, and over right behind it."""
    made = [case(num_tokens, H, K, layer) for _ in range(5)]
    expected = [forward(x, Floats()) for x in made]
    pairs = [Codes().of_tokens(x.x) for x in made]
    codes, scales = (torch.empty_like(x) for x in pairs[0])
    rest = [(x.ids, x.top_k_weights, *layer, *SWIGLU, False, 0, None, None) for x in made]
    results = []
    with no_synchronisation():
        for (data, scale_inv), arguments in zip(pairs, rest, strict=True):
            codes.copy_(data)
            scales.copy_(scale_inv)
            results.append(torch.ops.moefp8.experts(codes, *arguments, scales))
            codes.view(torch.uint8).fill_(0x7F)
            scales.fill_(NAN)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("num_tokens", [1, 32, 2100])
def test_a_graph_follows_codes_and_ids(layer, num_tokens):
    made = case(num_tokens, H, K, layer)
    (codes, scales), ids = Codes().of_tokens(made.x), made.ids.clone()
    rest = made.top_k_weights, *layer, *SWIGLU, False, 0, None, None
    torch.ops.moefp8.experts(codes, ids, *rest, scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.moefp8.experts(codes, ids, *rest, scales)
    for kind in ("repeated", "nowhere", "distinct"):
        other = case(num_tokens, H, K, layer, kind)
        data, scale_inv = Codes().of_tokens(other.x)
        for old, new in ((codes, data), (scales, scale_inv), (ids, other.ids)):
            old.copy_(new)
        graph.replay()
        expected = forward(other._replace(top_k_weights=made.top_k_weights), Floats())
        assert torch.equal(y, expected)
