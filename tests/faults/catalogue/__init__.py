"""All faults, by room: `routing-3` is the third one of routing."""

from . import (
    adapters,
    experts,
    gemms,
    jit,
    linears,
    programs,
    quantization,
    ranks,
    routing,
    trained,
)

ROOMS = (
    quantization,
    gemms,
    routing,
    experts,
    trained,
    linears,
    adapters,
    ranks,
    programs,
    jit,
)
FAULTS = {
    f"{room.__name__.rpartition('.')[2]}-{i}": fault
    for room in ROOMS
    for i, fault in enumerate(room.FAULTS, 1)
}
