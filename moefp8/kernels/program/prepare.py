"""Launches of a record: names become positions, buffers places in the memory of a call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..common.prepared import Launches
from ..common.tma_operands import pitch_of
from ..jit import (
    MAP_BYTES,
    Box,
    Launch,
    Pointer,
    Source,
    current_driver,
    join_maps,
    struct_of,
    tensor_map,
)
from .place import check_early, place
from .record import Arguments, Place, Record, Step, TensorMap, Word

_Locate = Callable[[Place | Word], Source]


def prepare_launches(record: Record, device_index: int) -> Launches:
    """The launches of all steps, which take the addresses of `record.inputs` in that order.

    Raises ValueError as `check_early` does, and JitError if a kernel cannot be compiled, loaded or
    launched so.
    """
    check_early(record)
    positions = {name: i for i, name in enumerate(record.inputs)}
    offsets, num_bytes = place(record)

    def locate(value: Place | Word) -> Source:
        if isinstance(value, Word):
            return Source(positions[value.name])
        if value.base in positions:
            return Source(positions[value.base], value.plus)
        return Source(len(positions), offsets[value.base] + value.plus)

    launches = [_launch_of(step, device_index, locate) for step in record.steps]
    return Launches(launches, num_bytes)


def prepare_launch(record: Record, device_index: int) -> Launch:
    """The launch of a record of one step, which needs no memory of a call. Raises likewise."""
    if len(record.steps) != 1 or record.buffers:
        raise ValueError(
            f"record: one step without buffers is one launch, got {len(record.steps)} steps and "
            f"{len(record.buffers)} buffers"
        )
    (launch,) = prepare_launches(record, device_index).launches
    return launch


def _launch_of(step: Step, device_index: int, locate: _Locate) -> Launch:
    pointers: list[Pointer] = []
    arguments: list[Any] = []
    for i, maps in enumerate(step.maps):
        arguments.append(join_maps(tensor_map(_box_of(x)) for x in maps))
        pointers += (Pointer(i, n * MAP_BYTES, locate(x.tensor.place)) for n, x in enumerate(maps))
    struct = struct_of(step.kernel.source)()
    found = _fill(struct, step.arguments, 0, locate)
    pointers += (Pointer(len(step.maps), offset, source) for offset, source in found)
    return Launch(
        current_driver().load(step.kernel, device_index),
        step.grid,
        step.block,
        (*arguments, struct),
        pointers,
        shared_bytes=step.shared_bytes,
        cluster=step.cluster,
        programmatic=step.programmatic,
    )


def _fill(
    struct: Any, arguments: Arguments, begin: int, locate: _Locate
) -> Iterable[tuple[int, Source]]:
    """Set the numbers of a structure; return where the addresses and words of a call go."""
    found: list[tuple[int, Source]] = []
    for name, value in arguments.items():
        member = getattr(type(struct), name, None)
        if member is None:
            raise ValueError(f"record: {type(struct).__name__} has no {name!r}")
        at = begin + member.offset
        if value is None:
            continue
        if isinstance(value, Place | Word):
            found.append((at, locate(value)))
        elif isinstance(value, Mapping):
            found += _fill(getattr(struct, name), value, at, locate)
        elif isinstance(value, Sequence):
            array = getattr(struct, name)
            size = member.size // len(array)
            for i, each in enumerate(value):
                if isinstance(each, Place | Word):
                    found.append((at + i * size, locate(each)))
                else:
                    array[i] = each
        else:
            setattr(struct, name, value)
    return found


def _box_of(of: TensorMap) -> Box:
    """What TMA is told: sizes innermost first."""
    x = of.tensor
    pitch = pitch_of(x.shape, x.strides, x.element_size())
    strides, box = [pitch], [*of.box]
    if x.ndim == 3:
        strides.append(x.strides[0] if x.shape[0] > 1 else pitch * x.shape[1])
        box.append(1)
    strides_bytes = tuple(stride * x.element_size() for stride in strides)
    return Box(x.dtype, x.shape[::-1], strides_bytes, tuple(box), of.swizzle_bytes, of.l2_bytes)
