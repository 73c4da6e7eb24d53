"""The kernels by which ranks write each other's memory, without a GPU: how they are launched."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.distributed.expert_parallel import give_back, push
from moefp8.distributed.expert_parallel.give_back import (
    COMBINE_AND_GIVE_BACK,
    CombineAndGiveBack,
    Order,
    give_back_kernel_of,
    order_of,
)
from moefp8.distributed.expert_parallel.peer_memory import (
    MAX_CHUNKS,
    MAX_RANKS,
    GivenBack,
    PeerMemory,
    Received,
)
from moefp8.distributed.expert_parallel.push import push_codes_kernel_of, push_rows_kernel_of
from moefp8.distributed.expert_parallel.ranks import Member, Sizes
from moefp8.kernels import E4M3, jit, num_blocks
from moefp8.kernels.jit import compile_kernels
from moefp8.kernels.program import Place, Word, layouts
from moefp8.routing.combine import combine_kernel_of
from moefp8.testing import sizes
from tests.distributed.expert_parallel.peers_cases import (
    GIVE_BACK,
    PUSH,
    WORDS,
    HostMemories,
    Recording,
    placed,
)
from tests.fakes.emulator import FakeDriver
from tests.gpu import ARCH
from tests.records import launches_of
from tests.routing.cases import DTYPES

FLAGS = True, False
SUMS = [combine_kernel_of(dtype, flag, 2) for dtype, flag in product(DTYPES, FLAGS)]

# ---- Compiling ----


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kernels", [PUSH, GIVE_BACK, SUMS], ids=["push", "give back", "sums"])
def test_every_variant_compiles_and_spills_nothing(kernels):
    for kernel, cubin in zip(kernels, compile_kernels(kernels, ARCH), strict=True):
        assert cubin.problems() == [], kernel


# ---- Places ----


@given(
    num_slots=sizes(2**20, 1), h=sizes(2**14, 1), top_k=st.integers(1, 64),
    dtype=st.sampled_from([E4M3, *DTYPES]),
)  # fmt: skip
def test_parts_of_an_area_do_not_overlap(num_slots, h, top_k, dtype):
    row_bytes = h * dtype.itemsize
    received = Received.of(num_slots, row_bytes, h, top_k)
    assert row_bytes <= received.row_pitch < row_bytes + 16
    assert num_blocks(h) * 4 <= received.scale_pitch < num_blocks(h) * 4 + 16
    assert (received.row_pitch % 16, received.scale_pitch % 16) == (0, 0)
    check_places(
        received.size,
        (received.rows, num_slots * received.row_pitch),
        (received.scales, num_slots * received.scale_pitch),
        (received.ids, num_slots * top_k * 4),
        (received.scores, num_slots * top_k * 4),
    )
    back = GivenBack.of(2, num_slots, h, top_k)
    check_places(
        back.size,
        (back.rows, 2 * num_slots * h * 2),
        (back.grad_scores, 2 * num_slots * top_k * 4),
        (back.reached, num_slots * 4),
        (back.scores, num_slots * top_k * 4),
    )


def check_places(size: int, *parts: tuple[int, int]) -> None:
    """(where a part begins, its length): whole sectors of memory, one behind the other."""
    end = 0
    for at, length in sorted(parts):
        assert at % 256 == 0
        assert at >= end
        end = at + length
    assert end <= size < end + 256


def test_areas_do_not_overlap():
    made = HostMemories(1, 512, 256).of[0]
    assert made.receiving_at == WORDS
    assert (1 + MAX_CHUNKS) * MAX_RANKS * 8 <= WORDS
    assert made.returning_at == made.receiving_at + 512
    assert len(made.tensor) == made.returning_at + 256


@given(least=st.tuples(sizes(2**24, 1), sizes(2**24, 1)))
def test_areas_only_grow(least):
    first = PeerMemory.sizes(*least, None)
    assert all(x >= y for x, y in zip(first, least, strict=True))
    made = HostMemories(1, 0, 0).of[0]
    made.receiving, made.returning = first
    assert PeerMemory.sizes(1, 1, made) == first
    more = PeerMemory.sizes(first[0] + 1, 1, made)
    assert (more[0] > first[0], more[1]) == (True, first[1])


# ---- Launches ----


@pytest.fixture
def gpu():
    """A GPU of ten SMs that runs nothing."""
    with jit.using(FakeDriver(10, library=Recording())) as driver:
        yield driver


MEMBER = Member(1, 2, 10**9)


def launch_push(
    x: torch.Tensor, top_k: int = 2, min_amax: float | None = None, most: int = 0
) -> None:
    num_tokens, h = x.shape
    of = Sizes(most or max(num_tokens, 1), top_k, 8, h)
    word = 1 if min_amax else x.element_size()
    received = Received.of(2 * of.max_tokens, h * word, h, top_k)
    memory, ids = HostMemories(2, received.size, 0).of[1], torch.zeros(num_tokens, top_k).long()
    scores = torch.zeros(num_tokens, top_k)
    push.push(memory, MEMBER, of, received, 5, x, ids, scores, min_amax)


# H, pitch and offset in elements of 2 bytes -> (codes are vectorized, bytes of a unit of rows)
LAYOUTS = {
    (256, 256, 0): (True, 16),
    (264, 264, 0): (True, 16),
    (8, 8, 0): (True, 16),
    (256, 264, 0): (True, 16),
    (256, 260, 0): (False, 2),  # rows begin anywhere
    (256, 256, 1): (False, 2),  # x does
    (256, 256, 8): (True, 16),
    (204, 208, 0): (False, 2),  # rows end anywhere
    (1, 1, 0): (False, 2),
    (201, 201, 3): (False, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_much_as_all_rows_allow_is_moved_at_once(gpu, layout):
    x = placed(3, layout[0], torch.bfloat16, *layout[1:])
    vectorized, unit = LAYOUTS[layout]
    launch_push(x, min_amax=1e-4)
    launch_push(x)
    expected = push_codes_kernel_of(x.dtype, vectorized=vectorized), push_rows_kernel_of(unit)
    assert [made.kernel for made in gpu.launched] == [*expected]
    assert all(made.programmatic for made in gpu.launched)
    assert gpu.launched[1].arguments.tokens.x_row_bytes == layout[1] * 2


def test_the_pitch_of_a_single_row_does_not_count(gpu):
    launch_push(placed(1, 256, torch.bfloat16, 260, 0), min_amax=1e-4)
    assert gpu.launched[0].kernel == push_codes_kernel_of(torch.bfloat16, vectorized=True)


def test_rows_of_four_bytes_are_moved_as_they_lie(gpu):
    for h, unit in ((4, 16), (6, 2), (8, 16)):
        launch_push(placed(3, h, torch.float32, h, 0))
        assert gpu.launched[-1].kernel == push_rows_kernel_of(unit)
        assert gpu.launched[-1].arguments.tokens.row_bytes == h * 4
        launch_push(placed(3, h, torch.float32, h, 0), min_amax=1e-4)
        kernel = push_codes_kernel_of(torch.float32, vectorized=h == 8)
        assert gpu.launched[-1].kernel == kernel


@pytest.mark.parametrize(
    ("num_tokens", "h", "codes", "rows"),
    [
        (0, 256, 1, 1),
        (1, 1, 1, 1),
        (16, 256, 1, 2),
        (17, 256, 2, 3),
        (16, 1024, 4, 2),  # a piece of a row has 1024 elements, and a warp
        (16, 1032, 5, 4),
        (16, 1025, 5, 18),  # or 128
        (4000, 1024, 80, 80),  # eight of each SM
    ],
)
def test_ctas_are_as_many_as_there_is_work_for(gpu, num_tokens, h, codes, rows):
    x = placed(num_tokens, h, torch.bfloat16, h, 0)
    launch_push(x, min_amax=1e-4, most=5000)
    launch_push(x, most=5000)
    assert [(made.grid, made.block) for made in gpu.launched] == [(codes, 256), (rows, 256)]


def grid_of(order: Order, most: int) -> int:
    """One for each item of pushes, or of sums; of more, half of those that run push first."""
    num_pushes, num_sums = (order.num_chunks * n for n in (order.num_pushes, order.num_sums))
    if num_pushes <= most // 2:
        assert order.num_pushing == max(num_pushes, num_sums)
        return order.num_pushing
    assert order.num_pushing == most // 2
    return min(most, order.num_pushing + num_sums)


@pytest.mark.parametrize(
    ("most", "h", "offset", "unit"),
    [(3, 8, 0, 16), (3, 9, 0, 2), (3, 8, 1, 2), (8, 1032, 0, 16), (4000, 8, 0, 16)],
)
def test_results_go_back_by_items(gpu, most, h, offset, unit):
    of = Sizes(most, 2, 8, h)
    back = GivenBack.of(2, most, h, 2)
    memory, ids = HostMemories(2, 0, back.size).of[1], torch.zeros(2 * most, 2).int()
    y = placed(2 * most, h, torch.bfloat16, h, offset)
    out = torch.empty(most, h, dtype=torch.bfloat16)
    give_back.give_back(memory, MEMBER, of, 5, y, ids, None, out, None)
    (one,) = gpu.launched
    grid = grid_of(one.arguments.order, 30)  # three of each SM
    assert (one.kernel, one.grid, one.block) == (give_back_kernel_of(unit), grid, 288)
    assert (one.arguments.num_tokens, one.arguments.max_tokens) == (most, most)


@pytest.mark.parametrize(("most", "h"), [(3, 8), (64, 256), (4000, 256)])
def test_sums_go_back_by_units_of_eight_columns(gpu, most, h):
    combine = CombineAndGiveBack(MEMBER, Sizes(most, 3, 8, h), 2, 8192, 80)
    tensors = {
        "y": torch.zeros(1, h + 8, dtype=torch.bfloat16)[:, :h],
        "weights": torch.zeros(2 * most, 3),
        "out": torch.zeros(2, h, dtype=torch.bfloat16),
    }
    (launch,) = launches_of(
        lambda r: combine.describe(
            r,
            token_to_row=Place("token_to_row"),
            **layouts(**tensors),
            grad_weights=None,
            word=Word("turn"),
        ),
        ("y", "token_to_row", "weights", "out", "turn"),
    )
    launch.on(-1, (16, 32, 48, 64, 2**40 + 5))
    (made,) = gpu.launched
    x = made.arguments
    grid = grid_of(x.order, 30)  # three of each SM
    assert (made.kernel, made.grid, made.block) == (COMBINE_AND_GIVE_BACK, grid, 288)
    assert (x.rows.y, x.rows.token_to_row, x.rows.weights) == (16, 32, 48)
    assert (x.sums.y, x.ranks.state, x.turn) == (64, 80, 2**40 + 5)
    assert x.sums.scores == 8192 + GivenBack.of(2, most, h, 3).scores
    assert (x.rows.y_row_bytes, x.num_units) == (2 * h + 16, h // 8)
    assert x.num_pieces.value == -(-h // 256)
    assert (x.num_tokens, x.max_tokens, x.top_k) == (2, most, 3)


@given(
    num_ranks=st.integers(1, 16),
    most=sizes(2**20, 1),
    units=st.integers(1, 4000),
    ctas=st.integers(1, 400),
)
def test_chunks_hold_all_tokens_on_every_rank(num_ranks, most, units, ctas):
    """Whatever moves a rank's rows, chunks are the same; and every piece is in one item."""
    orders = []
    for columns in (8, 1):
        member, of = Member(0, num_ranks, 1), Sizes(most, 1, 8, units * 8)
        of_row = -(-units * 8 // columns // 32)
        orders.append(order_of(member, of, of_row, ctas * columns))
        order = orders[-1]
        assert 1 <= order.num_chunks <= MAX_CHUNKS
        assert (order.num_chunks - 1) * order.num_tokens < most
        assert most <= order.num_chunks * order.num_tokens
        for items, rows in ((order.num_pushes, num_ranks - 1), (order.num_sums, 1)):
            num_pieces = order.num_tokens * rows * of_row
            assert items == -(-num_pieces // (8 * order.pieces_of_warp))
    chunks = {(order.num_chunks, order.num_tokens) for order in orders}
    assert len(chunks) == 1


def test_what_stands_for_combine_is_part_of_a_key():
    """A launch is kept by it."""
    one = CombineAndGiveBack(Member(0, 2, 10), Sizes(3, 2, 8, 16), 3, 512, 80)
    same = CombineAndGiveBack(Member(0, 2, 10), Sizes(3, 2, 8, 16), 3, 512, 80)
    assert one == same
    assert hash(one) == hash(same)
    for other in (
        one._replace(member=Member(1, 2, 10)),
        one._replace(sizes=Sizes(4, 2, 8, 16)),
        one._replace(num_tokens=2),
        one._replace(returning_at=1024),
        one._replace(state=96),
    ):
        assert other != one
