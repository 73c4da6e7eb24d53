"""Hypothesis strategies for what FP8 layers must survive: shapes, magnitudes, routings.

Hypothesis is imported when a strategy is made, so the rest of `moefp8.testing` works without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..routing import TopK

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


@contextmanager
def _way_to_install() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"moefp8.testing: strategies need hypothesis ({error}): pip install '.[testing]' in a "
            "clone"
        ) from error


class Spread(NamedTuple):
    """What `spread` draws: a seed and how far apart the magnitudes of blocks are.

    `tensor` makes activations of it, `weight` makes weights.
    """

    seed: int
    octaves: int
    zero_fraction: float

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal numbers [..., K] whose rows and 1x128 blocks differ by up to 2**octaves."""
        return self._blocks(1, *shape).to(dtype)

    def weight(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal numbers [..., N, K] whose 128x128 blocks differ by up to 2**octaves.

        So a scale that is applied to another block is seen; weights as modules draw them have
        nearly the same scale in each block.
        """
        return self._blocks(128, *shape).to(dtype)

    def _blocks(self, height: int, *shape: int) -> torch.Tensor:
        """Normal numbers [..., N, K] with a magnitude for each `height` x 128."""
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randn(shape, generator=generator)
        *rows, num_columns = shape
        if height > 1:
            rows[-1] = -(-rows[-1] // height)
        grid = *rows, -(-num_columns // 128)
        exponents = (torch.rand(grid, generator=generator) - 0.5) * self.octaves
        zeros = torch.rand(grid, generator=generator) < self.zero_fraction
        magnitudes = torch.exp2(exponents).masked_fill(zeros, 0.0)
        magnitudes = magnitudes.repeat_interleave(128, dim=-1)[..., :num_columns]
        if height > 1:
            magnitudes = magnitudes.repeat_interleave(height, dim=-2)[..., : shape[-2], :]
        return values * magnitudes


def spread(max_octaves: int = 24) -> "SearchStrategy[Spread]":
    """Activations and weights whose blocks differ by up to `max_octaves` powers of two.

    Some blocks are zero.
    """
    with _way_to_install():
        from hypothesis import strategies as st

    return st.builds(
        Spread,
        seed=st.integers(0, 2**32 - 1),
        octaves=st.integers(0, max_octaves),
        zero_fraction=st.sampled_from((0.0, 0.0, 0.3)),
    )


def sizes(max_size: int, min_size: int = 0) -> "SearchStrategy[int]":
    """A length: small, odd, and at, below and above multiples of 128."""
    with _way_to_install():
        from hypothesis import strategies as st

    multiples = range(0, max_size + 2, 128)
    edges = [n for m in multiples for n in (m - 1, m, m + 1) if min_size <= n <= max_size]
    return st.one_of(st.integers(min_size, max_size), st.sampled_from(edges or [min_size]))


def gemm_shapes(
    max_m: int = 70, max_n: int = 300, max_k: int = 400
) -> "SearchStrategy[tuple[int, int, int]]":
    """(M, N, K), zero included."""
    with _way_to_install():
        from hypothesis import strategies as st

    return st.tuples(sizes(max_m), sizes(max_n), sizes(max_k))


def routings(
    num_experts: int, top_k: int, max_tokens: int = 40, sentinels: bool = True
) -> "SearchStrategy[TopK]":
    """Router choices of 0 to `max_tokens` tokens: (top_k_index int64, top_k_weights fp32) [T, k].

    Ids of a token are distinct. All experts are chosen alike, or some never, or only `top_k` of
    them; with `sentinels`, some choices or all are held elsewhere (id E).
    """
    with _way_to_install():
        from hypothesis import strategies as st

    if not 1 <= top_k <= num_experts:
        raise ValueError(f"routings: top_k must be in [1, E] = [1, {num_experts}], got {top_k}")

    def routing(num_tokens: int, seed: int, num_favoured: int, sentinel_fraction: float) -> TopK:
        generator = torch.Generator().manual_seed(seed)
        favoured = torch.randperm(num_experts, generator=generator)[:num_favoured]
        preference = torch.rand(num_tokens, num_favoured, generator=generator)
        index = favoured[preference.argsort(dim=-1)[:, :top_k]]
        elsewhere = torch.rand(num_tokens, top_k, generator=generator) < sentinel_fraction
        weights = torch.rand(num_tokens, top_k, generator=generator) + 0.05
        weights = weights / weights.sum(-1, keepdim=True)
        return TopK(index.masked_fill(elsewhere, num_experts), weights)

    return st.builds(
        routing,
        num_tokens=st.integers(0, max_tokens),
        seed=st.integers(0, 2**32 - 1),
        num_favoured=st.sampled_from((num_experts, max(top_k, num_experts // 2), top_k)),
        sentinel_fraction=st.sampled_from((0.0, 0.2, 1.0) if sentinels else (0.0,)),
    )
