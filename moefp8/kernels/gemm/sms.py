"""How many SMs of a GPU GEMMs may use."""

from typing import NamedTuple

import torch

from ..jit import current_driver


class Sms(NamedTuple):
    """How many SMs of a GPU may be busy, and how many it has."""

    busy: int
    all: int


def set_num_sms(num_sms: int | None) -> None:
    """Let GEMMs run on at most `num_sms` SMs of a GPU, in this process; None: on all.

    The others are for what runs beside them, e.g. communication. More than a GPU has means all.

    Raises:
        TypeError: `num_sms` is neither an int nor None.
        ValueError: `num_sms` is below 1.
    """
    if num_sms is not None and (isinstance(num_sms, bool) or not isinstance(num_sms, int)):
        raise TypeError(f"set_num_sms: num_sms must be an int, or None for all, got {num_sms!r}")
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"set_num_sms: num_sms must be at least 1, or None for all, got {num_sms}")
    current_driver().max_sms = num_sms


def get_num_sms() -> int:
    """The limit of `set_num_sms`; without one, as many SMs as the current GPU has.

    Raises:
        RuntimeError: there is neither a limit nor a GPU.
    """
    driver = current_driver()
    if driver.max_sms is not None:
        return driver.max_sms
    if not torch.cuda.is_available():
        raise RuntimeError("get_num_sms: there is no GPU, and set_num_sms has set no limit")
    return driver.num_sms(torch.cuda.current_device())


def busy_sms(device_index: int) -> Sms:
    driver = current_driver()
    all_sms = driver.num_sms(device_index)
    return Sms(min(all_sms, driver.max_sms or all_sms), all_sms)
