"""What interleaving FFMAs is worth: `python -m benchmarks.interleaving FOLDER...` on a Hopper GPU.

A folder holds the kernels as one NVRTC compiles them; `--compile FOLDER` writes it, with no GPU, by
the NVRTC of that environment. Patterns take turns on the same operands and must give the same bits;
those of the last folder are searched.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks import peers
from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.grouped_cases import DEEPSEEK_V3, spread
from benchmarks.moe_cases import MODELS, Model, random_experts
from benchmarks.moe_cases import Case as LayerCase
from benchmarks.timing import FLUSH_BYTES, LONG_FLUSH_BYTES, Call, device_us_many, on_driver
from moefp8.kernels import fp8_gemm_nt, m_grouped_fp8_gemm_nt_contiguous
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.sm90.expert_configs import choose_experts_configs
from moefp8.kernels.gemm.sm90.heuristic import choose_config, choose_grouped_config
from moefp8.kernels.gemm.sm90.launch import kernel_of
from moefp8.kernels.jit import Cubin, Driver, Kernel, compile_kernel, compile_kernels, driver
from moefp8.kernels.jit.interleave import interleaved, promotions
from moefp8.quant import quantize_1x128, quantize_128x128

RESULTS = Path(__file__).parent / "results" / "interleaving.json"
ARCH, NUM_SMS = "sm_90a", 132  # of an H200
GEMMS = (
    (1, 4096, 7168), (64, 4096, 7168), (128, 4096, 7168), (512, 4096, 7168),
    (512, 7168, 16384), (512, 24576, 1536), (1024, 7168, 16384), (4096, 2112, 7168),
    (4096, 4096, 7168), (4096, 7168, 2048), (4096, 7168, 16384), (4096, 24576, 1536),
    (4096, 32768, 512), (8192, 4096, 7168),
)  # fmt: skip
GROUPS = (32, 256), (8, 4096)  # groups, tokens of each on average
LAYERS = (
    ("qwen3_30b_a3b", 1), ("qwen3_30b_a3b", 1024), ("qwen3_30b_a3b", 2048),
    ("qwen3_30b_a3b", 4096), ("mixtral_8x7b", 4096),
    ("deepseek_v3", 1024), ("deepseek_v3", 4096), ("deepseek_v3", 16384),
)  # fmt: skip
AS_COMPILED, AGAIN, SHIPPED = "as compiled", "as compiled, again", "shipped"
# A run of FFMAs repeats one: 1 goes on, 0 lets another warp issue. The first is what NVRTC 13 does.
PATTERNS = "01", "1", "0", "0011", "011", "0111", "01111", "0111111", "01111111", "0" + "1" * 15


class Variant(NamedTuple):
    compiler: str
    pattern: str
    patch: Callable[[Kernel, bytes], bytes]


def name_of(variant: Variant) -> str:
    return f"NVRTC {variant.compiler}, {variant.pattern}"


def variants_of(compiler: str, search: bool) -> Iterator[Variant]:
    """The variants to compare; without `search`, the one pattern is the newer compiler's."""
    for name in (AS_COMPILED, AGAIN) if search else (AS_COMPILED,):
        yield Variant(compiler, name, lambda kernel, image: image)
    yield Variant(compiler, SHIPPED, lambda kernel, image: patched(image, kernel.interleaving))
    for pattern in PATTERNS if search else PATTERNS[:1]:
        yield Variant(compiler, pattern, lambda kernel, image, p=pattern: patched(image, p))
    if search:
        yield Variant(compiler, "01, stalling", lambda kernel, image: stalling(image))


def patched(image: bytes, pattern: str) -> bytes:
    return interleaved(image, pattern) if pattern else image


def stalling(image: bytes) -> bytes:
    """An FFMA that yields waits a cycle longer, as if the next one needed its result a little."""
    image = interleaved(image, "01")
    made = bytearray(image)
    for run in promotions(image):
        for x in run[::2]:
            made[x.at + 8 : x.at + 16] = (x.high & ~(15 << 41) | 2 << 41).to_bytes(8, "little")
    return bytes(made)


# ---- Kernels that were compiled before ----


def file_of(kernel: Kernel) -> str:
    return hashlib.sha256(kernel.name.encode()).hexdigest()[:16]


def kernels() -> list[Kernel]:
    """The kernels of all cases, as they are chosen on an H200."""
    found = {kernel_of(choose_config(*shape, NUM_SMS), None) for shape in GEMMS}
    for num_groups, mean in GROUPS:
        tokens = sum(spread(num_groups, mean))
        for n, k in DEEPSEEK_V3:
            load = -(-tokens // num_groups)
            config = choose_grouped_config(load, tokens, num_groups, n, k, NUM_SMS)
            found.add(kernel_of(config, None, GroupLayout.OFFSETS))
    for name, num_tokens in LAYERS:
        _, experts, top_k, h, i = MODELS[name]
        load = -(-num_tokens * top_k // experts)
        for config in choose_experts_configs(load, experts, h, i, NUM_SMS):
            found.add(kernel_of(config, None, GroupLayout.OFFSETS))
    return sorted(found, key=lambda kernel: kernel.name)


def compile_into(folder: Path) -> None:
    from moefp8.kernels.jit.kernel import _compiler

    os.environ["MOEFP8_INTERLEAVE"] = "0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compiler").write_text(_compiler().version)
    for kernel, cubin in zip(kernels(), compile_kernels(kernels(), ARCH), strict=True):
        (folder / file_of(kernel)).write_bytes(cubin.to_bytes(kernel.name))


def loader(folder: Path, variant: Variant) -> Callable[[Kernel, str], Cubin]:
    def compiled(kernel: Kernel, arch: str) -> Cubin:
        path = folder / file_of(kernel)
        if not path.exists():  # it has no promotions
            return compile_kernel(kernel, arch)
        cubin = Cubin.from_bytes(kernel.name, path.read_bytes())
        if cubin is None:
            raise ValueError(f"{path} is not what --compile wrote for {kernel}")
        return replace(cubin, image=variant.patch(kernel, cubin.image))

    return compiled


def with_kernels(compiled: Callable[[Kernel, str], Cubin], call: Call) -> Call:
    """`call` with kernels of its own; it is made once, so that all of them are loaded."""
    own = on_driver(Driver(), call)
    with mock.patch.object(driver, "compile_kernel", compiled):
        own()
    return own


# ---- Cases ----


class Timed(NamedTuple):
    name: str
    call: Callable[[], torch.Tensor]
    flush_bytes: int


def cases() -> Iterator[Timed]:
    for shape in GEMMS:
        operands = peers.Operands.random(peers.Case(*shape))
        d = operands.x.new_empty(shape[:2])
        call = _into(d, lambda o=operands, d=d: fp8_gemm_nt(o.a, o.b, d))
        yield Timed("x".join(map(str, shape)), call, FLUSH_BYTES)
    for num_groups, mean in GROUPS:
        yield from _grouped(num_groups, mean)
    made: dict[Model, Any] = {}
    for name, num_tokens in LAYERS:
        model = MODELS[name]
        if model not in made:
            made = {model: random_experts(model)}
        case = LayerCase.random(model, made[model], num_tokens)
        yield Timed(f"layer of {model.title}, {num_tokens} tokens", case.run, LONG_FLUSH_BYTES)


def _grouped(num_groups: int, mean: int) -> Iterator[Timed]:
    counts = spread(num_groups, mean)
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda")
    for n, k in DEEPSEEK_V3:
        a = quantize_1x128(torch.randn(sum(counts), k, device="cuda").bfloat16())
        weights = (torch.randn(n, k, device="cuda").bfloat16() for _ in range(num_groups))
        b = [torch.stack(x) for x in zip(*map(quantize_128x128, weights), strict=True)]
        d = torch.empty(sum(counts), n, dtype=torch.bfloat16, device="cuda")

        def call(a: Any = a, b: Any = b, d: torch.Tensor = d) -> None:
            m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=offsets)

        yield Timed(f"{num_groups} groups x {mean}, {n}x{k}", _into(d, call), FLUSH_BYTES)


def _into(d: torch.Tensor, call: Callable[[], object]) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        call()
        return d

    return run


def measure(
    case: Timed, variants: Iterable[tuple[str, Callable[[Kernel], Cubin]]]
) -> dict[str, Any]:
    calls = {name: with_kernels(compiled, case.call) for name, compiled in variants}
    results = {name: call().view(torch.int16).clone() for name, call in calls.items()}  # type: ignore[attr-defined]
    first = next(iter(results.values()))
    differing = [name for name, result in results.items() if not torch.equal(result, first)]
    if differing:
        raise RuntimeError(f"{case.name}: {differing} give other bits than {next(iter(results))}")
    us = device_us_many(calls, repeats=25, flush_bytes=case.flush_bytes)
    print(case.name, {name: round(value, 2) for name, value in us.items()}, flush=True)
    return {"case": case.name, "us": {name: round(value, 3) for name, value in us.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--compile", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.compile:
        compile_into(args.compile)
        return
    require_gpu("benchmarks.interleaving")
    torch.manual_seed(0)
    variants, compilers = [], []
    for folder in args.folders:
        compilers.append((folder / "compiler").read_text().split(" V")[-1])
        for variant in variants_of(compilers[-1], search=folder == args.folders[-1]):
            variants.append((name_of(variant), loader(folder, variant)))
    rows = [measure(case, variants) for case in cases()]
    results = {**circumstances(), "compilers": compilers, "rows": rows}
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
