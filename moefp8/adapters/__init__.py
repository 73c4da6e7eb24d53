"""LoRA beside frozen FP8 weights, of linears and of experts; its files are PEFT's."""

from .add import add_lora, remove_lora
from .load import load_lora
from .lora import LoRA
from .register import register_with_peft, tell_peft
from .save import lora_state_dict, save_lora

__all__ = [
    "LoRA",
    "add_lora",
    "load_lora",
    "lora_state_dict",
    "register_with_peft",
    "remove_lora",
    "save_lora",
]

tell_peft()
