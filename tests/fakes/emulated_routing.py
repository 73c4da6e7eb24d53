"""What the kernels of routing do with their arguments, on the CPU, and whether these are right.

A part of the stand-in for libcuda: see `emulator.py`.
"""

import re

import torch

from moefp8 import kernels
from moefp8.quant import numerics
from moefp8.routing import logits_launch
from moefp8.routing.dispatch import SHARES
from tests import naive
from tests.fakes.emulated_gemm import GemmEmulator, dtype_of, memory
from tests.routing.cases import plan_of


class RoutingEmulator(GemmEmulator):
    """Logits, top-k, plan, dispatch and combine."""

    def logits(self, made, parameters):
        x = made.arguments
        tile = logits_launch.Tile(*map(int, re.findall(r"\d+", made.kernel.name)))
        (tokens,), (weight,) = map(self.maps_at, parameters[:2])
        assert (tokens.box, weight.box) == ([64, tile.tokens], [32, tile.experts])
        assert tokens.swizzle == weight.swizzle == 128
        (h, num_tokens), (_, num_experts) = tokens.shape, weight.shape
        assert (x.num_tokens, x.num_experts) == (num_tokens, num_experts)
        assert x.num_chunks == kernels.ceil_div(h, 256)
        assert x.num_parts == kernels.ceil_div(x.num_chunks, tile.chunks)
        assert x.expert_tiles == kernels.ceil_div(num_experts, tile.experts)
        token_tiles = kernels.ceil_div(num_tokens, tile.tokens)
        assert 1 <= made.grid <= x.num_items == token_tiles * x.expert_tiles * x.num_parts
        assert made.block == tile.threads
        sums = memory(
            x.sums,
            torch.float32,
            [x.num_parts, num_tokens, num_experts],
            [num_tokens * num_experts, num_experts, 1],
        )
        for part, columns in enumerate(torch.arange(h).split(256 * tile.chunks)):
            products = tokens.tensor()[:, columns].double() @ weight.tensor()[:, columns].double().T
            sums[part] = products

    def top_k(self, made, parameters):
        x = made.arguments
        op, items, parts = re.fullmatch(
            r"(\w+)_kernel<.*, (\d+), (\d+)>", made.kernel.name
        ).groups()
        dtype = dtype_of(made.kernel)
        shape = [x.num_tokens, x.num_experts]
        _check_warps(x, made, int(items), int(parts))
        assert x.group_lanes.bit_count() == 1
        assert x.group_lanes * x.num_groups <= 32 or x.group_lanes == 1
        assert made.programmatic == bool(int(parts))
        logits = _logits_of(x, dtype, int(parts))
        if op == "softmax_topk":
            result = torch.ops.moefp8.softmax_topk(logits, x.top_k, bool(x.renormalize))
        else:
            bias = memory(x.bias, torch.float32, shape[1:], [1]) if x.bias else None
            rest = x.top_k, x.num_groups, x.topk_groups, bool(x.renormalize), x.scaling_factor
            result = torch.ops.moefp8.sigmoid_group_topk(logits, bias, *rest)
        for address, found in zip((x.top_k_index, x.top_k_weights), result, strict=True):
            memory(address, found.dtype, [*found.shape], [x.top_k, 1]).copy_(found)

    def top_k_backward(self, made, parameters):
        x = made.arguments
        pattern = r"top_k_backward_kernel<.*, (\d+), (\d+), (true|false)>"
        items, parts, by_sigmoid = re.fullmatch(pattern, made.kernel.name).groups()
        dtype, shape = dtype_of(made.kernel), [x.num_tokens, x.num_experts]
        _check_warps(x, made, int(items), int(parts))
        logits = _logits_of(x, dtype, int(parts))
        grad = memory(x.grad, torch.float32, [x.num_tokens, x.top_k], [x.top_k, 1])
        index = memory(x.top_k_index, torch.int64, [x.num_tokens, x.top_k], [x.top_k, 1])
        rest = by_sigmoid == "true", bool(x.renormalize), x.scaling_factor
        found = torch.ops.moefp8.top_k_backward(grad, logits, index, *rest)
        if not int(parts):
            memory(x.of_logits, dtype, shape, [x.num_experts, 1]).copy_(found)
            return
        assert made.programmatic
        high = found.bfloat16()
        both = torch.stack((high, (found - high).bfloat16(), high), dim=1)
        memory(x.of_logits, torch.bfloat16, [*both.shape], [*both.stride()]).copy_(both)

    @staticmethod
    def plan(routing):
        """Without max_m, every choice has a row of its own; else a token has one of each expert."""
        id_dtype = torch.int64 if routing.is_wide else torch.int32
        strides = [y // id_dtype.itemsize for y in (routing.token_bytes, routing.choice_bytes)]
        ids = memory(routing.ids, id_dtype, [routing.num_tokens, routing.top_k], strides)
        return plan_of(ids, routing.num_experts, routing.max_m or None, routing.first_expert)

    def counts_of(self, x):
        """[chunks, slots] of how many rows each expert has in each chunk of tokens."""
        plan, counts = self.plan(x.routing), torch.zeros(x.num_chunks, x.routing.num_slots)
        is_row = plan.row_to_token >= 0
        at = plan.row_to_token[is_row] // x.routing.chunk, plan.row_to_expert[is_row]
        return counts.index_put(at, torch.ones(()), accumulate=True).short()

    def count(self, made, parameters):
        x = made.arguments
        counts = self.counts_of(x)
        assert (made.grid, made.block) == (x.num_chunks, 128)
        assert f"<{str(x.routing.max_m > 0).lower()}>" in made.kernel.name
        memory(x.counts, torch.int16, [*counts.shape], [counts.shape[1], 1]).copy_(counts)

    def dispatch(self, made, parameters):
        x, dtype = made.arguments, _dtype_of_tokens(made.kernel)
        routing, h, blocks = x.routing, x.hidden_size, kernels.num_blocks(x.hidden_size)
        assert x.num_k_blocks == blocks
        flags = re.search(r"<(.*)>", made.kernel.name)[1].split(", ")[1:]
        vectorized, merges, is_counted = ([flag == "true" for flag in flags] + [False] * 2)[:3]
        fits = h % (16 if dtype == kernels.E4M3 else 8) == 0
        assert vectorized == (fits and (x.x | x.x_row_bytes) % 16 == 0)
        assert merges == (routing.max_m > 0)
        if "few" in made.kernel.name:
            assert routing.num_tokens * routing.top_k <= 32
            assert x.num_parts * x.part_blocks >= blocks
            assert made.grid == routing.num_tokens * x.num_parts + 1
        else:
            assert made.grid == x.num_chunks * x.num_parts
            assert x.num_chunks == kernels.ceil_div(routing.num_tokens, routing.chunk)
        if is_counted:
            shape = [x.num_chunks, routing.num_slots]
            counted = memory(x.counts, torch.int16, shape, [shape[1], 1])
            assert torch.equal(counted, self.counts_of(x))
        assert made.programmatic
        source_strides = [x.x_row_bytes // dtype.itemsize, 1]
        source = memory(x.x, dtype, [routing.num_tokens, h], source_strides)
        if dtype == kernels.E4M3:
            pitches = [y // 4 for y in (x.x_scale_token_bytes, x.x_scale_block_bytes)]
            scale_inv = memory(x.x_scales, torch.float32, [routing.num_tokens, blocks], pitches)
            data = source
        else:
            assert not x.x_scales
            data, scale_inv = numerics.quantize_1x128(source, False, x.min_amax)
        plan = self.plan(routing)
        (rows,) = torch.nonzero(plan.row_to_token >= 0, as_tuple=True)
        tokens, num_rows = plan.row_to_token[rows], len(plan.row_to_token)
        codes = memory(x.rows, torch.uint8, [num_rows, h], [x.row_pitch, 1])
        codes[rows] = data.view(torch.uint8)[tokens]
        in_matrix = routing.max_m or num_rows
        shape, strides = [num_rows // in_matrix, blocks, in_matrix], [x.scale_pitch, 1]
        scales = memory(x.row_scales, torch.float32, shape, [blocks * x.scale_pitch, *strides])
        scales[rows // in_matrix, :, rows % in_matrix] = scale_inv[tokens]
        for address, values in (
            (x.zeros, torch.zeros(2)),
            (routing.expert_offsets, plan.expert_offsets),
            (routing.tokens_per_expert, plan.tokens_per_expert),
            (routing.token_to_row, plan.token_to_row.flatten()),
        ):
            memory(address, torch.int32, [len(values)], [1]).copy_(values)

    def combine(self, made, parameters):
        x, dtype = made.arguments, dtype_of(made.kernel)
        shape, h = [x.num_tokens, x.top_k], x.hidden_size
        strides = [y // dtype.itemsize for y in (x.weight_token_bytes, x.weight_choice_bytes)]
        weights = memory(x.weights, dtype, shape, strides)
        token_to_row = memory(x.token_to_row, torch.int32, shape, [x.top_k, 1]).tolist()
        num_rows = 1 + max(0, *map(max, token_to_row))
        y = memory(x.y, torch.bfloat16, [num_rows, h], [x.y_row_bytes // 2, 1])
        out = memory(x.out, torch.bfloat16, [x.num_tokens, h], [h, 1])
        out.copy_(naive.combine(y, token_to_row, weights))
        if x.addend:
            out.copy_(out.float() + memory(x.addend, torch.bfloat16, [x.num_tokens, h], [h, 1]))
        if made.kernel.name.endswith("true>"):
            assert (h * 2 | x.out | (x.addend or 0)) % 16 == 0


def _dtype_of_tokens(kernel) -> torch.dtype:
    share = re.search(r"<(Codes|Floats<[^>]*>)", kernel.name)[1]
    return next(dtype for dtype, name in SHARES.items() if name == share)


def _check_warps(x, made, items: int, parts: int) -> None:
    """A warp for each token of a CTA, and all tokens."""
    assert items == kernels.ceil_div(x.num_experts, 32) <= 16
    assert made.grid * x.tokens_of_cta >= x.num_tokens > (made.grid - 1) * x.tokens_of_cta
    assert made.block % 32 == 0
    assert made.block // 32 >= x.tokens_of_cta
    assert 32 <= made.block <= (256 if parts else 128)


def _logits_of(x, dtype: torch.dtype, parts: int) -> torch.Tensor:
    """[T, E], given or as sums."""
    shape = [x.num_tokens, x.num_experts]
    if parts:
        strides = [x.num_tokens * x.num_experts, x.num_experts, 1]
        return memory(x.logits, dtype, [x.num_parts, *shape], strides).sum(dim=0)
    strides = [x.row_bytes // dtype.itemsize, x.expert_bytes // dtype.itemsize]
    return memory(x.logits, dtype, shape, strides)
