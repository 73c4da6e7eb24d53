"""What MoE layers choose by measurement, measured again: `python -m benchmarks.moe_choices`.

These are choices for DeepSeek-V3 on a Hopper GPU: layouts of the experts, a prompt that is split
because of its workspace, shared experts beside or behind the routed ones in a CUDA graph and as one
op or three linears, clusters that take tiles from a counter or have every n-th, and the router;
then tiles and ids of one rank of expert parallelism.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.moe_cases import MODELS, Case, random_experts
from benchmarks.timing import Call, captured, device_us, graph_us_many, layer_us_many, on_driver
from moefp8 import GroupedExperts, MoE
from moefp8.distributed.shard import own_choices
from moefp8.functional.activation import activate
from moefp8.kernels import jit
from moefp8.kernels.common.blocks import E4M3, ceil_div
from moefp8.kernels.gemm.sm90.gemms import Sm90
from moefp8.layers import moe as moe_room

RESULTS = Path(__file__).parent / "results" / "moe_choices.json"
MODEL = MODELS["deepseek_v3"]
LAYOUT_TOKENS, LONG_TOKENS, MANY_TOKENS = (128, 1024), 131072, 4096
GRAPH_TOKENS, COUNTER_TOKENS = (1, 16, 128), (128, 1024, 4096)
NUM_RANKS, RANK_TOKENS, NUM_ROUTINGS = 8, (16, 128, 1024), 8

Row = dict[str, Any]  # "what", "tokens" and figures by name


def layouts(experts: GroupedExperts) -> Iterator[Row]:
    for tokens in LAYOUT_TOKENS:
        case, calls = Case.random(MODEL, experts, tokens), {}
        for layout in ("auto", "contiguous", "masked"):
            calls[layout] = _with(experts, "layout", layout, case.run)
        yield {"what": "layouts, us", "tokens": tokens, **rounded(layer_us_many(calls, 10))}


def long_prompt(experts: GroupedExperts) -> Iterator[Row]:
    """Time, memory above what there was, and whether tokens are as in a call of their own."""
    case = Case.random(MODEL, experts, LONG_TOKENS)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = case.run()
    above = torch.cuda.max_memory_allocated() - before
    some = torch.linspace(0, LONG_TOKENS - 1, 4, device=y.device).long()
    equal = torch.equal(case.only(some).run(), y[some])
    ms = device_us(case.run, 3) / 1e3
    figures = {"ms": round(ms, 1), "GiB above": round(above / 2**30, 2), "same bits": equal}
    yield {"what": "a long prompt", "tokens": LONG_TOKENS, **figures}


def counters(experts: GroupedExperts) -> Iterator[Row]:
    for tokens in COUNTER_TOKENS:
        call, calls = Case.random(MODEL, experts, tokens).run, {}
        for name, takes in (("counter", True), ("every n-th", False)):
            # Each has prepared launches of its own: these keep what takes_tiles said.
            kept = on_driver(jit.Driver(), call)
            calls[name] = _with(Sm90, "takes_tiles", lambda *_, t=takes: t, kept)
        yield {"what": "tiles, us", "tokens": tokens, **rounded(layer_us_many(calls, 15))}


def shared_experts(experts: GroupedExperts) -> Iterator[Row]:
    h, i = MODEL.hidden_size, MODEL.intermediate_size
    device = experts.down_proj.device
    with torch.device("meta"):
        moe = MoE(h, i, MODEL.num_experts, MODEL.top_k, shared_intermediate_size=i)
    moe.gate, moe.experts = moe.gate.to_empty(device=device), experts
    shared = moe.shared_experts = moe_room.SharedExperts(h, i, device=device)
    fill(moe.gate)
    fill(shared)
    for tokens in GRAPH_TOKENS:
        x = random_tokens(tokens, device)
        replays = {
            name: captured(_with(moe_room, "_FEW_TOKENS", most, lambda x=x: moe(x)))
            for name, most in (("beside", tokens), ("behind", 0))
        }
        times = rounded(graph_us_many(replays, 30))
        yield {"what": "shared experts in a graph, us", "tokens": tokens, **times}

    def three_linears(x: torch.Tensor) -> torch.Tensor:
        return shared.down_proj(activate(shared.gate_proj(x), shared.up_proj(x)))

    for tokens in (1, MANY_TOKENS):
        x = random_tokens(tokens, device)
        calls: dict[str, Call] = {
            "one op": lambda x=x: shared(x),
            "three linears": lambda x=x: three_linears(x),
        }
        yield {"what": "shared experts, us", "tokens": tokens, **rounded(layer_us_many(calls, 10))}
        router: dict[str, Call] = {"router": lambda x=x: moe.gate(x)}
        yield {"what": "router, us", "tokens": tokens, **rounded(layer_us_many(router, 10))}


def ranks(experts: GroupedExperts) -> Iterator[Row]:
    """The second of several ranks: it gets all choices, and most are of experts held elsewhere.

    Its tiles are for the tokens that come to it, or for all; it takes ids of the whole model as
    they are, or after PyTorch has made them its own. Times are means of several routings: how many
    of few tokens' choices are of its experts decides more than anything else.
    """
    num_experts, num_own = experts.num_experts, ceil_div(experts.num_experts, NUM_RANKS)
    weights = {name: x[num_own : 2 * num_own] for name, x in experts.state_dict().items()}

    def part(expert_offset: int, num_global_experts: int | None) -> GroupedExperts:
        sizes = num_own, experts.hidden_size, experts.intermediate_size
        own = GroupedExperts(*sizes, device="meta")
        own.load_state_dict(weights, assign=True)
        own.expert_offset, own.num_global_experts = expert_offset, num_global_experts
        return own

    rank, tiles_for_all, own_ids = part(num_own, num_experts), part(0, None), part(0, num_experts)

    def calls_of(case: Case) -> dict[str, Call]:
        def mapped() -> Case:
            index, scores = own_choices(rank, case.top_k_index, case.top_k_weights)
            return replace(case, top_k_index=index, top_k_weights=scores)

        return {
            "its own": replace(case, experts=rank).run,
            "tiles for all": replace(mapped(), experts=tiles_for_all).run,
            "ids by PyTorch": lambda: replace(mapped(), experts=own_ids).run(),
        }

    for tokens in RANK_TOKENS:
        rounds: list[dict[str, float]] = []
        equal = True
        for _ in range(NUM_ROUTINGS):
            calls = calls_of(Case.random(MODEL, experts, tokens))
            expected = calls["its own"]()
            equal &= all(torch.equal(call(), expected) for call in calls.values())
            replays = {name: captured(call) for name, call in calls.items()}
            rounds.append(graph_us_many(replays, 30))
        times = rounded({name: fmean(each[name] for each in rounds) for name in calls})
        what = f"one of {NUM_RANKS} ranks in a graph, us"
        yield {"what": what, "tokens": tokens, **times, "same bits": equal}


def _with(place: Any, name: str, value: object, call: Call) -> Call:
    """`call`, while `place.name` is `value`."""

    def changed() -> object:
        with mock.patch.object(place, name, value):
            return call()

    return changed


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Fill with normal numbers, and scales such that outputs are about as large as inputs."""
    for name, parameter in module.named_parameters():
        if name.endswith("scale_inv"):
            parameter.fill_(0.01)
        else:
            values = torch.randn(parameter.shape, device=parameter.device)
            parameter.copy_(values if parameter.dtype == E4M3 else values * 0.02)


def random_tokens(num_tokens: int, device: torch.device) -> torch.Tensor:
    return torch.randn(num_tokens, MODEL.hidden_size, device=device).bfloat16()


def rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(us, 1) for name, us in times.items()}


def line_of(row: Row) -> str:
    figures = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("what", "tokens"))
    return f"{row['what']:<30} {row['tokens']:>6} tokens: {figures}"


QUESTIONS = layouts, long_prompt, counters, shared_experts, ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="for the results, in JSON")
    options = parser.parse_args()
    require_gpu("benchmarks.moe_choices")
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        experts = random_experts(MODEL)
        for question in QUESTIONS:
            for row in question(experts):
                print(line_of(row), flush=True)
                rows.append(row)
    results = {**circumstances(), "model": MODEL.title, "rows": rows}
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
