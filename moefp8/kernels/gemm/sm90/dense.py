"""The config of a dense GEMM, in a description. M tokens, N weights, K."""

from ...program import Record
from . import heuristic
from .config import GemmConfig
from .tuned import ConfigSource


def dense_config(
    r: Record, configs: ConfigSource, m: int, n: int, k: int, batch_invariant: bool
) -> GemmConfig:
    """`ConfigSource.dense` in a description, which also says up to which M the config holds."""
    config = configs.dense(m, n, k, batch_invariant)

    def largest(most: int) -> int:
        size = heuristic.deciding_size(m)
        while size < most and configs.dense(size + 1, n, k, batch_invariant) == config:
            size = heuristic.deciding_size(size + 1)
        return size

    r.hold(m, largest)
    return config
