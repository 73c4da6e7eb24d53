"""What saves a converted model of a library that knows no FP8 modules, such as transformers.

Its `save_pretrained` would write codes without a word in config.json that they are codes. A plug-in
takes the model over (`moefp8.hf` does for transformers); without one, saving is refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from .conversion import Conversion

Adopter = Callable[[nn.Module, Conversion], bool]  # whether it took the model over
ADOPTERS: list[Adopter] = []


def adopt(model: Any, conversion: Conversion) -> None:
    """Hand a model that was converted to whoever saves it."""
    if not conversion.swapped or not callable(getattr(model, "save_pretrained", None)):
        return
    if any(adopter(model, conversion) for adopter in ADOPTERS):
        release(model)
    else:
        model.save_pretrained = partial(_refuse, type(model).__name__)


def release(model: nn.Module) -> None:
    """Let a model save itself again: it is in other hands, or holds no FP8 any more."""
    model.__dict__.pop("save_pretrained", None)


def _refuse(kind: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{kind}.save_pretrained: it would write FP8 codes as if they were weights; import "
        "moefp8.hf before moefp8.convert(model), or use moefp8.save_checkpoint(model, path)"
    )
