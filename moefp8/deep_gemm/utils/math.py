"""How tensors become FP8: `scale = max(amax, 1e-4) / 448`, and `data = x / scale`.

Scales are row-major here, as DeepGEMM gives them. The GEMMs copy scales of activations into their
order at every call; `moefp8.quant.quantize_1x128` gives them in that order. The GEMMs take
blocks of 128; other granularities are for the casts alone.
"""

from collections.abc import Sequence

import torch

from ... import kernels, quant

ceil_div, align = kernels.ceil_div, kernels.round_up

Cast = tuple[torch.Tensor, torch.Tensor]  # e4m3 data, fp32 scales


def ceil_to_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """The magnitudes of fp32 `x`, each rounded up to a power of two from 2^-126 to 2^127."""
    bits = x.abs().float().view(torch.int32)
    exponents = (bits >> 23) + (bits & 0x7FFFFF).bool()
    return (exponents.clamp(1, 254) << 23).view(torch.float32)


def per_token_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool = False,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
) -> Cast:
    """One scale for each `gran_k` elements of a row.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        use_ue8m0: round scales up to powers of two.

    Returns:
        e4m3 [M, K] and fp32 [M, ceil(K/gran_k)], both contiguous.

    Raises:
        ValueError: `x` has not 2 dimensions, or `use_packed_ue8m0` asks for Blackwell's scales.
    """
    op = "per_token_cast_to_fp8"
    _check(op, x, gran_k)
    if use_packed_ue8m0:
        raise ValueError(
            f"{op}: use_packed_ue8m0 must be False, packed UE8M0 scales are for Blackwell; "
            "use_ue8m0=True gives powers of two in FP32"
        )
    if gran_k == kernels.BLOCK:
        data, scale_inv = quant.quantize_1x128(x, ue8m0=use_ue8m0)
        return data, scale_inv.contiguous()
    m, k = x.shape
    blocks = _padded(x, m, align(k, gran_k)).unflatten(1, (-1, gran_k))
    data, scale_inv = per_custom_dims_cast_to_fp8(blocks, (0, 1), use_ue8m0)
    return data.flatten(1)[:, :k].contiguous(), scale_inv.view(m, ceil_div(k, gran_k))


def per_block_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = 128) -> Cast:
    """One scale for each block of `gran_k` rows and columns.

    Args:
        x: [N, K] bf16, fp16 or fp32.
        use_ue8m0: round scales up to powers of two.

    Returns:
        e4m3 [N, K] and fp32 [ceil(N/gran_k), ceil(K/gran_k)], both contiguous.

    Raises:
        ValueError: `x` has not 2 dimensions.
    """
    _check("per_block_cast_to_fp8", x, gran_k)
    if gran_k == kernels.BLOCK:
        data, scale_inv = quant.quantize_128x128(x, ue8m0=use_ue8m0)
        return data, scale_inv
    n, k = x.shape
    padded = _padded(x, align(n, gran_k), align(k, gran_k))
    blocks = padded.unflatten(1, (-1, gran_k)).unflatten(0, (-1, gran_k))
    data, scale_inv = per_custom_dims_cast_to_fp8(blocks, (0, 2), use_ue8m0)
    scale_inv = scale_inv.view(blocks.shape[0], blocks.shape[2])
    return data.flatten(0, 1).flatten(1)[:n, :k].contiguous(), scale_inv


def per_channel_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = 128) -> Cast:
    """One scale for each `gran_k` elements of a column.

    Args:
        x: [K, N] bf16, fp16 or fp32; `gran_k` divides K.
        use_ue8m0: round scales up to powers of two.

    Returns:
        e4m3 [K, N] and fp32 [K/gran_k, N], both contiguous.

    Raises:
        ValueError: `x` has not 2 dimensions, or `gran_k` does not divide K.
    """
    op = "per_channel_cast_to_fp8"
    _check(op, x, gran_k)
    k, n = x.shape
    if k % gran_k:
        raise ValueError(f"{op}: gran_k must divide K = {k}, got {gran_k}; pad x with zeros")
    blocks = x.unflatten(0, (k // gran_k, gran_k))
    data, scale_inv = per_custom_dims_cast_to_fp8(blocks, (0, 2), use_ue8m0)
    return data.flatten(0, 1), scale_inv.view(k // gran_k, n)


def per_custom_dims_cast_to_fp8(
    x: torch.Tensor, dims: Sequence[int], use_ue8m0: bool = False
) -> Cast:
    """One scale for each index of the dimensions `dims`.

    Args:
        x: bf16, fp16 or fp32, of any shape.
        use_ue8m0: round scales up to powers of two.

    Returns:
        e4m3 of the shape of `x`, and fp32 of the sizes of `dims`, without those that are 1.
    """
    others = [i for i in range(x.ndim) if i not in dims]
    amax = x.abs().float().amax(others, keepdim=True) if others else x.abs().float()
    scale_inv = amax.clamp(min=1e-4) / amax.new_full((), 448.0)
    scale_inv = ceil_to_ue8m0(scale_inv) if use_ue8m0 else scale_inv
    data = (x.float() / scale_inv).clamp(-448.0, 448.0).to(kernels.E4M3)
    return data.contiguous(), scale_inv.squeeze().contiguous()


def _check(op: str, x: torch.Tensor, gran_k: int) -> None:
    if x.ndim != 2 or gran_k < 1:
        raise ValueError(
            f"{op}: x must have 2 dimensions and gran_k be at least 1, got shape {list(x.shape)} "
            f"and gran_k {gran_k}"
        )


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`x` [M, K] with zeros to [rows, columns]."""
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))
