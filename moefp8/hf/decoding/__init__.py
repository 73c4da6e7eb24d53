"""Decoding in CUDA graphs.

Reading order: `graphs` (what a user calls), `step` (what a graph replays), `fusion` (what
`compile=True` makes of a step: `blocks`, `attention`, `merged`, `routers`).
"""

from .graphs import DecodingGraphs

__all__ = ["DecodingGraphs"]
