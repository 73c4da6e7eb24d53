"""The configurations that GEMMs and layers of experts may be given."""

import itertools
from functools import cache

from moefp8.kernels.gemm.sm90 import heuristic
from moefp8.kernels.gemm.sm90.config import GemmConfig, is_possible, with_most_stages
from moefp8.kernels.gemm.sm90.expert_configs import choose_experts_configs
from tests.gpu import NUM_SMS
from tests.kernels.gemm.sm90 import families

# Configurations are chosen for these numbers of tokens, and these weights, [N, K].
SOME_M = [1, 2, 8, 9, 16, 17, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 300, 512, 700, 1024, 4096]
SOME_M += [10**6, 25, 40, 72, 80, 88, 104, 112, 120]
SHAPES = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
SHAPES += [(1, 1), (8, 128), (72, 200), (136, 144), (576, 7168), (1536, 1536), (129280, 7168)]


def configs() -> list[GemmConfig]:
    """All that may be chosen for some of these M, and any N and K."""
    all_of_them = (config for m in SOME_M for config in heuristic.candidates(m))
    filled = dict.fromkeys(map(with_most_stages, all_of_them))
    return [config for config in filled if is_possible(config, 1 << 20)]


def grouped_configs() -> list[GemmConfig]:
    """Some of those that are chosen, and every family."""
    asked = itertools.product(SOME_M, (1, 8, 32, 256), SHAPES)
    choose = heuristic.choose_grouped_config
    chosen = (choose(m, max(128, m), g, *n_k, NUM_SMS) for m, g, n_k in asked)
    return list(dict.fromkeys((*chosen, *families.GROUPED_FAMILIES.values())))


EXPERTS = {  # E, k, H, I
    "DeepSeek-V3": (256, 8, 7168, 2048),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Mixtral-8x7B": (8, 2, 4096, 14336),
}


@cache
def experts_configs() -> list[GemmConfig]:
    """All that are chosen for gate and up, and for down."""
    pairs = (
        choose_experts_configs(load, groups, h, i, num_sms, exact=exact)
        for e, k, h, i in EXPERTS.values()
        for groups, exact in ((1, True), (1, False), (k, False), (e, False))
        for load, num_sms in itertools.product(range(1, 4097), (1, NUM_SMS))
    )
    return list(dict.fromkeys(itertools.chain.from_iterable(dict.fromkeys(pairs))))
