"""`Activation`: which function makes one value of gate and up.

`functional/activation.py` has the formulas in PyTorch, `kernels/device/activation.cuh` for kernels.
"""

import math
from typing import Any, NamedTuple

# The names of kinds, and of their enumerators in device/activation.cuh.
KINDS = {
    "swiglu": "kSwiglu",
    "geglu": "kGeglu",
    "geglu_tanh": "kGegluTanh",
    "gpt_oss": "kGptOss",
}
_GPT_OSS_ALPHA = 1.702


class Activation(NamedTuple):
    """The activation of gated experts: `f(gate) * up`, after both are clamped.

    kind: one of
        "swiglu": f(x) = x sigmoid(x), as `nn.functional.silu`.
        "geglu": f(x) = x Phi(x), with the normal distribution function Phi; as
            `nn.functional.gelu`.
        "geglu_tanh": f(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), as `nn.functional.gelu`
            with `approximate="tanh"`.
        "gpt_oss": f(x) = x sigmoid(alpha x), times up + 1 in place of up.
    limit: clamps gate from above and up on both sides; None: nothing is clamped.
    alpha: of "gpt_oss"; None: 1.702. Others have none.
    """

    kind: str = "swiglu"
    limit: float | None = None
    alpha: float | None = None

    @property
    def enumerator(self) -> str:
        """The name of the kind in kernels."""
        return f"Activation::{KINDS[self.kind]}"

    @property
    def slope(self) -> float:
        """What multiplies x in the sigmoid of "swiglu" and "gpt_oss"."""
        if self.kind != "gpt_oss":
            return 1.0
        return _GPT_OSS_ALPHA if self.alpha is None else self.alpha

    @property
    def arguments(self) -> dict[str, Any]:
        """The values that kernels take as `ActivationArguments`."""
        limit = math.inf if self.limit is None else self.limit
        return {"limit": limit, "alpha": self.slope}


SWIGLU = Activation()


def check_activation(op: str, activation: Activation) -> None:
    """Raise ValueError, naming `op`, unless there is such an activation."""
    kind, limit, alpha = activation
    if kind not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise ValueError(f"{op}: activation must be one of {known}, got {kind!r}")
    if limit is not None and not limit >= 0:
        raise ValueError(f"{op}: swiglu_limit must be at least 0, or None, got {limit}")
    if kind != "gpt_oss" and alpha is not None:
        raise ValueError(f"{op}: alpha belongs to the activation 'gpt_oss', got {kind!r}")


def activation_of(
    op: str, activation: "str | Activation", swiglu_limit: float | None
) -> Activation:
    """The activation of a module, given by its kind or as a whole, with the limit of an argument.

    Raises TypeError for anything else, ValueError if there is no such activation, or two limits.
    """
    if isinstance(activation, str):
        activation = Activation(activation)
    if not isinstance(activation, Activation):
        raise TypeError(
            f"{op}: activation must be a name such as 'swiglu', or an Activation, got "
            f"{type(activation).__name__}"
        )
    if swiglu_limit is not None:
        if activation.limit not in (None, swiglu_limit):
            raise ValueError(
                f"{op}: swiglu_limit must be {activation.limit}, as in activation, or None, got "
                f"{swiglu_limit}"
            )
        activation = activation._replace(limit=swiglu_limit)
    check_activation(op, activation)
    return activation
