"""Experts that ranks share, of a group of one: it needs no other to come.

Kernels of several ranks in one process would wait for each other, as they run in turns here.
"""

from collections.abc import Iterator
from functools import partial

import torch

from moefp8 import GroupedExperts
from moefp8.distributed.expert_parallel.experts import ParallelExperts
from tests.distributed.expert_parallel.cases import Kind, Tokens, adapt, draw, whole
from tests.distributed.expert_parallel.local_ranks import group_of_one
from tests.kernels.sanitizer.judge import Launch, tell

BF16 = torch.bfloat16
KINDS = {
    "frozen": Kind(4, 264, 144),
    "frozen, odd": Kind(5, 204, 72),
    "frozen, very odd": Kind(5, 201, 71),
    "frozen, masked": Kind(4, 264, 144, layout="masked"),
    "frozen, in codes": Kind(4, 256, 128, saved_dtype=torch.float8_e4m3fn),
    "trained": Kind(4, 264, 144, "trained"),
    "trained, odd": Kind(5, 204, 72, "trained"),
    "adapted": Kind(4, 264, 136, "adapted"),
}


def launches() -> Iterator[Launch]:
    for name in KINDS:
        for num_tokens in (3, 77):
            yield partial(run_rank, name, num_tokens)
    for name in ("frozen", "frozen, very odd", "trained", "trained, odd"):
        for dtype in (torch.float16, torch.float32):
            yield partial(run_rank, name, 9, dtype=dtype)
        yield partial(run_rank, name, 9, is_aligned=False)


def run_rank(
    name: str, num_tokens: int, dtype: torch.dtype = BF16, is_aligned: bool = True
) -> None:
    """The same bits as without a group, forward alone and with a backward.

    What the group's memory holds is poison, and so are tokens without an expert here.
    """
    kind, wrong = KINDS[name], 0
    tokens = on_gpu(draw(kind, [num_tokens], 3, 0, dtype=dtype, has_addend=num_tokens > 3)[0])
    tokens.grad[::2] *= 2.0**-20  # smaller than what counts of a token
    if not is_aligned:
        tokens = tokens._replace(x=elsewhere(tokens.x), ids=tokens.ids.int())
    experts = whole(kind)
    adapt(experts, kind)
    experts.cuda()
    for with_gradients in (False, True):
        experts.parallel = None
        expected = computed(experts, tokens, with_gradients)
        experts.parallel = ParallelExperts(group_of_one(), kind.num_experts)
        found = computed(experts, tokens, with_gradients)
        wrong += sum(int((x != y).sum()) for x, y in zip(found, expected, strict=True))
    told = "" if is_aligned else ", unaligned"
    tell(f"rank of one, {name}, {num_tokens} tokens, {dtype}{told}", wrong)


def computed(experts: GroupedExperts, tokens: Tokens, with_gradients: bool) -> list[torch.Tensor]:
    """On the CPU: the result, and all gradients.

    Before the backward another call takes the group's memory.
    """
    x, scores = (z.detach().requires_grad_(with_gradients) for z in (tokens.x, tokens.scores))
    with torch.set_grad_enabled(with_gradients):
        y = experts(x, tokens.ids, scores, addend=tokens.addend)
    found = [y.detach()]
    if with_gradients:
        with torch.no_grad():
            experts(*(z.flip(0) for z in tokens[:3]))
        weights = [w for w in experts.parameters() if w.requires_grad]
        found += torch.autograd.grad(y, [x, scores, *weights], tokens.grad)
    return [z.cpu() for z in found]


def on_gpu(tokens: Tokens) -> Tokens:
    return Tokens(*(None if x is None else x.cuda() for x in tokens))


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """The same, one element behind a multiple of 16 bytes."""
    place = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x)
    return place.copy_(x)
