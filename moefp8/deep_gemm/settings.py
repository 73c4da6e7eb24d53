"""DeepGEMM's settings of a process. Only the number of SMs means anything to our kernels."""

import operator

import torch

from .. import kernels
from ..kernels.jit import current_driver

__all__ = [
    "get_compile_mode",
    "get_num_sms",
    "get_pdl",
    "get_tc_util",
    "set_block_size_multiple_of",
    "set_compile_mode",
    "set_ignore_compile_dims",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
]

_kept = {"tc_util": 100, "pdl": False, "compile_mode": 0}


def integer(op: str, name: str, value: int) -> int:
    """`value` as an int. A bool is refused, though Python counts it as an int.

    Raises:
        TypeError: it is a bool, or no whole number.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")
    return operator.index(value)


def set_num_sms(num_sms: int) -> None:
    """Let GEMMs run on at most `num_sms` SMs; 0 means all, as in DeepGEMM from July 2025 on.

    Raises:
        TypeError, ValueError: it is no int, negative, or more than the current GPU has.
    """
    count = integer("set_num_sms", "num_sms", num_sms)
    most = _device_sms()
    if count < 0 or 0 < most < count:
        raise ValueError(
            f"set_num_sms: num_sms must be 0, for all, or at most the {most or 'number of'} SMs of "
            f"the GPU, got {count}"
        )
    kernels.set_num_sms(count or None)


def get_num_sms() -> int:
    """The limit of `set_num_sms`; without one, as many SMs as the current GPU has, 0 for no GPU."""
    return current_driver().max_sms or _device_sms()


def _device_sms() -> int:
    has_gpu = torch.cuda.is_available()
    return current_driver().num_sms(torch.cuda.current_device()) if has_gpu else 0


# ---- Accepted and remembered, without meaning ----


def set_tc_util(new_tc_util: int) -> None:
    """Remember a percentage of the tensor cores' throughput; 0 means 100.

    Raises:
        TypeError, ValueError: it is no int from 0 to 100.
    """
    percentage = integer("set_tc_util", "new_tc_util", new_tc_util)
    if not 0 <= percentage <= 100:
        raise ValueError(f"set_tc_util: new_tc_util must be in [0, 100], got {percentage}")
    _kept["tc_util"] = percentage or 100


def get_tc_util() -> int:
    """What `set_tc_util` was given last, at first 100."""
    return _kept["tc_util"]


def set_pdl(new_enable_pdl: bool) -> None:
    """Remember whether dependent launches overlap; our kernels decide that by themselves."""
    _kept["pdl"] = bool(new_enable_pdl)


def get_pdl() -> bool:
    """What `set_pdl` was given last, at first False."""
    return bool(_kept["pdl"])


def set_compile_mode(new_compile_mode: int) -> None:
    """Remember SGLang's mode, which is 1 to compile only; our kernels are launched in any mode."""
    _kept["compile_mode"] = integer("set_compile_mode", "new_compile_mode", new_compile_mode)


def get_compile_mode() -> int:
    """What `set_compile_mode` was given last, at first 0."""
    return _kept["compile_mode"]


def set_ignore_compile_dims(new_value: bool) -> None:
    """Do nothing: none of our kernels is compiled for one size of a matrix."""


def set_block_size_multiple_of(new_value: int | tuple[int, int]) -> None:
    """Do nothing: our configs have tiles of their own."""
