"""Which rows the op `combine` gives its kernel on a Hopper GPU, without a GPU."""

import pytest
import torch

from moefp8.routing import combine
from tests.routing.cases import expected_combine, ids_of, plan_of

ROWS = torch.randn(12, 24).bfloat16()  # of 6 tokens with two choices each


@pytest.mark.parametrize(
    ("y", "is_launched"),
    [
        (ROWS, True),
        (ROWS[:, 8:], True),
        (ROWS[:, :12], False),  # the kernel reads whole units of 16 bytes, also of the last row
        (ROWS[:, 1:17], False),
        (ROWS[:1].expand(12, 24), False),
        (ROWS[:, ::3], False),
        (ROWS.half(), False),
    ],
    ids=["whole", "aligned", "amid a unit", "unaligned", "one row", "columns apart", "fp16"],
)
def test_rows_that_the_kernel_cannot_read_are_combined_by_pytorch(gpu, y, is_launched):
    plan, weights = plan_of(ids_of("distinct", 6, 2, 4), 4, None), torch.rand(6, 2)
    ours = combine(y, plan, weights)
    assert torch.equal(ours, expected_combine(y, y.shape[1], plan, weights))
    assert [x.kernel.source.stem for x in gpu.launched] == ["combine"] * is_launched
