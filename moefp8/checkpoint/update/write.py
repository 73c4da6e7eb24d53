"""Write the tensors of a trainer into a model, on the current streams of their devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...functional.training.weights import requantize
from ...functional.transposed import kept_transposed, refresh_transposed
from ...kernels import BLOCK, E4M3
from ...quant import quantize_128x128
from ...quant.each import Stack, check_stack, quantize_each
from ..files.names import SCALE_SUFFIX, scale_of_weight
from ..model.slots import ModelTensor, Role
from .bucket import Bucket
from .place import Home, Place
from .places import Places

FOLLOWERS: list[Callable[[nn.Module], Iterable[torch.Tensor]]] = []
"""Each updates tensors that are made of a model's weights, in the same memory, where these have
changed, and yields them."""

_DTYPE, _IS_NEG = attrgetter("dtype"), torch.Tensor.is_neg
_AT_ONCE = 256  # matrices of one launch; so many that are copied first take memory at once


class _Stack:
    """An FP8 weight and its `codes`, as kernels write them: also W^T, if it is kept."""

    def __init__(self, home: Home, weight: torch.Tensor, scale_inv: torch.Tensor) -> None:
        self.weight, size = weight, home.num_matrices
        transposed = kept_transposed(weight, home.parts)
        self.codes = Stack(
            weight.detach().view(size, -1, weight.shape[-1]),
            scale_inv.detach().view(size, -1, scale_inv.shape[-1]),
            transposed[None] if transposed is not None and transposed.ndim == 2 else transposed,
            home.parts,
        )
        check_stack(self.codes)

    def quantize(
        self, matrices: list[torch.Tensor], places: list[int], dtype: torch.dtype | None
    ) -> None:
        """Quantize matrices [N, K] into their places.

        dtype: of all matrices, if a kernel can read all of them in their layouts.
        """
        # Only the imaginary parts of complex numbers are negated later; none have BF16.
        if dtype is torch.bfloat16 or (dtype is not None and not any(map(_IS_NEG, matrices))):
            quantize_each(self.codes, matrices, places)
            return
        for dtype in set(map(_DTYPE, matrices)):
            chosen = [i for i, x in enumerate(matrices) if x.dtype is dtype]
            for first in range(0, len(chosen), _AT_ONCE):
                some = chosen[first : first + _AT_ONCE]
                held = [self._held(matrices[i]) for i in some]
                quantize_each(self.codes, held, [places[i] for i in some])

    def quantize_stack(self, place: Place, tensor: torch.Tensor) -> None:
        """Quantize a tensor [E, rows, K] into its place."""
        held = tensor if place.stored is None else tensor[place.stored]
        matrices = held.reshape(place.count, *self.codes.data.shape[1:])
        places = range(place.first, place.first + place.count)
        quantize_each(self.codes, [self._held(matrices)], places)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a kernel can read it."""
        return tensor.to(self.codes.data.device).contiguous().resolve_neg()


class Writer:
    """The tensors of a model while it is updated."""

    def __init__(
        self, model: nn.Module, places: Places, tensors: dict[ModelTensor, torch.Tensor]
    ) -> None:
        self.model, self.places, self.tensors = model, places, tensors
        self._stacks: dict[Home, _Stack] = {}
        self._matrices: dict[Home, tuple[torch.Tensor, ...]] = {}
        self._masters: set[Home] = set()
        self._copied: set[Home] = set()  # FP8 weights whose W^T was not written with them
        # Parts of master weights whose codes, or scales, were written; parts in both are scaled.
        self._codes: set[str] = set()
        self._scales: set[str] = set()

    @torch.inference_mode()  # else tensors that were made in this mode could not be written to
    def write(
        self, bucket: Bucket, tensors: Sequence[torch.Tensor], device: torch.device | None
    ) -> None:
        """Write the tensors of a bucket. device: as `device_of_all` returns it."""
        copies: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        halves: list[str] = []
        written: set[ModelTensor] = set()
        for home, (numbers, places, dtype) in bucket.stacks.items():
            stack, chosen = self._stack_of(home), [tensors[i] for i in numbers]
            stack.quantize(chosen, places, dtype if stack.codes.data.device == device else None)
        for place, number in bucket.rest:
            home, tensor = place.home, tensors[number]
            if place.count and place.is_weight and tensor.dtype is not E4M3:
                self._stack_of(home).quantize_stack(place, tensor)
                continue
            written.add(home.owner)
            if place.is_weight:
                self._copied.add(home)
                if tensor.dtype is not E4M3:
                    self._quantize_whole(place, tensor)
                    continue
            if place.weight.role is Role.MASTER:
                self._masters.add(place.weight)
                halves += self._note(place, tensor)
            for target, source in self._copies(place, tensor):
                key = target.dtype, target.device, source.dtype, source.device
                targets, sources = copies.setdefault(key, ([], []))
                targets.append(target)
                sources.append(source)
        # In this mode, a write to a view of another dtype counts no version of its base.
        changed = [self.tensors[owner] for owner in written]
        torch.autograd.graph.increment_version([x for x in changed if not x.is_inference()])
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)
        for part in dict.fromkeys(halves):
            if part in self._codes and part in self._scales:
                self._scale(part)

    @torch.inference_mode()  # else tensors that were made in this mode could not be written to
    def follow(self) -> None:
        """Update all tensors that are made of changed weights, in their memory."""
        weights = [x for x in self.tensors.values() if x.dtype == E4M3]
        for follower in FOLLOWERS:
            weights += [x for x in follower(self.model) if x.dtype == E4M3]
        written = {
            home: stack.weight
            for home, stack in self._stacks.items()
            if stack.codes.transposed is not None and home not in self._copied
        }
        refresh_transposed(weights, written.values())
        requantize([self.tensors[home.owner] for home in self._masters])

    def _stack_of(self, home: Home) -> _Stack:
        if home not in self._stacks:
            weight, scale = self.tensors[home.owner], self.places.scales_of(home)
            self._stacks[home] = _Stack(home, weight, self.tensors[scale.owner])
        return self._stacks[home]

    def _quantize_whole(self, place: Place, tensor: torch.Tensor) -> None:
        """Quantize a whole weight and write this rank's part: a block may cross ranks."""
        slot, inventory = place.slot, self.places.inventory
        weight = self.tensors[slot.owner]
        num_parts = 1 if slot.index else place.home.parts
        halved = tensor.to(weight.device).unflatten(-2, (num_parts, -1))
        data, scale_inv = (x.flatten(-3, -2) for x in quantize_128x128(halved))
        scale_slot = inventory.slots[scale_of_weight(slot.name)]
        scales = self.tensors[scale_slot.owner].detach()
        for there, here in slot.pieces:
            _bytes(weight.detach()[here]).copy_(_bytes(data[there]))
        for there, here in scale_slot.pieces:
            scales[here] = scale_inv[there]

    def _note(self, place: Place, tensor: torch.Tensor) -> Iterable[str]:
        """Note codes or scales of a master weight; returns the parts that may be scaled now."""
        if place.is_scale:
            owner = place.slot.owner
            if owner not in self.tensors:
                device = self.tensors[place.weight.owner].device
                self.tensors[owner] = torch.empty_like(owner.tensor, device=device)
            parts = [part.removesuffix(SCALE_SUFFIX) for part in place.parts]
            self._scales.update(parts)
            return parts
        if tensor.dtype is E4M3:
            self._codes.update(place.parts)
            return place.parts
        return ()

    def _copies(
        self, place: Place, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs (target, source) of copies."""
        if place.is_weight:
            tensor = _bytes(tensor)
        if place.count and tensor.ndim == 2:
            yield self._matrices_of(place.home)[place.first], tensor
            return
        own = self.tensors[place.slot.owner].detach()
        own = _bytes(own) if place.is_weight else own
        for there, here in place.slot.pieces:
            yield own[here], tensor[there]

    def _matrices_of(self, home: Home) -> tuple[torch.Tensor, ...]:
        if home not in self._matrices:
            own = self.tensors[home.owner].detach()
            own = _bytes(own) if home.role is Role.WEIGHT else own
            self._matrices[home] = own.view(home.num_matrices, -1, own.shape[-1]).unbind()
        return self._matrices[home]

    def _scale(self, part: str) -> None:
        """Multiply the codes that a part of a master weight holds, exactly, by their scales."""
        inventory = self.places.inventory
        slot, scale_slot = inventory.parts[part], inventory.scale_parts[part + SCALE_SUFFIX]
        weight, scales = (self.tensors[x.owner].detach() for x in (slot, scale_slot))
        rows, columns = slot.shape
        each = scales[scale_slot.index].repeat_interleave(BLOCK, dim=0)[:rows]
        each = each.repeat_interleave(BLOCK, dim=1)[:, :columns]
        for there, here in slot.pieces:
            weight[here] = weight[here].float() * each[there]


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)
