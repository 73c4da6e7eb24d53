"""The GPUs that run our kernels: those of the architectures that have a GEMM."""

import torch

from .gemm.interface import Gemms
from .gemm.sm90.gemms import Sm90
from .jit import current_driver
from .program import Target

GEMMS: dict[str, type[Gemms]] = {"sm_90a": Sm90}

DEFAULT_SMS = 132  # as an H100 SXM, H200 and GH200 have; an H100 PCIe has 114, an H20 78


def target_with(arch: str, num_sms: int) -> Target:
    """A GPU that need not be here."""
    return Target(arch, num_sms, GEMMS[arch].of(num_sms))


ANY_TARGET = target_with("sm_90a", DEFAULT_SMS)  # of a record that is for no GPU in particular


def runs_kernels(device_index: int) -> bool:
    """Whether a GPU runs our kernels. -1: no GPU."""
    return current_driver().arch(device_index) in GEMMS


def gpus_with_kernels() -> list[int]:
    """The GPUs of this machine that run our kernels."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [i for i in range(count) if runs_kernels(i)]


def targets_here(num_sms: int | None = None) -> list[Target]:
    """A target for each kind of GPU here that runs our kernels, or of those with num_sms SMs.

    Without such a GPU: a Hopper GPU with num_sms SMs, or with the most common number of them.
    """
    gpus = gpus_with_kernels()
    if num_sms is not None:
        gpus = [i for i in gpus if current_driver().num_sms(i) == num_sms]
    targets = list(dict.fromkeys(map(target_of, gpus)))
    return targets or [target_with("sm_90a", num_sms or DEFAULT_SMS)]


def target_of(device_index: int) -> Target:
    """A GPU of this machine that runs our kernels, with what holds for it now."""
    driver = current_driver()
    arch = driver.arch(device_index)
    return Target(arch, driver.num_sms(device_index), GEMMS[arch].on(device_index))
