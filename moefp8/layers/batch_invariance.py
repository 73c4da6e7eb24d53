"""`set_batch_invariant`: whether a token's bits may depend on the other tokens of a call."""

import warnings

from torch import nn

from .adapter import check_no_adapters
from .linear import FP8Linear
from .moe import MoE


def set_batch_invariant(model: nn.Module, enabled: bool = True) -> nn.Module:
    """Let no bit of what FP8 layers give a token depend on the other tokens. Returns `model`.

    It sets `batch_invariant` of each `FP8Linear` and `MoE`, frozen or trainable. Routers and routed
    experts need nothing. It changes no weight and may be called at any time; the bits of a linear
    of up to 512 rows may change by it. Layers that `convert` adds later have the default, False.

    Raises:
        TypeError: `model` is no module, or `enabled` no bool.
        ValueError: the model has adapters of `moefp8.adapters`, which multiply in BF16.
    """
    op = "set_batch_invariant"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(enabled, bool):
        raise TypeError(f"{op}: enabled must be a bool, got {enabled!r}")
    if enabled:
        check_no_adapters(op, model, "whose products in BF16 depend on the batch")
    layers = [x for x in model.modules() if isinstance(x, FP8Linear | MoE)]
    if not layers:
        warnings.warn(
            f"{op}: the model has no FP8Linear and no MoE, so nothing was changed; "
            "moefp8.convert(model) makes some",
            stacklevel=2,
        )
    for layer in layers:
        layer.batch_invariant = enabled
    return model
