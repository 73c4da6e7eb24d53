"""How a converted model of a library that knows no FP8 modules, such as transformers, is saved.

Its `save_pretrained` would write codes, and a config.json that does not say so. A plug-in takes the
model over (`moefp8.hf` does for transformers). Saving is refused without a plug-in, and where a
part of the model was converted or swapped by hand.
"""

import sys
from collections.abc import Callable
from functools import partial
from traceback import walk_stack
from typing import Any, NoReturn

from torch import nn

from .conversion.conversion import Conversion

ADOPTERS: list[Callable[[nn.Module, Conversion], bool]] = []  # whether they took the model over
KNOWERS: list[Callable[[nn.Module], bool]] = []  # whether they save this model


def adopt(model: Any, conversion: Conversion) -> None:
    """Hand a model with FP8 modules to a plug-in that can save it, or let it refuse to be saved."""
    if not callable(getattr(model, "save_pretrained", None)):
        return
    if not any(getattr(module, "fp8_names", ()) for module in model.modules()):
        return
    if any(adopter(model, conversion) for adopter in ADOPTERS):
        release(model)
    elif conversion.swapped:
        model.save_pretrained = partial(_refuse, type(model).__name__)


def release(model: nn.Module) -> None:
    """Undo the refusal of `adopt`."""
    model.__dict__.pop("save_pretrained", None)


def check_saver(is_converted: bool) -> None:
    """Raise ValueError if an FP8 module's state is taken by a `save_pretrained` unaware of FP8.

    PEFT's is allowed, since it writes adapters alone. So is a model that makes its FP8 modules
    itself: it is no class of transformers, and `convert` did not make them (is_converted).
    """
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    savers = (x.f_locals.get("self") for x in frames if x.f_code.co_name == "save_pretrained")
    model = next(savers, None)
    if not isinstance(model, nn.Module) or any(knows(model) for knows in KNOWERS):
        return
    if not (is_converted or type(model).__module__.startswith("transformers.")):
        return
    is_of_peft = any(kind.__name__ == "PeftModel" for kind in type(model).__mro__)
    if not (is_of_peft or getattr(model, "_hf_peft_config_loaded", False)):
        _refuse(type(model).__name__)


def _refuse(kind: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{kind}.save_pretrained: it would write FP8 codes as if they were weights; import "
        "moefp8.hf before moefp8.convert(model) or moefp8.freeze(model), and convert or freeze the "
        "model as a whole (only= says what of it), or use moefp8.save_checkpoint(model, path)"
    )
