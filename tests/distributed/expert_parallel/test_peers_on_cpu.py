"""What the kernels by which ranks write each other's memory do, byte by byte, without a GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.distributed.expert_parallel import give_back, push
from moefp8.kernels import jit
from tests import naive
from tests.distributed.expert_parallel.host_ranks import BF16, SIGNATURE, Case, Host
from tests.distributed.expert_parallel.peers_cases import GIVE_BACK, PUSH, build, placed
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.routing.cases import DTYPES

pytestmark = pytest.mark.usefixtures("gpu", "_small_chunks")


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    return build([*PUSH, *GIVE_BACK], tmp_path_factory)


@pytest.fixture(scope="module")
def gpu(functions):
    """A GPU of five SMs that runs the kernels' text."""
    with jit.using(FakeDriver(5, library=cuda_on_cpu.OnCpu(functions))) as driver:
        yield driver


@pytest.fixture
def _small_chunks(monkeypatch):
    """Few tokens are several chunks: a byte takes long here."""
    monkeypatch.setattr(give_back, "_CHUNK_BYTES", 1 << 17)


# ---- Inputs ----


def ids_of(case: Case) -> list[torch.Tensor]:
    """Of anybody and of nobody, among them what int32 or int64 can just hold."""
    limits, found = torch.iinfo(case.ids), []
    nobody = [-1, case.num_experts, case.num_experts + 1, limits.min, limits.max]
    nobody += [2**32, 2**32 + 1, -(2**32)] if case.ids == torch.int64 else []
    for num_tokens in case.tokens:
        shape = num_tokens, case.top_k
        ids = torch.randint(0, case.num_experts, shape)
        others = torch.tensor(nobody)[torch.randint(len(nobody), shape)]
        ids = torch.where(torch.rand(shape) < 0.25, others, ids)
        ids[torch.rand(num_tokens) < 0.15] = case.num_experts  # tokens without an expert
        found.append(ids.to(case.ids))
    return found


def tokens_of(case: Case) -> list[torch.Tensor]:
    found = []
    for num_tokens in case.tokens:
        h = case.hidden_size
        x = placed(num_tokens, h, case.dtype, h + case.pitch, case.offset)
        x.copy_(
            torch.randn(num_tokens, h)
            * torch.logspace(-6, 3, max(num_tokens, 1))[:num_tokens, None]
        )
        found.append(x)
    return found


def scores_of(case: Case) -> list[torch.Tensor]:
    return [torch.randn(n, case.top_k) for n in case.tokens]


def results_of(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows of slots and what goes with their choices, of each rank."""
    num_slots = len(case.tokens) * case.sizes.max_tokens
    y = [torch.randn(num_slots, case.hidden_size).to(BF16) for _ in case.tokens]
    return y, [torch.randn(num_slots, case.top_k) for _ in case.tokens]


CASES = {
    "one rank": Case((5,), 2, 3, 256),
    "two": Case((7, 4), 2, 8, 264),
    "more tokens than CTAs take at once": Case((150, 90), 3, 8, 264),
    "as many ranks as can": Case((2, 1, 0, 1) * 4, 3, 37, 24),
    "uneven experts": Case((6, 3, 5), 3, 7, 136),
    "as many experts as ranks": Case((3, 2, 4, 1), 2, 4, 8),
    "nobody has a token but one": Case((0, 0, 4), 2, 5, 200),
    "one token": Case((1, 0), 1, 2, 1),
    "very odd": Case((4, 9, 2), 3, 10, 201),
    "long rows": Case((3, 2), 2, 5, 2184),
    "long odd rows": Case((3, 2), 2, 5, 333, torch.float16),
    "many choices": Case((30, 20, 4, 12), 40, 130, 520),
    "FP32, int32": Case((5, 6), 2, 9, 132, torch.float32, torch.int32),
    "FP16, int32": Case((5, 6, 1), 4, 11, 144, torch.float16, torch.int32),
    "wide rows": Case((5, 6), 2, 6, 136, pitch=8),
    "several chunks": Case((70, 52), 2, 5, 2048),
    "a unit behind whole pieces": Case((30, 20, 17), 3, 7, 2056),
    "rows that begin anywhere": Case((5, 6), 2, 6, 136, pitch=3, offset=1),
}
by_case = pytest.mark.parametrize("name", CASES)


@by_case
@pytest.mark.parametrize("min_amax", [None, 1e-4, 2.0**-60])
@pytest.mark.parametrize("has_scores", [True, False])
def test_tokens_go_where_their_experts_are(name, min_amax, has_scores):
    case = CASES[name]
    x, ids, scores = tokens_of(case), ids_of(case), scores_of(case)
    host = Host(case, case.hidden_size * (1 if min_amax else case.dtype.itemsize))
    host.push(x, ids, scores if has_scores else None, min_amax)


@by_case
@pytest.mark.parametrize("has_scores", [True, False])
def test_rows_go_back_to_where_tokens_came_from(name, has_scores):
    case = CASES[name]
    x, ids, scores = tokens_of(case), ids_of(case), scores_of(case)
    host = Host(case, case.hidden_size)
    host.push(x, ids, scores, 1e-4)
    y, of_choices = results_of(case)
    host.give_back(y, of_choices if has_scores else None)


@pytest.mark.slow
@pytest.mark.parametrize("has_scores", [True, False])
@pytest.mark.parametrize("name", [x for x, case in CASES.items() if case.hidden_size % 8 == 0])
def test_sums_go_back_to_where_tokens_came_from(name, has_scores):
    case = CASES[name]
    x, ids, scores = tokens_of(case), ids_of(case), scores_of(case)
    host = Host(case, case.hidden_size)
    host.push(x, ids, scores, 1e-4)
    num_slots, num_rows = len(case.tokens) * case.sizes.max_tokens, 9
    y = [torch.randn(num_rows, case.hidden_size + 8).to(BF16) for _ in case.tokens]
    shape = num_slots, case.top_k
    maps = []
    for rank in range(len(case.tokens)):
        begin, end = (r * case.num_experts // len(case.tokens) for r in (rank, rank + 1))
        own, row = host.slot_ids(rank), torch.randint(0, num_rows, shape)
        maps.append(torch.where((own >= begin) & (own < end), row, -1).int())
    weights = [torch.randn(shape) for _ in case.tokens]
    of_choices = results_of(case)[1] if has_scores else None
    host.combine_and_give_back(y, maps, weights, of_choices)


def test_exchanges_follow_one_another():
    """As forward and backward of frozen experts do; then one that no results answer, and again."""
    case = CASES["uneven experts"]
    host = Host(case, case.hidden_size)
    for _ in range(3):
        x, ids, scores = tokens_of(case), ids_of(case), scores_of(case)
        y, of_choices = results_of(case)
        host.push(x, ids, scores, 1e-4)
        host.give_back(y, None)
        host.push(x, ids, None, 2.0**-60)
        host.give_back(y, of_choices)
        host.push(x, ids, scores, 1e-4)
        host.push(x, ids, None, 1e-4)


def test_codes_of_what_is_no_number():
    case = Case((6, 6), 2, 4, 264)
    x = tokens_of(case)
    for rank, value in enumerate((torch.inf, torch.nan)):
        x[rank][1::2, 7] = value
    x[0][2] = 0
    ids = [torch.randint(0, 4, (6, 2)) for _ in x]
    host = Host(case, 264)
    codes, scales = naive.quantize(x[0], 1, False)
    assert scales.isinf().any()
    assert (codes[1] == 127).any()
    host.push(x, ids, scores_of(case), 1e-4)


@given(data=st.data())
def test_any_case(data):
    num_ranks = data.draw(st.integers(1, 5))
    counts = st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks)
    case = Case(
        tuple(data.draw(counts.filter(any))),
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(num_ranks, 40)),
        data.draw(st.integers(1, 300)),
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from([torch.int32, torch.int64])),
        data.draw(st.integers(0, 9)),
        data.draw(st.integers(0, 9)),
    )
    torch.manual_seed(data.draw(st.integers(0, 99)))
    min_amax = data.draw(st.sampled_from([None, 1e-4]))
    width = 1 if min_amax else case.dtype.itemsize
    host = Host(case, case.hidden_size * width)
    host.push(tokens_of(case), ids_of(case), scores_of(case), min_amax)
    host.give_back(*results_of(case))


# ---- Ranks that do not come ----


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (0, [1, 1, 0, 0]),  # nothing
        ((1 << 32) + 5, [2, 1, 1, 5]),  # something else
        (7, [1, 1, 0, 7]),  # what it told before
    ],
)
@pytest.mark.parametrize("word", [0, 1, 2], ids=["tokens", "results", "a later chunk"])
def test_what_is_wrong_is_written_down(word, told, error):
    case = CASES["several chunks" if word == 2 else "two"]
    host = Host(case, case.hidden_size)
    if word > 0:
        host.push(tokens_of(case), ids_of(case), scores_of(case), 1e-4)
        host.words(0)[1, 1] = 1 << 32 | SIGNATURE
    host.words(0)[word, 1] = told
    member, memory = host.member(0), host.memory(0)
    if word == 0:
        given = tokens_of(case)[0], ids_of(case)[0], scores_of(case)[0], 1e-4
        push.push(memory, member, case.sizes, host.received, SIGNATURE, *given)
    else:
        y, of_choices = (z[0] for z in results_of(case))
        out = torch.empty(case.tokens[0], case.hidden_size, dtype=BF16)
        sums = out, torch.empty(case.tokens[0], case.top_k)
        given = y, host.slot_ids(0).clone(), of_choices, *sums
        give_back.give_back(memory, member, case.sizes, SIGNATURE, *given)
    assert memory.error.tolist() == error
    assert host.words(1)[word, 0].item() == 1 << 32 | SIGNATURE
