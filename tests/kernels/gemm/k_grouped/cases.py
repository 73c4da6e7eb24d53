"""Cases of the GEMM that sums over tokens: operands by expert, what is right, and where they lie.

M and N features, E experts, B blocks of 128 tokens. What no expert has is NaN, codes and scales,
but for the zeros behind an expert's last token up to the next multiple of 32, which are promised.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from moefp8.kernels import E4M3
from moefp8.kernels.gemm.k_grouped import KGroupedInputs, k_grouped_gemm
from moefp8.testing import assert_matches_reference
from tests import naive
from tests.kernels.gemm.cases import GROUPED_PLACES, Place, stacked, within
from tests.quant.columns_cases import Block, blocks_of, offsets_of

NAN, BLOCK = float("nan"), 128
# Tokens of each expert; an int: there is one expert, and there are no offsets.
COUNTS: dict[str, int | list[int]] = {
    "one expert": 300,
    "one of whole blocks": 256,
    "one of few tokens": 5,
    "around a step and a block": [0, 1, 31, 32, 33, 0, 127, 128, 129, 0],
    "none": [0, 0, 0],
    "one has all": [0, 700, 0],
    "many": [*[0] * 40, 3, *[1] * 20, 130, 260],
}
OUTPUTS = {  # dtype of d, accumulates
    "bf16": (torch.bfloat16, False),
    "fp32": (torch.float32, False),
    "fp32 +=": (torch.float32, True),
}
SCALE_PLACES = {  # of [B, features]
    "wider": Place(partial(stacked, within(4, 4)), True),
    "odd": Place(partial(stacked, within(3, 1)), False),
    "features apart": Place(lambda x: x.T.contiguous().T, False),
    "steps of 2": Place(lambda x: x.repeat_interleave(2, 1)[:, ::2], False),
}


class Content(NamedTuple):
    """What one side has of an expert: e4m3 [features, tokens], fp32 [rows of scales, blocks]."""

    codes: torch.Tensor
    scales: torch.Tensor


def content(num_tokens: int, features: int, scale_rows: int, exact: bool, device: str) -> Content:
    """exact: small whole numbers with powers of two as scales, whose sums are exact in FP32."""
    shape, of_scales = (features, num_tokens), (scale_rows, -(-num_tokens // BLOCK))
    if exact:
        codes = torch.randint(-3, 4, shape, device=device).float()
        return Content(codes.to(E4M3), torch.randint(-2, 3, of_scales, device=device).exp2())
    codes = (100 * torch.randn(shape, device=device)).clamp(-448, 448).to(E4M3)
    return Content(codes, torch.rand(of_scales, device=device))


def laid_out(contents: Sequence[Content], blocks: Sequence[Block], num_blocks: int) -> Content:
    """data [B, features, 128] and scale_inv [B, rows of scales]."""
    (features, _), (scale_rows, _) = contents[0].codes.shape, contents[0].scales.shape
    device = contents[0].codes.device
    data = torch.full((num_blocks, features, BLOCK), 0x7F, dtype=torch.uint8, device=device)
    scale_inv = torch.full((num_blocks, scale_rows), NAN, device=device)
    in_turn = ((x, i) for x in contents for i in range(x.scales.shape[1]))
    for (x, i), (index, _, count) in zip(in_turn, blocks, strict=True):
        data[index, :, : -(-count // 32) * 32] = 0
        data[index, :, :count] = x.codes.view(torch.uint8)[:, i * BLOCK : i * BLOCK + count]
        scale_inv[index] = x.scales[:, i]
    return Content(data.view(E4M3), scale_inv)


class Sides(NamedTuple):
    """What both sides have, expert by expert."""

    a: list[Content]
    b: list[Content]

    @property
    def counts(self) -> list[int]:
        return [x.codes.shape[1] for x in self.a]


def sides(
    counts: Sequence[int],
    m: int,
    n: int,
    device: str = "cpu",
    *,
    blocks_b: bool = False,
    exact: bool = True,
) -> Sides:
    scales_b = -(-n // BLOCK) if blocks_b else n
    return Sides(
        [content(count, m, m, exact, device) for count in counts],
        [content(count, n, scales_b, exact, device) for count in counts],
    )


def inputs_of(made: Sides, output: str, *, offsets: bool = True, before: int = 0) -> KGroupedInputs:
    """before: tokens ahead of those of the first expert; as many lie behind those of the last."""
    counts, (dtype, accumulates) = made.counts, OUTPUTS[output]
    num_rows, device = sum(counts) + 2 * before, made.a[0].codes.device
    expert_offsets = offsets_of(counts, before) if offsets else None
    blocks = list(blocks_of(expert_offsets, num_rows))
    num_blocks = num_rows // BLOCK + len(counts) if offsets else -(-num_rows // BLOCK)
    a, b = (laid_out(x, blocks, num_blocks) for x in made)
    shape = [len(made.a[0].codes), len(made.b[0].codes)]
    d = torch.full([len(counts), *shape] if offsets else shape, NAN, dtype=dtype, device=device)
    if accumulates:
        d.random_(-99, 100)
    there = None if expert_offsets is None else expert_offsets.to(device)
    return KGroupedInputs(*a, *b, d, there, num_rows, accumulates)


def inputs(
    name: str,
    m: int,
    n: int,
    output: str,
    device: str = "cpu",
    *,
    blocks_b: bool = False,
    exact: bool = True,
    before: int = 0,
) -> KGroupedInputs:
    """A case of `COUNTS`."""
    counts = COUNTS[name]
    offsets = not isinstance(counts, int)
    every = counts if offsets else [counts]
    made = sides(every, m, n, device, blocks_b=blocks_b, exact=exact)
    return inputs_of(made, output, offsets=offsets, before=before if offsets else 0)


def placed(made: KGroupedInputs, *, d: str = "", **places: str) -> KGroupedInputs:
    """Operands elsewhere in memory, by names in `GROUPED_PLACES` and `SCALE_PLACES`."""
    moved = {}
    for name, place in places.items():
        of_scales = name.endswith("scale_inv")
        make = SCALE_PLACES[place].make if of_scales else GROUPED_PLACES[place].make
        moved[name] = make(getattr(made, name))
    if d:
        moved["d"] = stacked(GROUPED_PLACES[d].make, made.d)
    return made._replace(**moved)


def expected_of(inputs: KGroupedInputs) -> torch.Tensor:
    """fp64 like d: sums of the codes that tokens have, and what d holds where that is kept."""
    a, a_scale_inv, b, b_scale_inv, d, expert_offsets, num_tokens, accumulates = inputs
    edges = torch.tensor([0, num_tokens]) if expert_offsets is None else expert_offsets.cpu()
    result = d.double().clone() if accumulates else torch.zeros_like(d, dtype=torch.float64)
    by_expert = result[None] if expert_offsets is None else result
    of_b = b_scale_inv if b_scale_inv.shape[1] == b.shape[1] else by_features(b_scale_inv, b)
    for expert in range(len(edges) - 1):
        begin, end = edges[expert : expert + 2].tolist()
        for i in range(0, max(end - begin, 0), BLOCK):
            block, count = begin // BLOCK + expert + i // BLOCK, min(end - begin - i, BLOCK)
            x = naive.decode(a[block, :, :count]) * a_scale_inv[block].double()[:, None]
            y = naive.decode(b[block, :, :count]) * of_b[block].double()[:, None]
            by_expert[expert] += x @ y.T
    return result


def by_features(scale_inv: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return scale_inv[:, torch.arange(b.shape[1], device=b.device) // BLOCK]


@contextmanager
def only_d_is_written(d: torch.Tensor) -> Iterator[None]:
    """No more than d is written of the memory that it is a part of."""
    around = torch.empty(0, dtype=torch.uint8, device=d.device).set_(d.untyped_storage())
    held = d.clone()
    d.zero_()
    before = around.clone()
    d.copy_(held)
    yield
    held = d.clone()
    d.zero_()
    assert torch.equal(around, before)
    d.copy_(held)


def run_and_compare(inputs: KGroupedInputs) -> None:
    """Exact sums, bit by bit."""
    expected = expected_of(inputs)
    with only_d_is_written(inputs.d):
        k_grouped_gemm(*inputs)
    assert torch.equal(inputs.d, expected.to(inputs.d.dtype))


def bound(inputs: KGroupedInputs) -> float:
    """Of a row's error: a rounding to BF16; the tensor cores add 128 products in some 14 bits."""
    if inputs.d.dtype == torch.bfloat16:
        return 4e-3
    return 1e-6 if inputs.d.device.type == "cpu" else 3e-4


def assert_right(inputs: KGroupedInputs, expected: torch.Tensor) -> None:
    assert_matches_reference(inputs.d, expected, bound(inputs))
