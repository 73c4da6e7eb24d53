"""Descriptions in tests: records without a GPU, and launches of one kernel or a few."""

from collections.abc import Callable, Iterable, Sequence

import torch

from moefp8.kernels.jit import Launch
from moefp8.kernels.program import Place, Record, prepare_launches
from moefp8.kernels.targets import target_of, target_with
from tests.gpu import ARCH, NUM_SMS

TARGET = target_with(ARCH, NUM_SMS)


class _Given(Record):
    """A record in which a buffer with the name of an input is that input: a test sees it."""

    def buffer(self, name: str, num_bytes: int) -> Place:
        return Place(name) if name in self.inputs else super().buffer(name, num_bytes)


def launches_of(
    describe: Callable[[Record], object], inputs: Sequence[str], device_index: int = -1
) -> Sequence[Launch]:
    """The launches of what `describe` writes, which take the addresses of `inputs`.

    All buffers must have the names of inputs. Inputs are older than what the stream does.
    """
    r = _Given(target_of(device_index), inputs, older=frozenset(inputs))
    describe(r)
    assert not r.buffers
    return prepare_launches(r, device_index).launches


def run(describe: Callable[[Record], object], **inputs: torch.Tensor | int | None) -> None:
    """Launch what `describe` writes, with inputs by name: tensors, and words as numbers."""
    tensors = [x for x in inputs.values() if isinstance(x, torch.Tensor)]
    device_index = tensors[0].get_device()
    launches = launches_of(describe, tuple(inputs), device_index)
    for launch in launches:
        launch.on(device_index, addresses_of(inputs.values()))


def addresses_of(inputs: Iterable[torch.Tensor | int | None]) -> tuple[int, ...]:
    return tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in inputs)
