"""The tensors of one call: their places, and all else that does not depend on their values."""

from collections.abc import Iterable, Sequence
from itertools import count
from operator import attrgetter, eq
from typing import TypeVar

import torch

from ...kernels import E4M3
from .place import PLAIN, Home, Place

Filler = tuple[str, Place, bool]  # what has filled a part: its name, its place, whether it is FP8

T = TypeVar("T")
_MAX_PARTS = 1 << 18
_NUMBERS = count()
_SHAPE, _DTYPE, _DEVICE = map(attrgetter, ("shape", "dtype", "device"))


class Bucket:
    """The shapes, dtypes and places of tensors that fit a model, without the tensors.

    A trainer sends 20,000 tensors by the same names again and again, so a bucket is kept, and
    `takes` checks in a few passes whether it describes other tensors as well.

    fillers: what fills each part. begun: the weights that it fills, or scales; whole: the complete
    ones. stacks: home -> (numbers, places, dtype) of the tensors to quantize into a stack's
    matrices; the dtype is None if they have several. rest: (place, number) of each other tensor
    that is written.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        fillers: dict[str, Filler],
        arrived: Iterable[tuple[Place, int]],
    ) -> None:
        self.shapes, self.dtypes = list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors))
        self.fillers, self.begun = fillers, dict[Home, None]()
        self._number, self._apart = next(_NUMBERS), set[int]()
        self.has_scales, self.has_codes = False, any(is_fp8 for _, _, is_fp8 in fillers.values())
        stacks: dict[Home, tuple[list[int], list[int]]] = {}
        self.rest: list[tuple[Place, int]] = []
        for place, number in arrived:
            self.begun[place.weight] = None
            self.has_scales |= place.is_scale
            tensor = tensors[number]
            if place.count and place.is_weight and tensor.ndim == 2 and tensor.dtype is not E4M3:
                numbers, places = stacks.setdefault(place.home, ([], []))
                numbers.append(number)
                places.append(place.first)
            else:
                self.rest.append((place, number))
        self.stacks = {
            home: (numbers, places, _common(self.dtypes[i] for i in numbers))
            for home, (numbers, places) in stacks.items()
        }
        self.whole = [home for home in self.begun if home.needed.keys() <= fillers.keys()]

    def is_apart_from(self, other: "Bucket") -> bool:
        """Whether no part is in both; kept, since a trainer sends the same buckets again."""
        if other._number not in self._apart and self.fillers.keys().isdisjoint(other.fillers):
            self._apart.add(other._number)
        return other._number in self._apart

    def takes(self, tensors: Sequence[torch.Tensor], device: torch.device | None) -> bool:
        """Whether it describes these tensors, and their values can be read.

        device: as `device_of_all` returns it.
        """
        return (
            set(map(type, tensors)) <= PLAIN
            and (device is not None or all(map(_is_readable, tensors)))
            and list(map(_DTYPE, tensors)) == self.dtypes
            and all(map(eq, map(_SHAPE, tensors), self.shapes))
        )


def device_of_all(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """The device of all tensors; None if they have several, or one of them has gaps."""
    device = _common(map(_DEVICE, tensors))
    if device is None or device.type == "meta":
        return None
    try:
        return device if all(map(torch.Tensor.is_contiguous, tensors)) else None
    except RuntimeError:  # a sparse tensor raises it
        return None


def _is_readable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _common(values: Iterable[T]) -> T | None:
    """The value that all have, or None if they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


class Buckets:
    """Buckets by their names, and by the model's own names where a trainer has others."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Bucket] = {}
        self._num_parts = 0

    def find(
        self,
        names: tuple[str, ...],
        inner: tuple[str, ...],
        tensors: Sequence[torch.Tensor],
        device: torch.device | None,
    ) -> Bucket | None:
        """The bucket of these names, if it `takes` these tensors."""
        bucket = self._kept.get(_key(names, inner))
        return bucket if bucket is not None and bucket.takes(tensors, device) else None

    def keep(self, names: tuple[str, ...], inner: tuple[str, ...], bucket: Bucket) -> None:
        self._num_parts += len(bucket.fillers)
        if self._num_parts > _MAX_PARTS:  # a trainer may group tensors differently each time
            self._kept, self._num_parts = {}, len(bucket.fillers)
        self._kept[_key(names, inner)] = bucket


def _key(names: tuple[str, ...], inner: tuple[str, ...]) -> tuple[str, ...]:
    return names if names is inner else names + inner
