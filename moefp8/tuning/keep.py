"""Keep what was measured, in the file that `kernels/gemm/sm90/tuned.py` reads."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ..kernels.gemm.sm90.tuned import (
    BROKEN,
    Config,
    Layer,
    Table,
    checksum,
    file_name,
    measured,
    stored,
)
from ..kernels.jit import write_beside_kernels


def keep(device_index: int, found: Mapping[Layer, Mapping[int, Config | None]]) -> str:
    """Store `found` with what is there of other layers; return the file's path. Raises OSError."""
    try:
        before = stored(device_index).configs
    except BROKEN:
        before = {}
    data = json.dumps(to_json(Table({**before, **found})), indent=1).encode()
    path = write_beside_kernels(file_name(device_index), checksum(data) + b"\n" + data)
    measured.cache_clear()
    return str(path)


def to_json(table: Table) -> list[dict[str, Any]]:
    return [
        {
            "layer": type(layer).__name__.lower(),
            **layer._asdict(),
            "tokens": {str(size): _plain(config) for size, config in of_sizes.items()},
        }
        for layer, of_sizes in table.configs.items()
    ]


def _plain(config: Config | None) -> Any:
    if isinstance(config, tuple):
        return [_plain(x) for x in config]
    if config is None:
        return None
    told = asdict(config)
    return {x.name: told[x.name] for x in fields(config) if told[x.name] != x.default}
