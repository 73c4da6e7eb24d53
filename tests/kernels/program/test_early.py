"""What a kernel reads before it waits is told: the step before may not write it."""

import pytest
import torch

from moefp8.kernels.common.blocks import E4M3
from moefp8.kernels.program import Codes, Record, check_early
from moefp8.routing.combine import describe_combine
from moefp8.routing.logits_launch import Sums
from moefp8.routing.top_k_launch import Choice, describe_top_k
from tests.kernels.program.test_place import copy, record
from tests.records import TARGET

# Each writes a record: a step that writes one of the buffers, then the kernel.


def gemm(r: Record, written: str) -> None:
    rows, product = r.codes("rows", (1, 8, 256)), r.matrices("product", (1, 8, 128), torch.bfloat16)
    weights = Codes(
        r.matrices("weights", (1, 128, 256), E4M3),
        r.matrices("weights_scales", (1, 1, 2), torch.float32),
    )
    bias = r.matrices("bias", (1, 1, 128), torch.float32).first().first()
    copy(r, "x", written)
    TARGET.gemms.dense(r, rows.first(), weights.first(), product.first(), bias=bias)


def combine(r: Record, written: str) -> None:
    rows = r.matrices("rows", (1, 8, 64), torch.bfloat16)
    scores = r.matrices("scores", (1, 4, 2), torch.float32, 2).first()
    addend, total = (
        r.matrices(name, (1, 4, 64), torch.bfloat16).first() for name in ("addend", "total")
    )
    token_to_row = r.buffer("token_to_row", 4 * 2 * 4)
    copy(r, "x", written)
    describe_combine(r, rows, token_to_row, scores, total, addend, programmatic=True)


def router(r: Record, written: str) -> None:
    sums, bias = Sums(r.buffer("sums", 4 * 8 * 4), (4, 8), 1, 1), r.buffer("bias", 8 * 4)
    index, scores = r.buffer("index", 4 * 2 * 8), r.buffer("scores", 4 * 2 * 4)
    copy(r, "x", written)
    describe_top_k(r, "sigmoid_group_topk", sums, bias, Choice(2, 1, 1, True, 1.0), index, scores)


@pytest.mark.parametrize(
    ("describe", "written"),
    [
        *((gemm, name) for name in ("weights", "weights_scales", "bias")),
        *((combine, name) for name in ("token_to_row", "scores", "addend")),
        (router, "bias"),
    ],
)
def test_the_step_before_may_not_write_what_is_read_early(describe, written):
    r = record()
    describe(r, written)
    with pytest.raises(ValueError, match=f"got {written} as early"):
        check_early(r)


@pytest.mark.parametrize(
    ("describe", "written"),
    [(gemm, "rows"), (gemm, "rows_scales"), (combine, "rows"), (router, "sums")],
)
def test_the_step_before_may_write_what_is_read_late(describe, written):
    r = record()
    describe(r, written)
    check_early(r)
