"""Inputs of `activation_columns.cu`, the memory that it fills, and what that must hold."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from moefp8.functional.activation import empty_gate_up
from moefp8.functional.training.activation_columns import (
    ActivationColumnsGradients,
    ActivationColumnsInputs,
    describe_activation_columns,
)
from moefp8.kernels import BLOCK, num_blocks, round_up, tma_aligned
from moefp8.kernels.common.activation import Activation
from moefp8.kernels.program import Codes, Place, Record, layouts
from moefp8.quant import BlockScaled, dequantize
from moefp8.quant.columns import num_column_blocks
from moefp8.quant.numerics import quantize_1x128
from tests import naive, records
from tests.functional.activation.cases import (
    check_quantized,
    differentiated,
    in_padded_rows,
    sizes_of_terms,
    slack_of,
)
from tests.routing.cases import POISON, poisoned


class Case(NamedTuple):
    """counts: rows of each expert. beside: rows before the first expert and behind the last one.

    kind: "own", each choice has its row; "shared", choices of a token may share one, up to all; or
    "few", there are rows of experts without a choice.
    """

    counts: list[int]
    top_k: int
    size: int
    kind: str = "own"
    beside: int = 0


CASES = {
    "one whole tile": Case([128], 2, 128),
    "blocks begin and end anywhere": Case([0, 129, 33, 0, 1, 160], 3, 200, "own", 5),
    "odd": Case([3, 70], 2, 257, "few", 1),
    "a single element": Case([1, 2], 1, 1),
    "rows that choices share": Case([40, 0, 65], 5, 136, "shared"),
    "more choices than lanes": Case([9, 4], 40, 24, "shared"),
    "more experts than threads": Case([*[0] * 150, 3, *[1] * 20, *[0] * 100, 130], 2, 8),
    "no choice at all": Case([7], 2, 16, "none"),
    "no rows in experts": Case([0, 0], 2, 136, "own", 3),
}


def make(
    case: Case,
    weights_dtype: torch.dtype,
    fp8: bool,
    activation: Activation,
    device: str = "cpu",
    *,
    blocks: bool = False,
) -> ActivationColumnsInputs:
    """ActivationColumnsInputs; rows without a choice, and what lies behind rows, are NaN."""
    num_rows = sum(case.counts) + 2 * case.beside
    offsets = list(accumulate(case.counts, initial=case.beside))
    token_to_row = choices_of(case)
    has_choice = torch.isin(torch.arange(num_rows), token_to_row)
    gate_up = torch.randn(num_rows, 2, case.size)
    gate_up = gate_up * torch.exp2(torch.randint(-2, 4, (num_rows, 1, 1)))
    if activation.limit is not None:
        gate_up[..., ::7] = gate_up[..., ::7].sign() * activation.limit
    grad = torch.randn(num_rows, case.size) * torch.exp2(torch.randint(-30, -20, (num_rows, 1)))
    gate_up, grad = gate_up.bfloat16(), grad.bfloat16()
    grad[~has_choice] = torch.nan
    scales = None
    if fp8:
        saved, scales = quantize_1x128(gate_up.flatten(0, 1))
        saved.view(torch.uint8).view(num_rows, -1)[~has_choice] = POISON
        scales.view(num_rows, -1, scales.shape[1])[~has_choice] = torch.nan
        saved, scales = saved.to(device), tma_aligned(scales.to(device))
    else:
        gate_up[~has_choice] = torch.nan
        saved = in_padded_rows(empty_gate_up(gate_up.to(device), num_rows, case.size), gate_up)
    pitch = round_up(case.size, 8)
    memory = torch.empty(num_rows, pitch, dtype=torch.bfloat16, device=device)
    grad = in_padded_rows(memory[:, : case.size], grad)
    weights = torch.rand(len(token_to_row), 2 * case.top_k) + 0.1
    weights[::3] = 0.0
    return ActivationColumnsInputs(
        grad,
        saved,
        scales,
        torch.tensor(offsets, dtype=torch.int32, device=device),
        token_to_row.to(device),
        weights.to(device, weights_dtype)[:, ::2],
        activation,
        blocks,
    )


def choices_of(case: Case) -> torch.Tensor:
    """int32 [T, k]: rows of experts in any order; what is no row is -1, or too large."""
    num_rows = sum(case.counts) + 2 * case.beside
    rows = torch.randperm(sum(case.counts)) + case.beside
    if case.kind == "few":
        rows = rows[: len(rows) // 2]
    if case.kind == "none":
        rows = rows[:0]
    if case.kind == "shared":  # some tokens have one row alone
        which = torch.randint(0, 3, (len(rows), case.top_k)) * torch.randint(0, 2, (len(rows), 1))
        own = rows[(torch.arange(len(rows))[:, None] + which) % len(rows)]
        taken = torch.zeros(num_rows, dtype=torch.bool)
        for token in own:  # a row is of one token
            token[taken[token]] = -1
            taken[token[token >= 0]] = True
        return own.int()
    nothing = torch.tensor([-1, num_rows, 2**31 - 1, -(2**31)])
    rows = torch.cat([rows, nothing[torch.arange(-len(rows) % case.top_k + case.top_k) % 4]])
    return rows[torch.randperm(len(rows))].view(-1, case.top_k).int()


def run(made: ActivationColumnsInputs) -> ActivationColumnsGradients:
    """Launch the kernels into poisoned memory; they write nothing behind it."""
    grad, saved, scales, offsets, token_to_row, weights, activation, has_blocks = made
    (num_rows, size), device = grad.shape, grad.device
    blocks, padded = num_column_blocks(num_rows, len(offsets) - 1), round_up(size, BLOCK)
    num_scales = num_blocks(size) if has_blocks else size
    pitch, num_choices = round_up(num_rows, 4) + 4, token_to_row.numel()
    sizes = (
        (num_rows * 2 * padded, torch.uint8),
        (2 * num_blocks(size) * pitch, torch.float32),
        (blocks * 2 * size * BLOCK, torch.uint8),
        (blocks * round_up(2 * size, 4), torch.float32),
        (blocks * size * BLOCK, torch.uint8),
        (blocks * round_up(num_scales, 4), torch.float32),
        (num_choices, torch.float32),
        (num_choices, torch.float32),
    )
    sizes = (*sizes, (num_blocks(size) * num_rows, torch.float32))  # partial sums
    buffers = [poisoned((n + 16,), dtype, device) for n, dtype in sizes]
    filled = [buffer[:n] for buffer, (n, _) in zip(buffers, sizes, strict=True)]
    rows, row_scales, *columns, of_weights, is_first, partial_sums = filled
    found = ActivationColumnsGradients(
        rows.view(num_rows, -1),
        row_scales.view(-1, pitch)[:, :num_rows].T,
        columns[0].view(blocks, 2 * size, BLOCK),
        columns[1].view(blocks, -1)[:, : 2 * size],
        columns[2].view(blocks, size, BLOCK),
        columns[3].view(blocks, -1)[:, :num_scales],
        of_weights.view(token_to_row.shape),
        is_first.view(token_to_row.shape),
    )
    inputs = {"grad": grad, "saved": saved, "saved_scales": scales, "weights": weights}
    names = "rows", "gate_up_columns", "activated_columns"
    pairs = {name: found[2 * i : 2 * i + 2] for i, name in enumerate(names)}
    others = {
        "expert_offsets": offsets,
        "token_to_row": token_to_row,
        "grad_weights": of_weights,
        "is_first": is_first,
        "weight_of_row": torch.zeros(num_rows, device=device),
        "partial_sums": partial_sums,
    }

    def describe(r: Record) -> None:
        describe_activation_columns(
            r,
            **layouts(**inputs),
            **{name: Place(name) for name in others},
            **{name: Codes.of(*pair, name) for name, pair in pairs.items()},
            num_experts=len(offsets) - 1,
            activation=activation,
            blocks=has_blocks,
        )

    codes = {name: data for name, (data, _) in pairs.items()}
    codes |= {f"{name}_scales": scale_inv for name, (_, scale_inv) in pairs.items()}
    records.run(describe, **inputs, **codes, **others)
    for buffer, (n, _) in zip(buffers, sizes, strict=True):
        assert (buffer[n:].view(torch.uint8) == POISON).all()
    return found


class Block(NamedTuple):
    index: int
    rows: slice
    count: int


def blocks_of(made: ActivationColumnsInputs) -> Iterator[Block]:
    for expert, (begin, end) in enumerate(pairwise(made.expert_offsets.tolist())):
        for i, first in enumerate(range(begin, end, BLOCK)):
            count = min(end - first, BLOCK)
            yield Block(begin // BLOCK + expert + i, slice(first, first + count), count)


def assert_blocks_change_activated_alone(
    made: ActivationColumnsInputs,
    found: ActivationColumnsGradients,
    without: ActivationColumnsGradients,
) -> None:
    """The scale of 128 features is the largest of theirs, and all but w a has the same bits."""
    for block in blocks_of(made):
        of_blocks, of_features = (
            x.activated_scale_inv[block.index].cpu() for x in (found, without)
        )
        largest = torch.stack([x.amax() for x in of_features.split(BLOCK)])
        assert torch.equal(of_blocks, largest)
    of_activated = {name: getattr(without, name) for name in found._fields if "activated" in name}
    assert_same(made, found._replace(**of_activated), without)


def cpu(found: ActivationColumnsGradients) -> ActivationColumnsGradients:
    bytes_of = (x.view(torch.uint8) if x.itemsize == 1 else x for x in found)
    return ActivationColumnsGradients(*(x.cpu() for x in bytes_of))


class Exact(NamedTuple):
    """What is right, in FP64: [R, 2, I], [R, I], and the sizes of the terms of each."""

    of_gate_up: torch.Tensor
    weighted: torch.Tensor
    products: torch.Tensor
    sizes: torch.Tensor
    weighted_sizes: torch.Tensor
    product_sizes: torch.Tensor


def exact_of(made: ActivationColumnsInputs) -> Exact:
    grad, gate_up = made.grad.cpu().double(), made.gate_up.cpu()
    num_rows, size = grad.shape
    if made.gate_up_scale_inv is not None:
        gate_up = dequantize(BlockScaled(gate_up, made.gate_up_scale_inv.cpu()))
    gate, up = gate_up.view(num_rows, 2, size).double().unbind(1)
    at, of_choices = made.token_to_row.cpu().flatten(), made.top_k_weights.cpu().double().flatten()
    weights = torch.stack([of_choices[at == row].sum() for row in range(num_rows)])
    has_choice = torch.isin(torch.arange(num_rows), at)
    activated, scale = naive.activate(gate, up, made.activation), (weights[:, None] * grad)[:, None]
    inexact = activated.abs() + 1e5 * slack_of(gate, up, made.activation)
    exact = Exact(
        scale * torch.stack(differentiated(gate, up, made.activation), 1),
        weights[:, None] * activated,
        grad * activated,
        (scale * torch.stack(sizes_of_terms(gate, up, made.activation), 1)).abs(),
        weights[:, None] * inexact,
        grad.abs() * inexact,
    )
    return Exact(*(x.detach().index_fill(0, torch.nonzero(~has_choice)[:, 0], 0) for x in exact))


def check(made: ActivationColumnsInputs, found: ActivationColumnsGradients) -> None:
    """What is defined, against FP64."""
    found, exact = cpu(found), exact_of(made)
    size = made.grad.shape[1]
    padded = round_up(size, BLOCK)
    for block in blocks_of(made):
        codes = found.codes[block.rows].view(block.count, 2, padded)
        assert not codes[..., size:].any()
        scales = found.scale_inv[block.rows].unflatten(1, (2, -1)).flatten(0, 1)
        right, sizes = (x[block.rows].flatten(0, 1) for x in (exact.of_gate_up, exact.sizes))
        check_quantized(codes[..., :size].flatten(0, 1), scales, right, sizes)
        for columns, scales, x, sizes, block_columns in (
            (*found[2:4], exact.of_gate_up.flatten(1), exact.sizes.flatten(1), 1),
            (*found[4:6], exact.weighted, exact.weighted_sizes, BLOCK if made.blocks else 1),
        ):
            end = round_up(block.count, 32)
            assert not columns[block.index, :, block.count : end].any()
            codes = columns[block.index, :, : block.count]
            of_block = x[block.rows].T, sizes[block.rows].T
            check_quantized(codes, scales[block.index][:, None], *of_block, block_columns)
    check_choices(made, found, exact)


def check_choices(
    made: ActivationColumnsInputs, found: ActivationColumnsGradients, exact: Exact
) -> None:
    token_to_row, num_rows = made.token_to_row.cpu().long(), len(made.grad)
    has_row = (token_to_row >= 0) & (token_to_row < num_rows)
    told = [
        [float(0 <= row < num_rows and own.index(row) == i) for i, row in enumerate(own)]
        for own in token_to_row.tolist()
    ]
    assert found.is_first.tolist() == told
    assert (found.grad_weights[~has_row] == 0).all()
    rows = token_to_row[has_row]
    error = (found.grad_weights[has_row] - exact.products[rows].sum(-1)).abs()
    assert (error <= 1e-5 * exact.product_sizes[rows].sum(-1)).all()


def assert_untouched(made: ActivationColumnsInputs, found: ActivationColumnsGradients) -> None:
    """Rows of no expert, and column codes behind those that become zeros, hold what they held."""
    found, blocks = cpu(found), list(blocks_of(made))
    is_other = torch.ones(len(made.grad), dtype=torch.bool)
    for block in blocks:
        is_other[block.rows] = False
    untouched = poisoned((1,), torch.float32, "cpu").view(torch.int32)
    assert (found.codes[is_other] == POISON).all()
    assert (found.scale_inv.contiguous().view(torch.int32)[is_other] == untouched).all()
    ends = {block.index: round_up(block.count, 32) for block in blocks}
    for columns in (found.gate_up_columns, found.activated_columns):
        for index, of_block in enumerate(columns):
            assert (of_block[:, ends.get(index, 0) :] == POISON).all()


def assert_same(
    made: ActivationColumnsInputs,
    ours: ActivationColumnsGradients,
    theirs: ActivationColumnsGradients,
) -> None:
    """All bits of what is defined."""
    ours, theirs = cpu(ours), cpu(theirs)
    for block in blocks_of(made):
        for x, y in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(x[block.rows], y[block.rows], rtol=0, atol=0, equal_nan=True)
        for i in range(2, 6):
            x, y = (z[i][block.index] for z in (ours, theirs))
            if i % 2 == 0:
                x, y = (z[:, : round_up(block.count, 32)] for z in (x, y))
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    for x, y in zip(ours[6:], theirs[6:], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
