"""Plan, dispatch and combine on a GPU: bit for bit, and nothing else is written."""

from itertools import product

import pytest
import torch

from moefp8.kernels import E4M3, jit
from moefp8.quant import quantize_1x128
from moefp8.routing import build_plan, dispatch
from moefp8.routing.plan import build_maps
from tests.gpu import NEEDS_GPU, no_synchronisation, slow
from tests.routing.cases import (
    CODE_PLACES,
    DTYPES,
    KINDS,
    RANKS,
    SCALE_PLACES,
    check_dispatch,
    codes_of,
    expected_combine,
    ids_of,
    ids_of_whole,
    placed_addend,
    plan_of,
    run_combine,
    run_dispatch,
)

pytestmark = NEEDS_GPU
build_plan_op = torch.ops.moefp8.build_plan.default
TOKENS = 1, 2, 16, 129, 1000, 5000
EXPERTS_AND_K = (1, 1), (8, 2), (128, 8), (256, 8), (384, 10), (1024, 6), (64, 40)


def as_ids(ids: torch.Tensor, dtype: torch.dtype, strided: bool) -> torch.Tensor:
    ids = ids.clamp(-(2**30), 2**30).to(dtype) if dtype == torch.int32 else ids
    return torch.stack([ids, ids], 2).cuda()[..., 0] if strided else ids.cuda()


@pytest.mark.parametrize(("num_experts", "top_k"), EXPERTS_AND_K)
@pytest.mark.parametrize("num_tokens", [0, *TOKENS])
def test_plan_equals_the_cpu(num_tokens, num_experts, top_k):
    layouts = (1, None), (128, None), (5, None), (1, num_tokens), (1, 5100)
    for kind, (alignment, max_m) in product(KINDS, layouts):
        if max_m is not None and num_experts * max_m > 2**20:
            continue
        ids = ids_of(kind, num_tokens, top_k, num_experts)
        expected = build_maps(ids, num_experts, alignment, max_m)
        on_gpu = as_ids(ids, (torch.int32, torch.int64)[alignment == 1], alignment == 5)
        with no_synchronisation():
            ours = build_plan_op(on_gpu, num_experts, alignment, max_m)
        for mine, theirs in zip(ours, expected, strict=True):
            assert torch.equal(mine.cpu(), theirs), (kind, alignment, max_m)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 129, 5000])
def test_a_rank_takes_the_ids_of_the_whole_model(num_tokens, rank, wide):
    num_experts, first, num_global = rank
    x = torch.randn(num_tokens, 200, device="cuda").bfloat16()
    for kind, max_m in product(KINDS, (None, num_tokens)):
        ids = ids_of_whole(kind, num_tokens, 3, rank, wide)
        expected = build_maps(ids, num_experts, 1, max_m, first)
        ours = build_plan_op(ids.cuda(), num_experts, 1, max_m, first, num_global)
        for mine, theirs in zip(ours, expected, strict=True):
            assert torch.equal(mine.cpu(), theirs), (kind, max_m)
        done = run_dispatch(x, ids.cuda(), num_experts, max_m, first)
        check_dispatch(done, x, ids, num_experts, max_m, first)


def test_the_op_runs_our_kernel():
    with jit.using(jit.Driver()) as driver:
        plan = build_plan(torch.tensor([[2, 0], [2, 2]], device="cuda"), 3)
        assert len(driver.prepared()) == 1
    assert plan.token_to_row.tolist() == [[1, 0], [2, 2]]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), EXPERTS_AND_K)
@pytest.mark.parametrize(
    ("num_tokens", "hidden_size"),
    [(1, 7168), (2, 128), (16, 2048), (129, 200), (1000, 7168), (5000, 2048)],
)
def test_dispatch_equals_its_parts(num_tokens, hidden_size, num_experts, top_k, masked):
    max_m = num_tokens + 3 if masked else None
    if masked and num_experts * max_m * hidden_size > 2**29:
        pytest.skip("too much memory")
    seed = num_tokens + top_k + masked
    x = torch.randn(num_tokens, hidden_size, device="cuda").to(DTYPES[seed % 3])
    ids_dtype = (torch.int32, torch.int64)[seed % 2]
    for kind in KINDS:
        ids = as_ids(ids_of(kind, num_tokens, top_k, num_experts), ids_dtype, seed % 5 == 0)
        done = run_dispatch(x, ids, num_experts, max_m)
        check_dispatch(done, x, ids, num_experts, max_m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [1, 8, 128, 200, 333, 2048, 7168, 16392])
@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("num_tokens", [3, 130])
def test_dispatch_of_any_dtype_and_stride(num_tokens, offset, hidden_size, dtype):
    scale = 2.0 ** torch.randint(-12, 8, (num_tokens, 1), device="cuda")
    x = (torch.randn(num_tokens, hidden_size + 24, device="cuda") * scale).to(dtype)
    x = x[:, offset : offset + hidden_size]
    x[0, 0], x[-1, -1] = torch.inf, torch.nan
    ids = ids_of("repeated", num_tokens, 4, 6).cuda()
    for max_m in (None, num_tokens):
        done = run_dispatch(x, ids, 6, max_m)
        check_dispatch(done, x, ids, 6, max_m)


class DriverOfSomeSms(jit.Driver):
    """The driver of this GPU, as if it had another number of SMs."""

    def __init__(self, num_sms: int) -> None:
        super().__init__()
        self.sms = num_sms

    def num_sms(self, device_index: int) -> int:
        return self.sms


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_experts", [4, 600, 1023, 1024])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1025, 8), (1024, 8), (130, 65), (20000, 2)])
def test_dispatch_of_many_choices(num_tokens, top_k, num_experts, masked):
    """A kernel before counts choices of up to 1023 experts; any number of SMs is right."""
    x = torch.randn(num_tokens, 200, device="cuda").bfloat16()
    max_m = num_tokens if masked else None
    if masked and num_experts * num_tokens > 2**22:
        pytest.skip("too much memory")
    drivers = [DriverOfSomeSms(num_sms) for num_sms in (3, 132)]
    for kind in KINDS:
        ids = ids_of(kind, num_tokens, top_k, num_experts).cuda()
        for driver in drivers:
            with jit.using(driver):
                done = run_dispatch(x, ids, num_experts, max_m)
            assert len(done.launches) == 1 + (num_tokens * top_k > 2**13 and num_experts < 1024)
            check_dispatch(done, x, ids, num_experts, max_m)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), EXPERTS_AND_K)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("hidden_size", [16, 333, *slow(200, 1152)])
def test_codes_and_scales_pass_as_they_are(hidden_size, num_tokens, num_experts, top_k, masked):
    codes, scales = codes_of(num_tokens, hidden_size, "cuda")
    max_m = num_tokens if masked else None
    if masked and num_experts * num_tokens > 2**18:
        pytest.skip("too much memory")
    places = zip(CODE_PLACES.values(), SCALE_PLACES.values(), KINDS, strict=True)
    for place, of_scales, kind in places:
        ids = ids_of(kind, num_tokens, top_k, num_experts).cuda()
        x, scale_inv = place(codes.view(torch.uint8)).view(E4M3), of_scales(scales)
        done = run_dispatch(x, ids, num_experts, max_m, x_scale_inv=scale_inv)
        check_dispatch(done, x, ids, num_experts, max_m, x_scale_inv=scale_inv)


def test_dispatch_equals_the_routing_room():
    x, ids = torch.randn(77, 7168, device="cuda").bfloat16(), ids_of("distinct", 77, 8, 256).cuda()
    done, plan = run_dispatch(x, ids, 256, None), build_plan(ids, 256)
    data, scale_inv = (dispatch(part, plan) for part in quantize_1x128(x))
    assert torch.equal(done.rows[:, :7168], data.view(torch.uint8))
    assert torch.equal(done.row_scales[:, : scale_inv.shape[0]].T, scale_inv)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (128, 8), (384, 10), (64, 40)])
@pytest.mark.parametrize("num_tokens", [1, 16, 300])
@pytest.mark.parametrize("hidden_size", [200, 333, *slow(2048)])
def test_combine_equals_the_cpu(hidden_size, num_tokens, num_experts, top_k, masked):
    max_m = num_tokens if masked else None
    for kind in KINDS:
        plan = plan_of(ids_of(kind, num_tokens, top_k, num_experts), num_experts, max_m)
        y = torch.randn(plan.row_to_token.shape[0], (hidden_size + 15) // 8 * 8).bfloat16()
        y[plan.row_to_token < 0] = torch.nan
        weights = torch.rand(top_k, num_tokens).to(DTYPES[(num_tokens + top_k) % 3]).T
        expected = expected_combine(y, hidden_size, plan, weights)
        ours = run_combine(y.cuda(), hidden_size, plan, weights.cuda())
        assert torch.equal(ours.cpu(), expected), kind


@pytest.mark.parametrize("offsets", [(0, 0), (8, 0), (1, 0), (0, 3), (5, 1)])
@pytest.mark.parametrize("top_k", [1, 8, 10])
@pytest.mark.parametrize("num_tokens", [1, 16, *slow(3000)])
@pytest.mark.parametrize("hidden_size", [1, 200, 333, 2048])
def test_combine_adds_as_an_addition_behind_it(hidden_size, num_tokens, top_k, offsets):
    """offsets: of the addend and of the result, in elements."""
    for kind in KINDS:
        plan = plan_of(ids_of(kind, num_tokens, top_k, 20), 20, None)
        y = torch.randn(plan.row_to_token.shape[0], (hidden_size + 15) // 8 * 8).bfloat16().cuda()
        weights = torch.rand(num_tokens, top_k).to(DTYPES[(num_tokens + top_k) % 3]).cuda()
        addend = placed_addend(num_tokens, hidden_size, offsets[0], "cuda")
        addend[-1, -1] = torch.inf
        ours = run_combine(y, hidden_size, plan, weights, addend=addend, offset=offsets[1])
        alone = run_combine(y, hidden_size, plan, weights)
        assert torch.equal(ours, alone + addend), kind
        expected = expected_combine(y, hidden_size, plan, weights, addend)
        assert torch.equal(ours.cpu(), expected), kind


@pytest.mark.parametrize("num_tokens", [1, 40, 700, 3000])  # the last one's choices are counted
def test_launched_early_it_waits(num_tokens):
    """They run behind kernels that write what dispatch and combine read."""
    ids = ids_of("distinct", num_tokens, 4, 16).cuda()
    plan = plan_of(ids, 16, None)
    weights = torch.rand(num_tokens, 4, device="cuda")
    for _ in range(5):
        source = torch.randn(num_tokens, 2048, device="cuda").bfloat16()
        x = torch.full_like(source, torch.nan)
        x.copy_(source)
        check_dispatch(run_dispatch(x, ids, 16, None), source, ids, 16, None)
        rows = torch.randn(num_tokens * 4, 2048, device="cuda").bfloat16()
        token_to_row = plan.token_to_row.cuda()
        torch.cuda.synchronize()
        y = torch.full_like(rows, torch.nan)
        y.copy_(rows)
        plan_there = type(plan)(**{**vars(plan), "token_to_row": token_to_row})
        ours = run_combine(y, 2048, plan_there, weights, True, source)
        assert torch.equal(ours.cpu(), expected_combine(rows, 2048, plan, weights, source))


@pytest.mark.parametrize("num_tokens", [50, 3000])
def test_a_graph_follows_the_ids(num_tokens):
    x = torch.randn(num_tokens, 512, device="cuda")
    ids = torch.zeros(num_tokens, 3, device="cuda").long()
    run_dispatch(x, ids, 9, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        done = run_dispatch(x, ids, 9, None)
        maps = build_plan_op(ids, 9, 4, None)
    for kind in KINDS:
        ids.copy_(ids_of(kind, num_tokens, 3, 9))
        graph.replay()
        check_dispatch(done, x, ids, 9, None)
        for mine, theirs in zip(maps, build_maps(ids.cpu(), 9, 4, None), strict=True):
            assert torch.equal(mine.cpu(), theirs)
