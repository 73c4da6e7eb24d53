"""How far is `choose_config` from the best config? `python -m benchmarks.gemm_configs`.

It times every config of `gemm.cu` that fits, in a grid wider than the list that `choose_config`
takes from, on random data and with L2 flushed; then it compares the choice with the best one.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.figures import geomean
from benchmarks.peers import Case, Operands
from benchmarks.timing import Call, device_us_many
from moefp8.kernels import get_num_sms, jit, round_up
from moefp8.kernels.gemm import operands as gemm_operands
from moefp8.kernels.gemm.sm90 import config as gemm_config
from moefp8.kernels.gemm.sm90 import heuristic
from moefp8.kernels.gemm.sm90 import launch as gemm_launch
from moefp8.kernels.gemm.sm90.config import GemmConfig
from moefp8.kernels.gemm.sm90.gemms import prepare_dense
from moefp8.kernels.gemm.sm90.tuned import ConfigSource

RESULTS = Path(__file__).parent / "results" / "gemm_configs.json"
M = (1, 16, 64, 128, 512, 4096)
N_K = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
_COLS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
_AT_ONCE = 64  # calls in one profile


def grid(case: Case) -> Iterator[GemmConfig]:
    """Configs to try; `stages` is left open."""
    m, depths, up_to_4 = case.m, (1, 2), (1, 2, 3, 4)
    if m <= 128:
        for rows, depth, split, ctas in product((64, 128), depths, up_to_4, up_to_4):
            options = {"k_blocks_per_stage": depth, "split_k": split, "ctas_per_sm": ctas}
            yield GemmConfig(rows, round_up(m, 8), 0, swap_ab=True, **options)
    if m < 32:
        return
    rows = (64,) if m <= 64 else (64, 128) if m <= 128 else (64, 128, 192)
    for row, col, depth, split in product(rows, _COLS, depths, (1, 2)):
        for ctas, buffers in product((1, 2), (1, 2)):
            yield GemmConfig(
                row, col, 0,
                parts=2 if col > 192 or (buffers == 2 and col > 128) else 1,
                k_blocks_per_stage=depth,
                split_k=split,
                ctas_per_sm=ctas,
                num_product_buffers=buffers,
            )  # fmt: skip


def possible(case: Case) -> list[GemmConfig]:
    """The choice, then all of the grid whose CTAs can run as they must."""
    m, n, k = case
    num_sms = get_num_sms()
    found = {heuristic.choose_config(m, n, k, num_sms): None}
    for config in map(gemm_config.with_most_stages, grid(case)):
        estimate = heuristic.estimate_us(config, m, n, k, num_sms)  # infinite if too few can run
        if gemm_config.is_possible(config, k) and estimate < float("inf"):
            found[config] = None
    return list(found)


def call_of(config: GemmConfig, operands: Operands) -> Call:
    """A call with this config, whatever would be chosen."""
    d, num_sms = operands.x.new_empty(operands.x.shape[0], operands.w.shape[0]), get_num_sms()
    given = gemm_operands.Operands(*operands.a, *operands.b, d)
    matrices = gemm_operands.fitting_operands(given, False, keep_d=False)
    launch = prepare_dense(config, matrices, ConfigSource(num_sms, num_sms))

    def run() -> torch.Tensor:
        launch.on(d.get_device(), tuple(x.data_ptr() for x in matrices))
        return matrices.d

    return run


def measure(case: Case) -> dict[str, object]:
    configs, operands = possible(case), Operands.random(case)
    calls = {str(i): call_of(config, operands) for i, config in enumerate(configs)}
    names, us = list(calls), {}
    for start in range(0, len(names), _AT_ONCE):
        some = {name: calls[name] for name in names[start : start + _AT_ONCE]}
        us |= device_us_many({"0": calls["0"], **some}, repeats=5, warm_up_seconds=0.02)
    # Time the choice and the best once more, in turns: the minimum of many flatters.
    best = min(us, key=us.__getitem__)
    again = device_us_many({"0": calls["0"], best: calls[best]}, repeats=15)
    ratio = again["0"] / again[best]
    describe = {name: repr(configs[int(name)]) for name in ("0", best)}
    print(f"{case}: {again['0']:.1f} us, best {again[best]:.1f}: x{ratio:.3f}", flush=True)
    return {
        **case._asdict(),
        "configurations": len(configs),
        "chosen": {"config": describe["0"], "us": again["0"]},
        "best": {"config": describe[best], "us": again[best]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    require_gpu("benchmarks.gemm_configs")
    torch.manual_seed(0)
    cases = [Case(m, n, k) for m in M for n, k in N_K]
    kernels = {gemm_launch.kernel_of(c, None) for case in cases for c in possible(case)}
    jit.compile_kernels(list(kernels), "sm_90a")
    rows = [measure(case) for case in cases]
    ratios = [row["chosen"]["us"] / row["best"]["us"] for row in rows]  # type: ignore[index]
    summary = {"geomean": geomean(ratios), "worst": max(ratios), "kernels": len(kernels)}
    print(f"choose_config over the best of {len(kernels)} kernels: {summary}")
    out.write_text(json.dumps({**circumstances(), **summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
