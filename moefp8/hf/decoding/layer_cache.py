"""One layer of a cache, for the block that owns it.

A block looks its layer up by a number. Compiled code would be guarded by that number, and each
block compiled on its own: 48 blocks of Qwen3-30B-A3B took 90 s.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Cache


class LayerCache(Cache):
    """A cache of one layer, whatever number it is asked for."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layers=[layer])

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        layer: Any = self.layers[0]
        return layer.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        layer: Any = self.layers[0]
        return layer.get_seq_length()


def with_own_layer(
    block: nn.Module, cache: Cache, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap `forward` so that it gets the block's own layer in place of `cache`.

    It gets the cache itself if the block's modules have no number, or several.
    """
    indices: list[Any] = [getattr(module, "layer_idx", None) for module in block.modules()]
    own_indices = [*{index for index in indices if isinstance(index, int)}]
    if len(own_indices) != 1:
        return forward
    own = LayerCache(cache.layers[own_indices[0]])

    def given_its_layer(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{k: own if x is cache else x for k, x in kwargs.items()})

    return given_its_layer
