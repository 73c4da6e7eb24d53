"""What the grouped GEMMs are timed at: how many tokens each group has, and shapes of its weights.

All numbers of tokens are drawn once and for all: every generator is seeded with 0.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from benchmarks import peers

CONTIGUOUS, MASKED = "contiguous", "masked"
DEEPSEEK_V3 = (4096, 7168), (7168, 2048)  # N x K
QWEN3_30B = (1536, 2048), (2048, 768)


def spread(groups: int, mean: int) -> list[int]:
    """Numbers of 0.7 to 1.3 times the mean each."""
    g = torch.Generator().manual_seed(0)
    return [
        max(1, int(mean * (0.7 + 0.6 * torch.rand(1, generator=g).item()))) for _ in range(groups)
    ]


def between(groups: int, least: int, most: int) -> list[int]:
    g = torch.Generator().manual_seed(0)
    return torch.randint(least, most + 1, (groups,), generator=g).tolist()


def zipf(groups: int, mean: int) -> list[int]:
    """Numbers in random order, `mean` on average: the r-th largest is about 1/r of the largest."""
    shares = [1 / rank for rank in range(1, groups + 1)]
    ends = [round(groups * mean * share / sum(shares)) for share in accumulate(shares)]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(0))
    return [counts[i] for i in order.tolist()]


@dataclass(frozen=True)
class Setting:
    """Tokens of each group, and the weights that they are multiplied by.

    Attributes:
        form: how the tokens lie, `CONTIGUOUS` or `MASKED`.
        loads: the numbers of tokens, in words.
        goal: how many times as fast as DeepGEMM ours is to be, at each shape; or None. Where
            a call takes 100 us or more, it counts without rest.
        max_m: the rows of each group in the masked form.
    """

    form: str
    loads: str
    counts: list[int]
    shapes: tuple[tuple[int, int], ...]
    goal: float | None
    max_m: int = 0

    def __str__(self) -> str:
        return f"{self.form} {self.loads}"

    @property
    def name(self) -> str:
        """The setting without a space, for a command line."""
        return str(self).replace(" x ", "x").replace(" ", "-")

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def expected_m(self) -> int:
        return max(1, round(self.num_tokens / len(self.counts)))


LOPSIDED = [0] * 30 + [3000] + [7] * 32
GATE_AND_UP = DEEPSEEK_V3[:1]

SETTINGS = (
    Setting(CONTIGUOUS, "4 x 8192", spread(4, 8192), DEEPSEEK_V3, 1.10),
    Setting(CONTIGUOUS, "8 x 4096", spread(8, 4096), DEEPSEEK_V3, 1.10),
    Setting(CONTIGUOUS, "32 x 256", spread(32, 256), DEEPSEEK_V3, 1.10),
    Setting(CONTIGUOUS, "8 x 1024", spread(8, 1024), GATE_AND_UP, None),
    Setting(CONTIGUOUS, "4 x 5120", spread(4, 5120), GATE_AND_UP, None),
    Setting(CONTIGUOUS, "16 x 2560", spread(16, 2560), GATE_AND_UP, None),
    Setting(CONTIGUOUS, "63 lopsided", LOPSIDED, DEEPSEEK_V3, 1.15),
    Setting(CONTIGUOUS, "256 x 32 Zipf", zipf(256, 32), DEEPSEEK_V3, 1.30),
    Setting(CONTIGUOUS, "128 x 8..64", between(128, 8, 64), QWEN3_30B, 1.30),
    Setting(MASKED, "128 x 8..64", between(128, 8, 64), QWEN3_30B, None, max_m=128),
    Setting(MASKED, "1 x 1024", spread(1, 1024), DEEPSEEK_V3, 1.15, max_m=4096),
    Setting(MASKED, "2 x 512", spread(2, 512), DEEPSEEK_V3, 1.15, max_m=4096),
    Setting(MASKED, "4 x 256", spread(4, 256), DEEPSEEK_V3, 1.15, max_m=4096),
    Setting(MASKED, "32 x 16", spread(32, 16), DEEPSEEK_V3, 1.03, max_m=128),
    Setting(MASKED, "64 x 4", spread(64, 4), DEEPSEEK_V3, 1.03, max_m=128),
)


class Case(NamedTuple):
    """Only tokens count as work, and only weights of groups that have a token; no padding."""

    setting: Setting
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.setting} {self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.setting.num_tokens * self.n * self.k

    def num_bytes(self, operands: str) -> int:
        """Each operand and its scales read once, and the result written once."""
        counts = [count for count in self.setting.counts if count]
        return sum(peers.Case(count, self.n, self.k).num_bytes(operands) for count in counts)

    @property
    def is_long(self) -> bool:
        """Whether it takes about 300 us or more: at 1000 TFLOP/s, and at 4 TB/s."""
        return max(self.flops / 1e9, self.num_bytes("block_scaled") / 4e6) >= 300
