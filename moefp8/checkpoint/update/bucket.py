"""What comes in one call, and what its names alone tell of it."""

from collections.abc import Iterable, Sequence
from itertools import count
from operator import attrgetter, eq
from typing import TypeVar

import torch

from ...kernels import E4M3
from .place import PLAIN, Home, Place

Came = tuple[str, Place, bool]  # what has filled a part: its name, its place, whether it is FP8

T = TypeVar("T")
_MAX_PARTS = 1 << 18
_NUMBERS = count()
_SHAPE, _DTYPE, _DEVICE = map(attrgetter, ("shape", "dtype", "device"))


class Bucket:
    """Tensors that fit their places, without the tensors.

    A trainer sends 20,000 tensors by the same names again and again, so a bucket is kept, and
    `takes` tells in a few passes whether it stands for other tensors as well.

    came: what fills each part. begun: the weights that it fills, or scales; whole: those of which
    it has all parts. stacks: of matrices of
    stacks that are to be quantized, which tensors they are and where they go, and their dtype if
    all have one. rest: place and
    number of each other tensor that is written.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        came: dict[str, Came],
        arrived: Iterable[tuple[Place, int]],
    ) -> None:
        self.shapes, self.dtypes = list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors))
        self.came, self.begun = came, dict[Home, None]()
        self._number, self._apart = next(_NUMBERS), set[int]()
        self.has_scales, self.has_codes = False, any(is_fp8 for _, _, is_fp8 in came.values())
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
        self.whole = [home for home in self.begun if home.needed.keys() <= came.keys()]

    def is_apart_from(self, other: "Bucket") -> bool:
        """Whether no part is in both; noted, since a trainer sends the same buckets again."""
        if other._number not in self._apart and self.came.keys().isdisjoint(other.came):
            self._apart.add(other._number)
        return other._number in self._apart

    def takes(self, tensors: Sequence[torch.Tensor], device: torch.device | None) -> bool:
        """Whether these are like those that it was made of, and their values can be read.

        device: that of all, by `device_of_all`.
        """
        return (
            set(map(type, tensors)) <= PLAIN
            and (device is not None or all(map(_is_readable, tensors)))
            and list(map(_DTYPE, tensors)) == self.dtypes
            and all(map(eq, map(_SHAPE, tensors), self.shapes))
        )


def device_of_all(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """The device where all tensors lie, each without gaps; None if that is not so of all."""
    device = _common(map(_DEVICE, tensors))
    if device is None or device.type == "meta":
        return None
    try:
        return device if all(map(torch.Tensor.is_contiguous, tensors)) else None
    except RuntimeError:  # by a sparse one
        return None


def _is_readable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _common(values: Iterable[T]) -> T | None:
    """What all are, if they are equal."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


class Buckets:
    """Buckets by the names in them, and the model's own names where a trainer has others."""

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
        """The bucket of these names, if it stands for these tensors as well, as `takes` says."""
        bucket = self._kept.get(_key(names, inner))
        return bucket if bucket is not None and bucket.takes(tensors, device) else None

    def keep(self, names: tuple[str, ...], inner: tuple[str, ...], bucket: Bucket) -> None:
        self._num_parts += len(bucket.came)
        if self._num_parts > _MAX_PARTS:  # a trainer that deals them anew each time
            self._kept, self._num_parts = {}, len(bucket.came)
        self._kept[_key(names, inner)] = bucket


def _key(names: tuple[str, ...], inner: tuple[str, ...]) -> tuple[str, ...]:
    return names if names is inner else names + inner
