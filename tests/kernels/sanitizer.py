"""Small launches of every family of kernels, for NVIDIA's compute-sanitizer: `make sanitize`.

No pytest and no torch operation more than needed: under the sanitizer each one costs seconds.
"""

import torch

from moefp8.functional.experts import experts
from moefp8.functional.linear import fp8_linear
from moefp8.kernels import empty_tma_aligned, fp8_gemm_nt, jit, set_num_sms
from moefp8.kernels.gemm import heuristic, tuned
from moefp8.kernels.gemm.config import GemmConfig, GroupLayout, with_most_stages
from moefp8.kernels.gemm.operands import Operands
from moefp8.quant.quantize import launch_quantize_1x128, launch_quantize_128x128
from moefp8.routing.plan_op import launch_build_plan
from moefp8.routing.top_k_op import launch_sigmoid_group_topk, launch_softmax_topk
from tests.functional.cases import DOWN_FAMILIES, GATE_UP_FAMILIES
from tests.kernels.gemm.grouped_cases import UNTOUCHED, Routing, launch_grouped_gemm, routing_of
from tests.routing.cases import check_dispatch, ids_of, plan_of, run_combine, run_dispatch

# Of gemm.cu; 0 stages: as many as fit.
FAMILIES = {
    "tokens are rows": GemmConfig(128, 128, 0),
    "three math groups": GemmConfig(192, 112, 0),
    "uneven columns": GemmConfig(128, 176, 0),
    "two parts": GemmConfig(128, 256, 0, parts=2),
    "split": GemmConfig(128, 192, 0, split_k=3),
    "two CTAs on an SM": GemmConfig(64, 64, 0, ctas_per_sm=2),
    "one math group, deep": GemmConfig(64, 24, 0, k_blocks_per_stage=2),
    "one math group, deep and split": GemmConfig(64, 32, 0, k_blocks_per_stage=4, split_k=2),
    "two buffers": GemmConfig(128, 128, 0, num_product_buffers=2),
    "two buffers, parts of a stage": GemmConfig(128, 192, 0, parts=2, num_product_buffers=2),
    "two buffers, deep": GemmConfig(64, 48, 0, k_blocks_per_stage=2, num_product_buffers=2),
    "two buffers, split": GemmConfig(128, 64, 0, split_k=2, num_product_buffers=2),
    "two buffers, narrow": GemmConfig(128, 32, 0, k_blocks_per_stage=2, num_product_buffers=2),
    "two buffers, as few stages as can be": GemmConfig(
        64, 64, 2, ctas_per_sm=2, num_product_buffers=2
    ),
    "four pieces": GemmConfig(128, 120, 0),
    "three pieces, two buffers": GemmConfig(128, 112, 0, num_product_buffers=2),
    "weights are rows": GemmConfig(64, 8, 0, ctas_per_sm=2, swap_ab=True),
    "weights are rows, split": GemmConfig(64, 16, 0, split_k=4, ctas_per_sm=2, swap_ab=True),
    "weights are rows, two math groups": GemmConfig(128, 64, 0, split_k=2, swap_ab=True),
    "weights are rows, two pieces": GemmConfig(192, 24, 0, swap_ab=True),
    "weights are rows, deep": GemmConfig(
        64, 16, 0, k_blocks_per_stage=4, split_k=4, ctas_per_sm=2, swap_ab=True
    ),
}
FAMILIES = {
    name: config if config.stages else with_most_stages(config) for name, config in FAMILIES.items()
}


def _grouped(wgmma_m: int, wgmma_n: int, **options) -> GemmConfig:
    return with_most_stages(GemmConfig(wgmma_m, wgmma_n, 0, grouped=True, **options))


GROUPED_FAMILIES = {
    "two buffers": _grouped(128, 128, num_product_buffers=2),
    "three math groups": _grouped(192, 112),
    "two parts": _grouped(128, 256, parts=2),
    "two CTAs on an SM": _grouped(64, 64, ctas_per_sm=2),
    "two buffers, parts of a stage": _grouped(128, 192, parts=2, num_product_buffers=2),
    "multicast": _grouped(128, 128, multicast=2),
    "two buffers, multicast": _grouped(128, 128, multicast=2, num_product_buffers=2),
    "three math groups, multicast": _grouped(192, 128, multicast=2),
    "weights are rows": _grouped(64, 8, swap_ab=True),
    "weights are rows, two math groups": _grouped(128, 64, swap_ab=True),
    "weights are rows, deep": _grouped(64, 16, k_blocks_per_stage=2, swap_ab=True),
    "weights are rows, two pieces": _grouped(192, 24, swap_ab=True),
}
# Tokens of each group: few groups, and more than a warp has lanes.
COUNTS = (0, 77, 1, 0, 130, 5), (*[0] * 33, 9, 0, 260, 1)


def shapes_of(config: GemmConfig) -> list[tuple[int, int, int]]:
    """(M, N, K) that this configuration may be chosen for, odd in every way.

    In the first a pipeline is not even full; in the second each of its stages is filled again.
    """
    k = 128 * max(3, config.split_k * config.k_blocks_per_stage) + 40
    rounds = 128 * config.k_blocks_per_stage * config.split_k * (config.stages + 2) + 40
    return [(77, 200, k), (130, 331, rounds)]


def prepare_anew() -> None:
    """Without the launches of another family's configuration."""
    jit.current_driver().prepared().clear()


def main() -> None:
    torch.manual_seed(0)
    chosen = heuristic.choose_config
    for name, config in FAMILIES.items():
        for m, n, k in shapes_of(config):
            heuristic.choose_config = lambda *shape, config=config: config
            prepare_anew()
            run_gemm(f"{name}, {m}x{n}x{k}", m, n, k)
        if config.split_k == 1:  # one cluster walks over all tiles
            set_num_sms(1)
            run_gemm(f"{name}, {m}x{n}x{k}, one SM", m, n, k)
            set_num_sms(None)
    heuristic.choose_config = chosen
    run_grouped_families()
    run_experts_families()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.ones(9, 296, dtype=dtype, device="cuda")
        launch_quantize_1x128(x, False)
        launch_quantize_1x128(x[:, 1:], True)
        launch_quantize_128x128(x, False)
        weight = launch_quantize_128x128(torch.ones(136, 296, device="cuda"), False)
        fp8_linear(x, *weight, None)
        print(f"quantize and linear, {dtype}", flush=True)
        run_top_k(dtype)
    for num_tokens, top_k, hidden_size, num_sms in (
        *((3, 2, 200, 132), (200, 3, 1160, 5)),
        (2731, 3, 136, 50),  # choices are counted by a kernel before
    ):
        with jit.using(FewSms(num_sms)):
            for kind in ("out of range", "one expert", "nowhere"):
                run_routing(kind, num_tokens, top_k, hidden_size)
    torch.cuda.synchronize()


def run_top_k(dtype: torch.dtype) -> None:
    """On zeros: of equals the first experts are chosen, in groups of several sizes too."""
    for num_experts, k, num_groups in ((7, 3, 7), (160, 6, 8), (256, 8, 1), (512, 40, 64)):
        logits = torch.zeros(9, num_experts + 1, dtype=dtype, device="cuda")[:, 1:]
        bias = torch.zeros(num_experts, device="cuda")
        groups = num_groups, (num_groups + 1) // 2
        index = launch_sigmoid_group_topk(logits, bias, k, *groups, True, 2.5)[0].cpu()
        wrong = int((index != torch.arange(k)).sum())
        index = launch_softmax_topk(logits, k, True)[0].cpu()
        wrong += int((index != torch.arange(k)).sum())
        print(f"top-k of {num_experts}, {dtype}: {wrong} wrong", flush=True)
        if wrong:
            raise SystemExit(1)


class FewSms(jit.Driver):
    """As if the GPU had no more SMs: then the chunks of tokens are long."""

    def __init__(self, num_sms: int) -> None:
        super().__init__()
        self.few = num_sms

    def num_sms(self, device_index: int) -> int:
        return self.few


def run_routing(kind: str, num_tokens: int, top_k: int, hidden_size: int) -> None:
    """Plan, dispatch and combine."""
    x = torch.ones(num_tokens, hidden_size, dtype=torch.bfloat16, device="cuda")
    ids = ids_of(kind, num_tokens, top_k, 9).cuda()
    weights = torch.ones(num_tokens, top_k, device="cuda")
    for max_m in (None, num_tokens):
        launch_build_plan(ids, 9, 1 if max_m else 4, max_m)
        check_dispatch(run_dispatch(x, ids, 9, max_m), x, ids, 9, max_m)
        plan = plan_of(ids, 9, max_m)
        y = torch.ones(len(plan.row_to_token), hidden_size, dtype=torch.bfloat16, device="cuda")
        out = run_combine(y, hidden_size, plan, weights)
        expected = (plan.token_to_row >= 0).sum(1, keepdim=True)
        wrong = int((out.cpu() != expected).sum())
        print(f"routing, {kind}, {num_tokens} tokens: {wrong} wrong", flush=True)
        if wrong:
            raise SystemExit(1)


def run_gemm(name: str, m: int, n: int, k: int) -> None:
    """On ones, so that zeros, or what lies beyond a box, are seen at once."""
    k_blocks = -(-k // 128)
    a = torch.full((m, k), 0x38, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    b = torch.full((n, k), 0x38, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    a_scale_inv = empty_tma_aligned([m, k_blocks], a.device).fill_(0.5)
    b_scale_inv = torch.full((-(-n // 128), k_blocks), 2.0, device="cuda")
    bias = torch.full((n,), 8.0, device="cuda")
    d = torch.zeros(m, n, dtype=torch.bfloat16, device="cuda")
    fp8_gemm_nt((a, a_scale_inv), (b, b_scale_inv), d, bias=bias)
    wrong = int((d.cpu() != torch.tensor(k + 8.0).bfloat16()).sum())
    print(f"{name}: {wrong} wrong", flush=True)
    if wrong:
        raise SystemExit(1)


def run_grouped_families() -> None:
    chosen = heuristic.choose_grouped_config
    for name, config in GROUPED_FAMILIES.items():
        heuristic.choose_grouped_config = lambda *shape, config=config: config
        prepare_anew()
        shapes = [shape[1:] for shape in shapes_of(config)]
        for (n, k), counts, limit in zip(shapes, COUNTS, (None, 1), strict=True):
            set_num_sms(limit)  # of one: one cluster walks over all tiles
            for layout in GroupLayout:
                what = f"grouped, {name}, {layout.name}, {n}x{k}"
                run_grouped_gemm(what, routing_of(layout, counts), n, k)
            set_num_sms(None)
    heuristic.choose_grouped_config = chosen
    for layout in GroupLayout:
        run_broken_bounds(layout)


def run_experts_families() -> None:
    chosen = tuned.choose_configs
    pairs = [(f"gate and up: {name}", config, None) for name, config in GATE_UP_FAMILIES.items()]
    pairs += [(f"down: {name}", None, config) for name, config in DOWN_FAMILIES.items()]
    for name, gate_up, down in pairs:

        def choose(*shape, gate_up=gate_up, down=down):
            first, second = chosen(*shape)
            return gate_up or first, down or second

        tuned.choose_configs = choose
        # On one SM one cluster takes all tiles; it asks for the next one on its way along K.
        long = (77, 1664, 144, 1) if gate_up else (77, 200, 1152, 1)
        shapes = [(5, 200, 144, None), (77, 264, 400, 1), long]
        if (gate_up or down).tail:
            shapes.append((230, 264, 400, None))  # 138 of each expert
        for num_tokens, h, i, limit in shapes:
            set_num_sms(limit)
            prepare_anew()
            for masked in (False, True):
                run_experts(f"experts, {name}, {num_tokens} tokens", num_tokens, h, i, masked)
            set_num_sms(None)
    tuned.choose_configs = chosen
    prepare_anew()
    run_experts("experts, counted", 2731, 136, 144, False)


def run_experts(name: str, num_tokens: int, h: int, i: int, masked: bool) -> None:
    """Gate and up are 1, so every choice that is held here gives its weight times silu(1)."""
    e, blocks_h, blocks_i = 4, -(-h // 128), -(-i // 128)
    gate_up = torch.full((e, 2 * i, h), 0x38, dtype=torch.uint8, device="cuda")
    down = torch.full((e, h, i), 0x38, dtype=torch.uint8, device="cuda")
    weights = (
        *(gate_up.view(torch.float8_e4m3fn), torch.full((e, 2 * blocks_i, blocks_h), 1 / h).cuda()),
        *(down.view(torch.float8_e4m3fn), torch.full((e, blocks_h, blocks_i), 1 / i).cuda()),
    )
    ids = torch.arange(num_tokens * 3).view(num_tokens, 3) % (e + 1)
    x = torch.ones(num_tokens, h, dtype=torch.bfloat16, device="cuda")
    top_k_weights = torch.ones(num_tokens, 3, device="cuda")
    y = experts(x, ids.cuda(), top_k_weights, *weights, 100.0, masked).cpu()
    expected = 0.7310586 * (ids < e).sum(1, keepdim=True)
    wrong = int(((y - expected).abs() > 0.02).sum()) + int(y.isnan().sum())
    print(f"{name}{', masked' if masked else ''}: {wrong} wrong", flush=True)
    if wrong:
        raise SystemExit(1)


def run_broken_bounds(layout: GroupLayout) -> None:
    """Numbers that break the rules: nothing outside of the tensors may be read or written."""
    routing = routing_of(layout, (50,) * 6)
    bounds = routing.bounds_on("cuda")
    bounds[1::3], bounds[2::5] = 2**31 - 1, -(2**31)
    a = torch.zeros(*routing.rows_of_a(), 272, dtype=torch.uint8, device="cuda")
    b = torch.zeros(6, 136, 272, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    a_scale_inv = empty_tma_aligned([*routing.rows_of_a(), 3], a.device)
    b_scale_inv = torch.ones(6, 2, 3, device="cuda")
    d = torch.zeros(*routing.rows_of_a(), 136, dtype=torch.bfloat16, device="cuda")
    operands = Operands(a.view(torch.float8_e4m3fn), a_scale_inv, b, b_scale_inv, d)
    for expected_m in (4, 60, 1000):
        launch_grouped_gemm("broken", layout, operands, bounds, expected_m)
    print(f"grouped, broken bounds, {layout.name}", flush=True)


def run_grouped_gemm(name: str, routing: Routing, n: int, k: int) -> None:
    """As `run_gemm`, on ones; other tokens than those of groups are NaN, and stay unwritten."""
    k_blocks, rows = -(-k // 128), routing.rows_of_a()
    is_of_group = routing.is_of_group()
    codes = torch.where(is_of_group, 0x38, 0x7F).byte()[..., None].expand(*rows, k)
    a = codes.contiguous().cuda().view(torch.float8_e4m3fn)
    b = torch.full((routing.num_groups, n, k), 0x38, dtype=torch.uint8, device="cuda")
    a_scale_inv = empty_tma_aligned([*rows, k_blocks], a.device).fill_(0.5)
    b_scale_inv = torch.full((routing.num_groups, -(-n // 128), k_blocks), 2.0, device="cuda")
    d = torch.full((*rows, n), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    operands = Operands(a, a_scale_inv, b.view(torch.float8_e4m3fn), b_scale_inv, d)
    bounds = routing.bounds_on("cuda")
    launch_grouped_gemm(name, routing.layout, operands, bounds, 64)
    expected = torch.where(is_of_group, float(k), UNTOUCHED).bfloat16()[..., None]
    wrong = int((d.cpu() != expected).sum())
    print(f"{name}: {wrong} wrong", flush=True)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
