"""Try an experts module with random weights, and put it back as it was."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .source_code import Reach, in_reach
from .stacks import Stacks, stacks_of

_PERIOD = 65537  # random weights repeat after so many, a prime, so that rows differ
# Of parameters with more than _SMALL elements, the matrices of experts overlap in memory: each
# begins _STEP elements after the one before.
_SMALL, _STEP = 1 << 20, 8
_OF_MODULE = frozenset(vars(nn.Module()))


Changed = Callable[[Reach], str]


@contextmanager
def random_weights(
    module: nn.Module, random: torch.Generator, training: bool = False, widest: int | None = None
) -> Iterator[tuple[Stacks, Changed]]:
    """Give an experts module random weights, as `drawn_weights` does; yield its stacks as well.

    widest: H and I are at most that, also in attributes.
    """
    shapes, sizes = _narrowed(module, widest)
    with drawn_weights(module, random, training, shapes, sizes) as (_, changed):
        stacks = stacks_of(module)
        assert stacks is not None
        yield stacks, changed


@contextmanager
def drawn_weights(
    module: nn.Module,
    random: torch.Generator,
    training: bool,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[int, int],
    lists: Sequence[Sequence[str]] = (),
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[list[torch.Tensor], Changed]]:
    """Give `module` random weights, on the CPU if it is on meta, and set its mode.

    Its own weights are not read. Those of a large module take the memory of one expert.

    shapes: of parameters that have another one than now, by name. sizes: replaces integers in
    attributes. lists: names of parameters of one shape, which are drawn as one stack. dtype: of
    all parameters; None: what they have, and FP32 on meta.

    Yield the stacks of lists, and a function that names what a forward has changed, or "": in the
    module, or since `in_reach` gave what it takes. In the end all in the module is as before.
    """
    before = [
        (path, child, dict(vars(child)), dict(child._parameters), dict(child._buffers))
        for path, child in module.named_modules()
    ]
    is_intact: dict[str, Callable[[torch.Tensor], bool]] = {}
    stacks: list[torch.Tensor] = []
    slices: dict[str, torch.Tensor] = {}
    try:
        for names in lists:
            x = module.get_parameter(names[0])
            shape = (len(names), *shapes.get(names[0], x.shape))
            stack, is_intact[names[0]] = _random_like(x, shape, random, dtype)
            stacks.append(stack)
            slices.update(zip(names, stack, strict=True))
        for path, child, _, parameters, buffers in before:
            child.training = training
            vars(child).update(
                (name, _resized(sizes, x)) for name, x in attributes_of(child).items()
            )
            for name, x in parameters.items():
                whole = f"{path}.{name}".lstrip(".")
                if whole in slices:
                    child._parameters[name] = slices[whole]
                    is_intact.setdefault(whole, partial(_is_at, slices[whole].data_ptr()))
                elif x is not None:
                    shape = shapes.get(whole, tuple(x.shape))
                    child._parameters[name], is_intact[whole] = _random_like(
                        x, shape, random, dtype
                    )
            child._buffers.update(
                (name, None if x is None else x.clone()) for name, x in buffers.items()
            )
        for _, child, *_ in before:  # a forward that sets `.data` must not change the stacks
            child._parameters.update(
                (name, None if x is None else nn.Parameter(x, requires_grad=False))
                for name, x in child._parameters.items()
            )

        def changed(reach: Reach) -> str:
            for path, child, held, _, buffers in before:
                for name, value in attributes_of(child).items():
                    if name not in held or fingerprint(value) != fingerprint(
                        _resized(sizes, held[name])
                    ):
                        return f"{path}.{name}".lstrip(".")
                for name, x in buffers.items():
                    if x is not None and not _is_same(x, child._buffers.get(name)):
                        return f"{path}.{name}".lstrip(".")
            weights = dict(module.named_parameters())
            for name, check in is_intact.items():
                if name not in weights or not check(weights[name]):
                    return name
            values, after, absent = reach.values, in_reach(module, reach.names).values, object()
            differing = (
                path
                for path in {**values, **after}
                if fingerprint(values.get(path, absent)) != fingerprint(after.get(path, absent))
            )
            return next(differing, "")

        yield stacks, changed
    finally:
        for _, child, held, parameters, buffers in before:
            vars(child).clear()
            vars(child).update(held)
            child._parameters.update(parameters)
            child._buffers.update(buffers)


def _is_at(address: int, x: torch.Tensor) -> bool:
    return x.data_ptr() == address


def _is_same(x: torch.Tensor, y: torch.Tensor | None) -> bool:
    if x.is_meta:
        return True
    return y is not None and x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def _narrowed(
    module: nn.Module, widest: int | None
) -> tuple[dict[str, tuple[int, ...]], dict[int, int]]:
    """The shapes of stacks whose H and I are at most `widest`, and the sizes that these replace."""
    stacks = stacks_of(module)
    if stacks is None:
        raise TypeError(f"{type(module).__name__} holds no stacks of experts")
    e, h, i = stacks.down.shape
    narrow_h, narrow_i = (min(size, widest or size) for size in (h, i))
    sizes = {2 * i: 2 * narrow_i, i: narrow_i, h: narrow_h}
    sizes.pop(e, None)  # it is more likely the number of experts
    return stacks.shapes_of(narrow_h, narrow_i), sizes


def _resized(sizes: Mapping[int, int], value: Any) -> Any:
    return sizes.get(value, value) if type(value) is int else value


def _random_like(
    parameter: torch.Tensor,
    shape: tuple[int, ...],
    random: torch.Generator,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], bool]]:
    """Random weights, and a function that returns whether a tensor still has them, in place.

    If they are many, the matrices of experts overlap in memory. Each matrix is contiguous: a
    product would copy a strided one.
    """
    is_small = math.prod(shape) <= _SMALL
    inner = math.prod(shape[1:])
    size = math.prod(shape) if is_small else (shape[0] - 1) * _STEP + inner
    period = torch.randn(
        min(size, _PERIOD), generator=random, dtype=torch.float32, device="cpu"
    ) / math.sqrt(shape[-1])
    if parameter.is_meta:
        period = period.to(dtype or torch.float32)
    else:
        period = period.to(parameter.device, dtype or parameter.dtype)
    values = period.new_empty(size)
    for part in values.split(_PERIOD):
        part.copy_(period[: len(part)])

    def is_intact(weights: torch.Tensor) -> bool:
        parts = values.split(_PERIOD) if weights.data_ptr() == values.data_ptr() else ()
        return bool(parts) and all(torch.equal(x, period[: len(x)]) for x in parts)

    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return values.as_strided(shape, strides if is_small else (_STEP, *strides[1:])), is_intact


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes that not every module has."""
    return {name: x for name, x in vars(module).items() if name not in _OF_MODULE}


def fingerprint(value: Any) -> str:
    """A text that is equal for equal plain values, and for any other only for the very same."""
    if isinstance(value, tuple):
        return f"({', '.join(map(fingerprint, value))})"
    if isinstance(value, int | float | complex | str | bytes | torch.dtype | None):
        return f"{type(value).__name__} {value!r}"
    return f"at {id(value)}"
