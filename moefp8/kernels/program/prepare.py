"""Launches of a record: names become positions; buffers become places in the memory of a call."""

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
    tensor_map,
)
from .place import check_early, place
from .record import Place, Record, Step, TensorMap, Word


def prepare_launches(record: Record, device_index: int) -> Launches:
    """The launches of all steps, which take the addresses of `record.inputs` in that order.

    Raises ValueError as `check_early` does, and JitError if a kernel cannot be compiled, loaded or
    launched so.
    """
    check_early(record)
    offsets, num_bytes = place(record)
    memory = len(record.inputs)
    sources = {name: (memory, offset) for name, offset in offsets.items()}
    sources |= {name: (position, 0) for position, name in enumerate(record.inputs)}
    launches = [_launch_of(step, device_index, sources) for step in record.steps]
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


def _launch_of(step: Step, device_index: int, sources: dict[str, tuple[int, int]]) -> Launch:
    """sources: name of an input or buffer -> position of its address, and bytes after that."""
    maps = [join_maps([tensor_map(_box_of(x)) for x in parameter]) for parameter in step.maps]
    places: list[tuple[int, int, Place | Word]] = [
        (i, n * MAP_BYTES, x.tensor.place)
        for i, parameter in enumerate(step.maps)
        for n, x in enumerate(parameter)
    ]
    places += [(len(maps), x.offset, x.value) for x in step.addresses]
    pointers = []
    for argument, offset, (base, plus) in places:
        which, begin = sources[base]
        pointers.append(Pointer(argument, offset, Source(which, begin + plus)))
    return Launch(
        current_driver().load(step.kernel, device_index),
        step.grid,
        step.block,
        (*maps, step.structure),
        pointers,
        shared_bytes=step.shared_bytes,
        cluster=step.cluster,
        programmatic=step.programmatic,
    )


def _box_of(spec: TensorMap) -> Box:
    """The arguments of a tensor map: sizes innermost first."""
    x = spec.tensor
    pitch = pitch_of(x.shape, x.strides, x.element_size())
    strides, box = [pitch], [*spec.box]
    if x.ndim == 3:
        strides.append(x.strides[0] if x.shape[0] > 1 else pitch * x.shape[1])
        box.append(1)
    strides_bytes = tuple(stride * x.element_size() for stride in strides)
    return Box(x.dtype, x.shape[::-1], strides_bytes, tuple(box), spec.swizzle_bytes, spec.l2_bytes)
