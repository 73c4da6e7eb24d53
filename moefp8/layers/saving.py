"""What saves a converted model of a library that knows no FP8 modules, such as transformers.

Its `save_pretrained` would write codes without a word in config.json that they are codes. A plug-in
takes the model over (`moefp8.hf` does for transformers); without one, saving is refused. So it is
where a part of a model was converted, or swapped by hand, and the whole is saved.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from .conversion.conversion import Conversion

Adopter = Callable[[nn.Module, Conversion], bool]  # whether it took the model over
ADOPTERS: list[Adopter] = []
KNOWERS: list[Callable[[nn.Module], bool]] = []  # whether what saves the model knows of its codes


def adopt(model: Any, conversion: Conversion) -> None:
    """Hand a model that was converted, be it by hand before, to whoever saves it."""
    if not callable(getattr(model, "save_pretrained", None)):
        return
    if not any(getattr(module, "fp8_names", ()) for module in model.modules()):
        return
    if any(adopter(model, conversion) for adopter in ADOPTERS):
        release(model)
    elif conversion.swapped:
        model.save_pretrained = partial(_refuse, type(model).__name__)


def release(model: nn.Module) -> None:
    """Let a model save itself again: it is in other hands, or holds no FP8 any more."""
    model.__dict__.pop("save_pretrained", None)


def check_saver(is_converted: bool) -> None:
    """For an FP8 module whose state is asked for: raise ValueError if that is for the
    `save_pretrained` of a model that does not know of it. PEFT's writes adapters alone.

    is_converted: whether `convert` made the module. Any other may be of a model that makes FP8
    modules itself, which is no class of transformers.
    """
    frame = sys._getframe()
    while frame.f_code.co_name != "save_pretrained":
        if frame.f_back is None:
            return
        frame = frame.f_back
    model = frame.f_locals.get("self")
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
        "moefp8.hf before moefp8.convert(model), and convert the model as a whole (only= says what "
        "of it), or use moefp8.save_checkpoint(model, path)"
    )
