"""What comes in one call, and what its names alone tell of it."""

from collections.abc import Iterable, Sequence
from itertools import count
from operator import attrgetter, eq

import torch

from ...kernels import E4M3
from .place import PLAIN, Home, Place

Came = tuple[str, Place, bool]  # what has filled a part: its name, its place, whether it is FP8

_MAX_PARTS = 1 << 18
_NUMBERS = count()
_SHAPE, _DTYPE, _DEVICE, _LAYOUT = map(attrgetter, ("shape", "dtype", "device", "layout"))


class Bucket:
    """Tensors that fit their places, without the tensors.

    A trainer sends 20,000 tensors by the same names again and again, so a bucket is kept, and
    `takes` tells in a few passes whether it stands for other tensors as well.

    came: what fills each part. begun: the weights that it fills, or scales; whole: those of which
    it has all parts. stacks: of matrices of
    stacks that are to be quantized, which tensors they are and where they go. rest: place and
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
        self.stacks: dict[Home, tuple[list[int], list[int]]] = {}
        self.rest: list[tuple[Place, int]] = []
        for place, number in arrived:
            self.begun[place.weight] = None
            self.has_scales |= place.is_scale
            tensor = tensors[number]
            if place.count and place.is_weight and tensor.ndim == 2 and tensor.dtype is not E4M3:
                numbers, places = self.stacks.setdefault(place.home, ([], []))
                numbers.append(number)
                places.append(place.first)
            else:
                self.rest.append((place, number))
        self.whole = [home for home in self.begun if home.needed.keys() <= came.keys()]

    def is_apart_from(self, other: "Bucket") -> bool:
        """Whether no part is in both; noted, since a trainer sends the same buckets again."""
        if other._number not in self._apart and self.came.keys().isdisjoint(other.came):
            self._apart.add(other._number)
        return other._number in self._apart

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are like those that it was made of, and their values can be read."""
        return (
            set(map(type, tensors)) <= PLAIN
            and set(map(_LAYOUT, tensors)) <= {torch.strided}
            and not any(device.type == "meta" for device in set(map(_DEVICE, tensors)))
            and list(map(_DTYPE, tensors)) == self.dtypes
            and all(map(eq, map(_SHAPE, tensors), self.shapes))
        )


class Buckets:
    """Buckets by the names in them, and the model's own names where a trainer has others."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Bucket] = {}
        self._num_parts = 0

    def find(
        self, names: tuple[str, ...], inner: tuple[str, ...], tensors: Sequence[torch.Tensor]
    ) -> Bucket | None:
        """The bucket of these names, if it stands for these tensors as well."""
        bucket = self._kept.get(_key(names, inner))
        return bucket if bucket is not None and bucket.takes(tensors) else None

    def keep(self, names: tuple[str, ...], inner: tuple[str, ...], bucket: Bucket) -> None:
        self._num_parts += len(bucket.came)
        if self._num_parts > _MAX_PARTS:  # a trainer that deals them anew each time
            self._kept, self._num_parts = {}, len(bucket.came)
        self._kept[_key(names, inner)] = bucket


def _key(names: tuple[str, ...], inner: tuple[str, ...]) -> tuple[str, ...]:
    return names if names is inner else names + inner
