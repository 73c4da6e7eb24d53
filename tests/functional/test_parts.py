"""Tokens of experts are computed in parts that fit into a bound, and tensors are cut into them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.functional import parts as parts_room
from moefp8.functional.experts_records import experts_backward_record, experts_record
from moefp8.functional.parts import parts_of, split
from moefp8.functional.training.experts_records import trained_backward_record
from moefp8.kernels.gemm.sizes import Sizes
from moefp8.kernels.program import place
from moefp8.testing import sizes

DESCRIBED = experts_record, experts_backward_record, trained_backward_record
shapes = st.builds(
    Sizes,
    num_tokens=sizes(3000, 1),
    top_k=st.integers(1, 12),
    num_experts=st.integers(1, 300),
    hidden_size=sizes(8000, 1),
    intermediate_size=sizes(3000, 1),
    masked=st.just(False),
    num_global_experts=st.none(),
)


def bytes_of(describe, shape: Sizes) -> int:
    return place(describe(shape)).num_bytes


@given(shape=shapes, log2_bound=st.integers(12, 34), describe=st.sampled_from(DESCRIBED))
def test_parts_fit_into_the_bound_and_fewer_would_not(shape, log2_bound, describe):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_room, "MAX_WORKSPACE_BYTES", 1 << log2_bound)
        num_parts = parts_of(shape, describe)
    assert 1 <= num_parts <= shape.num_tokens
    one = bytes_of(describe, shape._replace(num_tokens=1))
    bound = max(1 << log2_bound, one + (1 << log2_bound) // 2)

    def fits(parts: int) -> bool:
        return bytes_of(describe, shape._replace(num_tokens=-(-shape.num_tokens // parts))) <= bound

    assert fits(num_parts) or num_parts == shape.num_tokens
    assert num_parts <= 2 or not fits(num_parts // 2)


@given(shape=shapes)
def test_small_calls_are_not_described_to_be_counted(shape):
    """What is taken for more than any record takes is so."""
    for describe in DESCRIBED:
        assert bytes_of(describe, shape) <= parts_room._most_bytes(shape)


@pytest.mark.parametrize("axis", range(5))
def test_without_anything_to_compute_there_is_no_part(axis):
    shape = [7, 2, 3, 128, 256, False]
    shape[axis] = 0
    assert parts_of(Sizes(*shape), experts_record) == 0


@given(num_tokens=st.integers(1, 60), num_parts=st.integers(1, 60), each=st.integers(1, 5))
def test_tensors_are_cut_where_tokens_are(num_tokens, num_parts, each):
    tokens, rows = torch.arange(num_tokens), torch.arange(num_tokens * each)
    cut = list(split(num_parts, num_tokens, tokens, None, rows))
    assert len(cut) <= num_parts
    for some, nothing, of_rows in cut:
        assert len(some) > 0
        assert nothing is None
        assert torch.equal(of_rows.view(-1, each)[:, 0], some * each)
    assert torch.equal(torch.cat([x for x, *_ in cut]), tokens)
    assert torch.equal(torch.cat([x for *_, x in cut]), rows)
