"""PEFT's layer of LoRA, with an `FP8Linear` as its base. It needs PEFT (`pip install peft`)."""

from typing import Any, NoReturn

import torch
from peft.tuners.lora import Linear
from torch import nn

from ..layers import FP8Linear


class PeftFP8Linear(Linear):
    """PEFT's `lora.Linear`, whose base is an `FP8Linear` until `moefp8.dequantize` swaps that."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        """PEFT would cast adapters to the dtype of the base, whose codes are FP8."""
        place: Any = self.get_base_layer().weight.device if device is None else device
        for name in self.adapter_layer_names:
            adapters = getattr(self, name, None)
            if isinstance(adapters, nn.ModuleDict) and adapter_name in adapters:
                adapters[adapter_name].to(place)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        self._check_base("merged into")
        super().merge(*args, **kwargs)

    def unmerge(self) -> None:
        self._check_base("taken out of")
        super().unmerge()

    def _check_base(self, what: str) -> None:
        if isinstance(self.get_base_layer(), FP8Linear):
            _refuse(f"adapters cannot be {what} FP8 codes")


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"PeftFP8Linear: {why}; moefp8.dequantize(model) gives BF16 weights first")
