"""References for the ops: bit by bit and expert by expert, in FP64; they call nothing of moefp8."""

import math
from typing import NamedTuple

import torch

from moefp8.kernels.common.activation import Activation


def decode_e4m3(code: int) -> float:
    """1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, 0x7f is NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_VALUES = torch.tensor([decode_e4m3(code) for code in range(256)], dtype=torch.float64)


def decode(data: torch.Tensor) -> torch.Tensor:
    return E4M3_VALUES.to(data.device)[data.contiguous().view(torch.uint8).long()]


def encode(x: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest E4M3 values, ties to even, saturating at 448; NaN is 0x7f."""
    positive = E4M3_VALUES[:127]  # rises with the code, and even codes have even mantissas
    magnitude = x.double().abs().clamp(max=448)
    above = torch.searchsorted(positive, magnitude.contiguous()).clamp(max=126)
    below = (above - 1).clamp(min=0)
    to_above, to_below = positive[above] - magnitude, magnitude - positive[below]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = torch.where(take_above, above, below)
    code = torch.where(magnitude == positive[above], above, code)
    code = code + 128 * torch.signbit(x).long()
    return torch.where(x.isnan(), 127, code)


MIN_AMAX, MIN_GRADIENT_AMAX = 1e-4, 2.0**-60


def quantize(
    x: torch.Tensor, block_rows: int, ue8m0: bool, min_amax: float = MIN_AMAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> (codes [M, K], scales), one block after the other; a NaN is larger than all."""
    m, k = x.shape
    codes = torch.zeros(m, k, dtype=torch.long)
    scales = torch.zeros(math.ceil(m / block_rows), math.ceil(k / 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * block_rows, (i + 1) * block_rows), slice(j * 128, (j + 1) * 128)
            magnitudes = [abs(v) for v in x[block].float().flatten().tolist()]
            amax = math.nan if any(map(math.isnan, magnitudes)) else max(min_amax, *magnitudes)
            scale = (torch.tensor(amax, dtype=torch.float32) / 448).item()
            if ue8m0 and math.isfinite(scale):
                scale = 2.0 ** math.ceil(math.log2(scale))
            scales[i, j] = scale
            codes[block] = encode(x[block].float() / torch.tensor(scale, dtype=torch.float32))
    return codes, scales


def values(data: torch.Tensor, scale_inv: torch.Tensor, block_rows: int) -> torch.Tensor:
    """fp64 [M, K]: every element times the scale of its block, found by its own indices."""
    m, k = data.shape
    if m == 0 or k == 0:
        return torch.zeros(m, k, dtype=torch.float64, device=data.device)
    rows, columns = (torch.arange(size, device=data.device) for size in (m, k))
    return decode(data) * scale_inv.double()[rows // block_rows][:, columns // 128]


def gemm(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """fp64 [M, N]."""
    return values(*a, block_rows=1) @ values(*b, block_rows=128).T


def best(scores: list[float], k: int) -> list[int]:
    """The largest first, NaN above all; of equals the lowest id."""
    return sorted(range(len(scores)), key=lambda e: (*_rank(scores[e]), e))[:k]


def _rank(score: float) -> tuple[bool, float]:
    return (False, 0.0) if math.isnan(score) else (True, -score)


def softmax_topk(logits: list[float], k: int, renormalize: bool) -> tuple[list[int], list[float]]:
    largest = math.nan if any(map(math.isnan, logits)) else max(logits)
    exponentials = [math.exp(v - largest) for v in logits]
    index = best(logits, k)
    weights = [exponentials[e] / sum(exponentials) for e in index]
    total = sum(weights) if renormalize else 1.0
    return index, [w / total for w in weights]


def group_choice(biased: list[float], k: int, num_groups: int, topk_groups: int) -> list[int]:
    """The k best of the groups whose two best have the largest sums; of equals the lowest id.

    Experts of other groups count as -Inf, and are chosen where nothing better is left.
    """
    if topk_groups < num_groups:
        size = len(biased) // num_groups
        groups = [biased[g * size : (g + 1) * size] for g in range(num_groups)]
        best_two = [[group[e] for e in best(group, 2)] for group in groups]
        strength = [torch.tensor(two).sum().item() for two in best_two]  # in FP32: ties are ties
        kept = best(strength, topk_groups)
        biased = [v if e // size in kept else -math.inf for e, v in enumerate(biased)]
    return best(biased, k)


def sigmoid_group_topk(
    logits: list[float],
    bias: list[float],
    k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    factor: float,
) -> tuple[list[int], list[float]]:
    scores = [1 / (1 + math.exp(-v)) for v in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    index = group_choice(biased, k, num_groups, topk_groups)
    weights = [scores[e] for e in index]
    total = sum(weights) + 1e-20 if renormalize else 1.0
    return index, [w / total * factor for w in weights]


def activate(
    gate: torch.Tensor, up: torch.Tensor, activation: Activation | None = None
) -> torch.Tensor:
    kind, limit, alpha = activation or Activation()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if kind == "geglu":
        return gate / 2 * torch.erfc(-gate / 2**0.5) * up
    if kind == "geglu_tanh":  # (1 + tanh(x)) / 2 = sigmoid(2 x)
        half = (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return gate * (2 * half).sigmoid() * up
    if kind == "gpt_oss":
        return gate / (1 + (-(alpha or 1.702) * gate).exp()) * (up + 1)
    return gate / (1 + (-gate).exp()) * up


def experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Gated experts on plain weights gate_up [E, 2I, H] and down [E, H, I]; token by token."""
    result = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(
        zip(top_k_index.tolist(), top_k_weights.tolist(), strict=True)
    ):
        for expert, weight in zip(ids, weights, strict=True):
            if expert == gate_up.shape[0]:
                continue
            x = hidden_states[token].double()
            gate, up = (gate_up[expert].double() @ x).chunk(2)
            result[token] += weight * (down[expert].double() @ activate(gate, up, activation))
    return result


def rounded_to_fp8(x: torch.Tensor, min_amax: float = MIN_AMAX) -> torch.Tensor:
    """fp64 [M, K]: x through E4M3, with a scale for each 128 elements of a row."""
    codes, scales = quantize(x.float(), 1, False, min_amax)
    return values(codes.byte().view(torch.float8_e4m3fn), scales, 1)


def fp8_feed_forward(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scale_inv: torch.Tensor,
    up: torch.Tensor,
    up_scale_inv: torch.Tensor,
    down: torch.Tensor,
    down_scale_inv: torch.Tensor,
    activation: Activation | None = None,
) -> torch.Tensor:
    """bf16 [T, H]: the feed-forward of E4M3 weights [I, H] and [H, I], rounded as kernels do."""
    x = rounded_to_fp8(x)
    gated = x @ values(gate, gate_scale_inv, 128).T
    activated = activate(gated, x @ values(up, up_scale_inv, 128).T, activation)
    return (rounded_to_fp8(activated) @ values(down, down_scale_inv, 128).T).bfloat16()


def fp8_experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale_inv: torch.Tensor,
    down: torch.Tensor,
    down_scale_inv: torch.Tensor,
    activation: Activation | None = None,
) -> torch.Tensor:
    """What `experts` gives on E4M3 weights, rounded where the kernels round; bf16 [T, H]."""
    num_experts, _, size = down.shape
    blocks = math.ceil(size / 128)
    result = torch.zeros(hidden_states.shape)
    for token, ids in enumerate(top_k_index.tolist()):
        for choice, expert in enumerate(ids):
            if expert == num_experts:
                continue
            y = fp8_feed_forward(
                hidden_states[token : token + 1],
                gate_up[expert, :size],
                gate_up_scale_inv[expert, :blocks],
                gate_up[expert, size:],
                gate_up_scale_inv[expert, blocks:],
                down[expert],
                down_scale_inv[expert],
                activation,
            )
            result[token] += top_k_weights[token, choice].float() * y[0].float()
    return result.bfloat16()


# ---- Gradients ----


class Gradients(NamedTuple):
    """Of hidden states [T, H] and of top_k_weights [T, k], both fp64.

    sizes: |dA| |a| of each choice: that of its weight is their product, in which much may cancel.
    """

    hidden_states: torch.Tensor
    top_k_weights: torch.Tensor
    sizes: torch.Tensor


def through_fp8(grad: torch.Tensor, weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """fp64 [M, K]: what x gets if `x @ weight.T` has the gradient [M, N]."""
    return rounded_to_fp8(grad, MIN_GRADIENT_AMAX) @ values(weight, scale_inv, 128)


def fp8_feed_forward_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scale_inv: torch.Tensor,
    up: torch.Tensor,
    up_scale_inv: torch.Tensor,
    down: torch.Tensor,
    down_scale_inv: torch.Tensor,
    activation: Activation | None = None,
    weight: float = 1.0,
    saved_in_fp8: bool = False,
) -> Gradients:
    """The gradients of `weight` times `fp8_feed_forward`, rounded where kernels do.

    PyTorch differentiates SwiGLU.
    """
    x = rounded_to_fp8(x)
    saved = [x @ values(w, s, 128).T for w, s in ((gate, gate_scale_inv), (up, up_scale_inv))]
    saved = [y.float().bfloat16() for y in saved]
    saved = [rounded_to_fp8(y) if saved_in_fp8 else y.double() for y in saved]
    saved = [y.requires_grad_() for y in saved]
    activated = activate(*saved, activation)
    of_activated = through_fp8(grad, down, down_scale_inv).float().bfloat16().double()
    of_gate, of_up = torch.autograd.grad(activated, saved, of_activated * weight)
    of_x = through_fp8(of_gate, gate, gate_scale_inv) + through_fp8(of_up, up, up_scale_inv)
    activated = activated.detach()
    sizes = of_activated.norm(dim=-1) * activated.norm(dim=-1)
    return Gradients(of_x, (of_activated * activated).sum(-1), sizes)


def fp8_experts_grad(
    grad: torch.Tensor,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale_inv: torch.Tensor,
    down: torch.Tensor,
    down_scale_inv: torch.Tensor,
    activation: Activation | None = None,
    saved_in_fp8: bool = False,
) -> Gradients:
    """The gradients of `fp8_experts`. Choices of one expert by one token are one choice."""
    num_experts, _, size = down.shape
    blocks = math.ceil(size / 128)
    of_x = torch.zeros(hidden_states.shape, dtype=torch.float64)
    of_weights, sizes = torch.zeros(2, *top_k_index.shape, dtype=torch.float64)
    for token, ids in enumerate(top_k_index.tolist()):
        for expert in sorted(set(ids) - {num_experts}):
            chosen = [choice for choice, e in enumerate(ids) if e == expert]
            found = fp8_feed_forward_grad(
                grad[token : token + 1],
                hidden_states[token : token + 1],
                gate_up[expert, :size],
                gate_up_scale_inv[expert, :blocks],
                gate_up[expert, size:],
                gate_up_scale_inv[expert, blocks:],
                down[expert],
                down_scale_inv[expert],
                activation,
                float(top_k_weights[token, chosen].double().sum()),
                saved_in_fp8,
            )
            of_x[token] += found.hidden_states[0].float().bfloat16()
            of_weights[token, chosen], sizes[token, chosen] = found.top_k_weights, found.sizes
    return Gradients(of_x, of_weights, sizes)


def plan(
    ids: list[list[int]], num_experts: int, alignment: int, max_m: int | None, num_rows: int
) -> list[list]:
    """Rows of each expert, offsets, row to token, row to expert, token to row."""
    of_experts = [[t for t, own in enumerate(ids) if e in own] for e in range(num_experts)]
    offsets, row_to_token, row_to_expert = [0], [-1] * num_rows, [-1] * num_rows
    row_of: dict[tuple[int, int], int] = {}
    for expert, tokens in enumerate(of_experts):
        for row, token in enumerate(tokens, offsets[-1]):
            row_to_token[row], row_to_expert[row], row_of[token, expert] = token, expert, row
        size = math.ceil(len(tokens) / alignment) * alignment if max_m is None else max_m
        offsets.append(offsets[-1] + size)
    token_to_row = [[row_of.get((t, e), -1) for e in own] for t, own in enumerate(ids)]
    return [[len(x) for x in of_experts], offsets, row_to_token, row_to_expert, token_to_row]


def combine(rows: torch.Tensor, token_to_row: list[list[int]], weights: torch.Tensor):
    """rows [R, H] -> [T, H]: a token's rows times its top_k_weights, added in turn, all in FP32."""
    result = torch.zeros(len(token_to_row), rows.shape[1])
    for token, own in enumerate(token_to_row):
        for choice, row in enumerate(own):
            if row >= 0:
                result[token] += weights[token, choice].float() * rows[row].float()
    return result.to(rows.dtype)
