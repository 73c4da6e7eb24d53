"""Routing: top-k, plan, dispatch and combine."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from unittest import mock

import torch

from moefp8.kernels import jit
from moefp8.routing import build_plan, sigmoid_group_topk, softmax_topk
from moefp8.routing.route import route
from moefp8.routing.route_backward import route_backward
from tests.kernels.sanitizer.judge import Launch, tell
from tests.routing.cases import (
    check_dispatch,
    codes_of,
    ids_of,
    plan_of,
    run_combine,
    run_dispatch,
)


def launches() -> Iterator[Launch]:
    choices = (7, 3, 7), (160, 6, 8), (256, 8, 1), (512, 40, 64)
    for dtype, choice in product((torch.bfloat16, torch.float16, torch.float32), choices):
        yield partial(run_top_k, dtype, *choice)
    for num_experts, h, counts in ((130, 1160, (1, 70, 300)), (72, 520, (9, 2000))):
        yield partial(run_route, num_experts, h, counts)
    for num_tokens, top_k, hidden_size, num_sms in (
        (3, 2, 200, 132), (200, 3, 1160, 5),
        (2731, 3, 136, 50),  # a kernel before counts the choices
    ):  # fmt: skip
        # As if the GPU had no more SMs: then the chunks of tokens are long.
        few = mock.patch.object(jit.Driver, "num_sms", lambda driver, device_index, n=num_sms: n)
        with jit.using(jit.Driver()), few:
            for kind in ("out of range", "one expert", "nowhere"):
                yield partial(run_routing, kind, num_tokens, top_k, hidden_size)
                for width in (hidden_size, hidden_size // 16 * 16):  # bytes, and 16 at once
                    yield partial(run_codes, kind, num_tokens, top_k, width)


def run_top_k(dtype: torch.dtype, num_experts: int, k: int, num_groups: int) -> None:
    """All logits are 0, so the first experts are chosen, in groups of several sizes too."""
    logits = torch.zeros(9, num_experts + 1, dtype=dtype, device="cuda")[:, 1:]
    bias = torch.zeros(num_experts, device="cuda")
    groups = num_groups, (num_groups + 1) // 2
    index = sigmoid_group_topk(logits, bias, k, *groups, True, 2.5)[0].cpu()
    wrong = int((index != torch.arange(k)).sum())
    index = softmax_topk(logits, k, True)[0].cpu()
    wrong += int((index != torch.arange(k)).sum())
    wrong += wrong_gradients(logits, k)
    tell(f"top-k of {num_experts}, {dtype}", wrong)


def wrong_gradients(logits: torch.Tensor, k: int) -> int:
    """Of logits of 0, where the first weight has the gradient 1, and others have none."""
    num_experts, wrong = logits.shape[1], 0
    for choose, of_first, of_others in (
        (lambda x: softmax_topk(x, k, False), 1 / num_experts, -1 / num_experts**2),
        (lambda x: sigmoid_group_topk(x, None, k, renormalize=False), 1 / 4, 0.0),
    ):
        x = logits.detach().requires_grad_()
        choose(x).top_k_weights[:, 0].sum().backward()
        expected = torch.full(logits.shape, of_others)
        expected[:, 0] += of_first
        errors = (x.grad.cpu().float() - expected).abs()
        wrong += int((~(errors <= 1e-2 * expected.abs())).sum())
    return wrong


def run_route(num_experts: int, h: int, counts: tuple[int, ...]) -> None:
    """Tokens are the same, so all choose what a single one chooses; sizes divide no tile."""
    x = torch.randn(1, h, device="cuda").bfloat16()
    weight = torch.randn(num_experts, h, device="cuda") / h**0.5
    expected = (x.double() @ weight.double().T).topk(5).indices.cpu()
    for num_tokens in counts:
        rows = x.repeat(num_tokens, 1)
        index = route(rows, weight, None, 5, False, 1, 1, True, 1.0).top_k_index.cpu()
        tell(f"route, {num_tokens} tokens, {num_experts}", int((index != expected).sum()))
        # The products are cuBLAS's, in whose kernels racecheck reports a race.
        grad = torch.ones(num_tokens, 5, device="cuda")
        route_backward(rows, weight, grad, index.cuda(), False, True, 1.0, False, False)


def run_routing(kind: str, num_tokens: int, top_k: int, hidden_size: int) -> None:
    """Check plan, dispatch and combine."""
    x = torch.ones(num_tokens, hidden_size, dtype=torch.bfloat16, device="cuda")
    ids = ids_of(kind, num_tokens, top_k, 9).cuda()
    weights = torch.ones(num_tokens, top_k, device="cuda")
    for max_m in (None, num_tokens):
        if max_m:
            build_plan(ids, 9, "masked")
        else:
            build_plan(ids, 9, alignment=4)
        check_dispatch(run_dispatch(x, ids, 9, max_m), x, ids, 9, max_m)
        plan = plan_of(ids, 9, max_m)
        y = torch.ones(len(plan.row_to_token), hidden_size, dtype=torch.bfloat16, device="cuda")
        expected, wrong = (plan.token_to_row >= 0).sum(1, keepdim=True), 0
        unaligned = torch.ones(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x)
        for addend in (None, x, unaligned):
            out = run_combine(y, hidden_size, plan, weights, addend=addend).cpu()
            wrong += int((out != expected + (addend is not None)).sum())
        tell(f"routing, {kind}, {num_tokens} tokens", wrong)


def run_codes(kind: str, num_tokens: int, top_k: int, hidden_size: int) -> None:
    """Check dispatch of codes and scales of any bits."""
    codes, scales = codes_of(num_tokens, hidden_size, "cuda")
    ids = ids_of(kind, num_tokens, top_k, 9).cuda()
    for max_m in (None, num_tokens):
        done = run_dispatch(codes, ids, 9, max_m, x_scale_inv=scales)
        check_dispatch(done, codes, ids, 9, max_m, x_scale_inv=scales)
    print(f"codes, {kind}, {num_tokens} tokens of {hidden_size}", flush=True)
