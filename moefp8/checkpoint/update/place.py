"""The place of a name in a model."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ..files.header import DTYPE_NAMES
from ..model.slots import ModelTensor, Role, Slot

PLAIN = {torch.Tensor, nn.Parameter}


@dataclass(frozen=True)
class Arrival:
    """The name, dtype and shape of a tensor that comes."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "Arrival":
        dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        return cls(name, dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return self.key


@dataclass(eq=False)
class Home:
    """One tensor of a model, under the first of its names.

    module, name: where it is. num_matrices: S of a stack [S, N, K] whose matrices are cut into
    blocks one by one, and of the stack of their scales; 0 of other tensors. parts: how many
    successive ones are one expert's: 2 for gate and up. quantizes: whether weights in 16 or 32
    bits become its codes. is_rearranged: as of `GroupedExperts`: other orders may come under its
    name. needed: the parts that come before it is complete.
    """

    module: str
    name: str
    owner: ModelTensor
    role: Role
    num_matrices: int = 0
    parts: int = 1
    quantizes: bool = False
    is_rearranged: bool = False
    needed: dict[str, None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Place:
    """The part of a model's tensor that a name stands for.

    home: the tensor; weight: the home of the weight that it scales, else the same. first, count: of
    its matrices in the stack; count is 0 outside of stacks. stored: this rank's slice of the first
    axis of a tensor that comes. dtypes: the allowed ones. is_weight, is_scale: whether it is an
    FP8 weight, or scales one. is_here: whether it is on this rank.
    """

    slot: Slot
    home: Home
    weight: Home
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    is_weight: bool
    is_scale: bool
    is_here: bool
    first: int = 0
    count: int = 0
    stored: slice | None = None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it fits and its values can be read."""
        return (
            type(tensor) in PLAIN
            and tensor.shape == self.shape
            and tensor.dtype in self.dtypes
            and not tensor.is_meta
            and tensor.layout is torch.strided
        )
