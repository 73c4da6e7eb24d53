"""Attention of one token of each sequence, without copies of keys and values.

B sequences, H heads, K heads of keys, G = H / K, L keys, D and V head sizes of queries and values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_SDPA, _GROUPED = "sdpa", "moefp8_grouped_sdpa"
_OTHERS = "position_bias", "softcap"  # arguments that only transformers' own function knows


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' "sdpa" for query [B, H, 1, D], key [B, K, L, D], value [B, K, L, V].

    Returns [B, 1, H, V]. With a mask, transformers repeats keys and values for all heads, from 5.24
    on where it is compiled; here the G heads that share them are rows of one product. Other shapes
    are transformers' to compute.
    """
    batch, num_heads, num_tokens, _ = query.shape
    num_groups = key.shape[1]
    has_one_mask = attention_mask is None or attention_mask.shape[1] == 1
    is_plain = all(kwargs.get(name) is None for name in _OTHERS)
    if num_tokens != 1 or num_heads == num_groups or not (has_one_mask and is_plain):
        y: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return y
    rows = query.reshape(batch, num_groups, num_heads // num_groups, -1)
    rows = scaled_dot_product_attention(
        rows, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return rows.reshape(batch, 1, num_heads, -1), None


AttentionInterface.register(_GROUPED, grouped_sdpa)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Within it, a model whose attention is "sdpa" everywhere computes it by `grouped_sdpa`."""
    parts = (getattr(model.config, name) for name in model.config.sub_configs)
    configs = [model.config, *(part for part in parts if part is not None)]
    if {config._attn_implementation for config in configs} != {_SDPA}:
        yield
        return
    model.set_attn_implementation(_GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation(_SDPA)
