"""The GEMM that sums over tokens on a GPU, beyond what `test_k_grouped.py` says on both devices."""

import pytest
import torch

from moefp8 import kernels
from moefp8.kernels.gemm.k_grouped import KGroupedInputs, k_grouped_gemm
from moefp8.quant.columns import quantize_128x1
from tests import naive
from tests.gpu import NEEDS_GPU, no_synchronisation, same_bits, slow
from tests.kernels.gemm.cases import GROUPED_PLACES
from tests.kernels.gemm.k_grouped.cases import (
    NAN,
    OUTPUTS,
    SCALE_PLACES,
    assert_right,
    expected_of,
    inputs_of,
    only_d_is_written,
    placed,
    run_and_compare,
    sides,
)
from tests.quant.columns_cases import offsets_of

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("error:.*portable PyTorch body")]
COUNTS = [300, 0, 17, 2000, 128, 1, 640, 33]


def made(
    counts, m: int, n: int, output: str = "bf16", *, blocks_b: bool = False, exact: bool = False
) -> KGroupedInputs:
    return inputs_of(sides(counts, m, n, "cuda", blocks_b=blocks_b, exact=exact), output)


# ---- Right ----


@pytest.mark.parametrize("blocks_b", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    ("counts", "m", "n"),
    [
        ([8192], 4096, 7168),
        ([1024, 0, 3000, 77, 1500], 4096, 7168),
        ([1024, 0, 3000, 77, 1500], 7168, 2048),
        ([500, 524, 0, 1, 1000, *[512] * 20], 1536, 2048),
        ([4096], 520, 1000),
        ([2000, 96], 2113, 1111),
    ],
)
def test_large_shapes_are_right(counts, m, n, output, blocks_b):
    case = made(counts, m, n, output, blocks_b=blocks_b)
    expected = expected_of(case)
    with no_synchronisation():
        k_grouped_gemm(*case)
    assert_right(case, expected)


@pytest.mark.parametrize("blocks_b", [False, *slow(True)])
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_number_of_tokens_is_right(output, blocks_b):
    """An expert for each, many of them and few; what lies behind its zeros is NaN."""
    for counts, m, n in ((range(270), 70, 136), ([*range(255, 0, -13)], 300, 520)):
        run_and_compare(made([*counts], m, n, output, blocks_b=blocks_b, exact=True))


@pytest.mark.parametrize("blocks_b", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("n", [1, 2, 7, 8, 100, 127, 128, 129, 255, 256, 257, 300])
def test_every_edge_is_right(n, output, blocks_b):
    for m in (1, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 600):
        run_and_compare(made([40, 0, 200], m, n, output, blocks_b=blocks_b, exact=True))


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("place", GROUPED_PLACES)
@pytest.mark.parametrize("n", [264, 28, 30, 333])
def test_d_may_lie_anywhere(output, place, n):
    for counts in ([20, 0, 130], [200]):
        run_and_compare(placed(made(counts, 300, n, output, exact=True), d=place))


@pytest.mark.parametrize("place", GROUPED_PLACES)
@pytest.mark.parametrize("scale_place", SCALE_PLACES)
def test_operands_may_lie_anywhere(place, scale_place):
    for blocks_b in (False, True):
        case = made([20, 0, 130], 300, 264, exact=True, blocks_b=blocks_b)
        scales = dict.fromkeys(("a_scale_inv", "b_scale_inv"), scale_place)
        run_and_compare(placed(case, a=place, b=place, **scales))


def test_offsets_may_have_gaps():
    case = made(COUNTS, 300, 264, exact=True)
    run_and_compare(case._replace(expert_offsets=case.expert_offsets.repeat_interleave(3)[::3]))


@pytest.mark.parametrize("num_experts", [1, 2, 31, 32, 33, 100, 257, 1000])
def test_any_number_of_experts(num_experts):
    counts = torch.randint(0, 90, (num_experts,)).tolist()
    for blocks_b in (False, True):
        run_and_compare(made(counts, 264, 136, blocks_b=blocks_b, exact=True))


@pytest.mark.parametrize("octaves", [20, 60])
def test_scales_far_apart_are_right(octaves):
    """Blocks of tokens, and features, lie far apart in size."""
    case = made(COUNTS, 200, 264, "fp32")
    for scale_inv in (case.a_scale_inv, case.b_scale_inv):
        scale_inv.mul_(torch.exp2((torch.rand_like(scale_inv) - 0.5) * octaves))
    expected = expected_of(case)
    size = expected_of(magnitudes(case))
    k_grouped_gemm(*case)
    assert bool(((case.d - expected).abs() <= 2.0**-10 * size).all())


def magnitudes(case: KGroupedInputs) -> KGroupedInputs:
    a, b = ((x.view(torch.uint8) & 0x7F).view(x.dtype) for x in (case.a, case.b))
    return case._replace(a=a, b=b)


@pytest.mark.parametrize("output", ["bf16", "fp32"])
def test_more_than_2_to_31_elements_of_d(output):
    counts, m, n = [3, 0, *[1] * 126, 70, 5], 4096, 4360
    assert len(counts) * m * n > 2**31
    case = made(counts, m, n, output, exact=True)
    k_grouped_gemm(*case)
    for expert in (0, 1, 2, 127, 128, 129):
        if counts[expert] == 0:
            assert not bool(case.d[expert].any())
            continue
        begin = sum(counts[:expert])
        block, count = begin // 128 + expert, counts[expert]
        x, y = (naive.decode(z[block, :, :count]) for z in (case.a, case.b))
        scales = case.a_scale_inv[block, :, None] * case.b_scale_inv[block]
        assert torch.equal(case.d[expert], (x @ y.T * scales).to(case.d.dtype))


def test_more_than_2_to_31_codes():
    num_tokens, m = 2**18 + 5, 8200
    num_blocks = -(-num_tokens // 128)
    assert num_blocks * m * 128 > 2**31
    a = torch.zeros(num_blocks, m, 128, dtype=torch.uint8, device="cuda")
    b = torch.zeros(num_blocks, 8, 128, dtype=torch.uint8, device="cuda")
    a.fill_(0x38)[-1, :, 5:] = 0
    b.fill_(0x38)[-1, :, 5:] = 0
    scales = torch.ones(num_blocks, m, device="cuda"), torch.ones(num_blocks, 8, device="cuda")
    scales[0][-1] = 3.0
    d = torch.full((m, 8), NAN, device="cuda")
    a, b = (x.view(kernels.E4M3) for x in (a, b))
    k_grouped_gemm(a, scales[0], b, scales[1], d, None, num_tokens, False)
    assert bool((d == 2**18 + 15).all())


# ---- The same bits ----


@pytest.mark.parametrize("blocks_b", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
def test_bits_depend_on_no_call_and_on_no_number_of_sms(output, blocks_b):
    case = made(COUNTS, 900, 1000, output, blocks_b=blocks_b)
    before, first = case.d.clone(), None
    try:
        for limit in (None, None, 1, 2, 3, 7, 50, 131, None, None):
            kernels.set_num_sms(limit)
            case.d.copy_(before)
            k_grouped_gemm(*case)
            first = case.d.clone() if first is None else first
            assert torch.equal(case.d, first), limit
    finally:
        kernels.set_num_sms(None)


@pytest.mark.parametrize("output", OUTPUTS)
def test_bits_depend_on_no_place_of_d(output):
    """Through shared memory by TMA, or from registers."""
    case = made(COUNTS, 300, 264, output)
    before, found = case.d.clone(), []
    for place in ("aligned columns", "odd address", "odd columns", "odd pitch"):
        moved = placed(case, d=place)
        moved.d.copy_(before)
        k_grouped_gemm(*moved)
        found.append(moved.d)
    assert all(torch.equal(d, found[0]) for d in found)


@pytest.mark.parametrize("blocks_b", [False, True])
def test_an_expert_has_the_bits_of_its_own_among_any_others(blocks_b):
    content = sides(COUNTS, 700, 520, "cuda", blocks_b=blocks_b, exact=False)
    together = inputs_of(content, "bf16")
    k_grouped_gemm(*together)
    order = torch.randperm(len(COUNTS)).tolist()
    shuffled = inputs_of(type(content)(*([x[e] for e in order] for x in content)), "bf16")
    k_grouped_gemm(*shuffled)
    for place, expert in enumerate(order):
        assert torch.equal(shuffled.d[place], together.d[expert])


# ---- What surrounds a call ----


def test_any_offsets_keep_within_d():
    """What is written then means nothing; nothing hangs, and nothing else is written."""
    generator = torch.Generator().manual_seed(0)
    for output in OUTPUTS:
        for blocks_b in (False, True):
            for place in ("aligned columns", "odd columns"):
                case = placed(made(COUNTS, 300, 264, output, blocks_b=blocks_b), d=place)
                case.a.view(torch.uint8).fill_(0x38)
                case.b.view(torch.uint8).fill_(0x38)
                extremes = torch.tensor([[2**31 - 1, -(2**31)], [-(2**31), 2**31 - 1]])
                for i in range(10):
                    shape = (len(COUNTS) + 1,)
                    wild = torch.randint(
                        -(2**31), 2**31, shape, dtype=torch.int64, generator=generator
                    )
                    near = torch.randint(-300, 5000, shape, generator=generator)
                    is_wild = torch.rand(shape, generator=generator) < 0.4
                    if i < 2:
                        wild, is_wild = extremes[i].repeat(shape[0])[: shape[0]], torch.tensor(True)
                    case.expert_offsets.copy_(torch.where(is_wild, wild, near))
                    with only_d_is_written(case.d):
                        k_grouped_gemm(*case)
                        torch.cuda.synchronize()


@pytest.mark.parametrize("blocks_b", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("n", [264, 333])
def test_one_graph_serves_all_offsets(output, blocks_b, n):
    shares = [[500, 0, 12, 512], [0, 0, 1024, 0], [1, 1021, 1, 1], [256] * 4, [127, 129, 385, 383]]
    memory = made(shares[0], 300, n, output, blocks_b=blocks_b, exact=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k_grouped_gemm(*memory)
    for counts in (*shares, *shares[::-1]):
        case = made(counts, 300, n, output, blocks_b=blocks_b, exact=True)
        for x, y in zip(memory[:6], case[:6], strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(memory.d, expected_of(case).to(memory.d.dtype))


def test_operands_may_be_written_by_the_kernel_before():
    """Offsets, codes and scales are read only when it has ended."""
    shares = [[500, 0, 12, 512], [0, 0, 1024, 0], [256] * 4]
    memory = made(shares[0], 300, 264, exact=True)
    for counts in shares * 3:
        case = made(counts, 300, 264, exact=True)
        expected = expected_of(case).to(memory.d.dtype)
        for x in memory[:6]:
            x.view(torch.uint8).zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000)
        for x, y in zip(memory[:6], case[:6], strict=True):
            x.copy_(y)
        k_grouped_gemm(*memory)
        assert torch.equal(memory.d, expected)


def test_sums_follow_each_other_at_once():
    """Each launch may start while the one before ends, and adds to what that one has written."""
    case = made(COUNTS, 300, 264, "fp32 +=", exact=True)
    once = expected_of(case) - case.d
    expected = case.d + 20 * once
    with no_synchronisation():
        for _ in range(20):
            k_grouped_gemm(*case)
    assert torch.equal(case.d.double(), expected)


def test_codes_are_made_and_multiplied_in_turn():
    counts = [300, 0, 17, 195]
    offsets = offsets_of(counts).cuda()
    xs = [torch.randn(512, 520, device="cuda").bfloat16() for _ in range(4)]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = (quantize_128x1(z, offsets, None, False, 2.0**-60) for z in (x, y))
        d = torch.empty(len(counts), 520, 520, dtype=torch.bfloat16, device="cuda")
        k_grouped_gemm(*a, *b, d, offsets, 512, False)
        return d

    pairs = [(x, y) for x in xs for y in xs]
    expected = []
    for x, y in pairs:
        expected.append(step(x, y))
        torch.cuda.synchronize()
    for _ in range(5):
        with no_synchronisation():
            found = [step(x, y) for x, y in pairs]
        assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))


def test_the_current_stream_is_taken():
    case, stream = made(COUNTS, 300, 264, exact=True), torch.cuda.Stream()
    expected, codes = expected_of(case).to(case.d.dtype), case.a.clone()
    case.a.view(torch.uint8).zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        case.a.copy_(codes)
        k_grouped_gemm(*case)
    stream.synchronize()
    assert torch.equal(case.d, expected)


def test_calls_on_two_streams():
    cases = [made(COUNTS, 300, 264, exact=True), made(COUNTS[::-1], 300, 264, exact=True)]
    expected = [expected_of(case).to(case.d.dtype) for case in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(30):
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                case.d.fill_(NAN)
                k_grouped_gemm(*case)
    torch.cuda.synchronize()
    for case, right in zip(cases, expected, strict=True):
        assert torch.equal(case.d, right)
