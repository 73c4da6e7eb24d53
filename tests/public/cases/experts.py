"""`GroupedExperts`, `PlainExperts`, `TopKRouter` and `MoE`."""

import copy
from typing import Any

import torch

import moefp8
from moefp8 import GroupedExperts, MoE, TopKRouter
from moefp8.layers import PlainExperts

from . import BF16, attempt, case, choices, gpu_case, randn, step

E, H, I, K = 6, 200, 136, 3


def _tokens(device: str, num_tokens: int = 21, dtype: torch.dtype = BF16) -> Any:
    return randn(num_tokens, H, device=device, dtype=dtype), *choices(num_tokens, K, E, device)


@case
def forward(device: str) -> Any:
    outputs = {}
    for layout in ("auto", "contiguous", "masked"):
        for limit in (None, 0.5):
            experts = GroupedExperts(
                num_experts=E,
                hidden_size=H,
                intermediate_size=I,
                swiglu_limit=limit,
                layout=layout,
                device=device,
            )
            for n in (0, 1, 21):
                outputs[layout, limit, n] = experts(*_tokens(device, n))
    return experts, outputs


@case
def dtypes_and_ids(device: str) -> Any:
    experts, outputs = GroupedExperts(E, H, I, device=device), {}
    for dtype in (BF16, torch.float16, torch.float32):
        x, ids, scores = _tokens(device, dtype=dtype)
        addend = randn(*x.shape, device=device) if dtype == BF16 else None
        outputs[dtype] = [
            experts(hidden_states=x, top_k_index=ids.int(), top_k_weights=scores.to(dtype)),
            experts(x, ids, scores, addend=addend),
        ]
    return outputs


@case
def one_expert_for_all_and_more_choices(device: str) -> Any:
    experts = GroupedExperts(32, 256, 128, device=device)
    x = randn(70, 256, device=device)
    ids = torch.full((70, 1), 5, device=device)
    many = choices(70, 8, 32, device)
    return experts(x, ids, ids.float()), experts(x, *many), experts(x, *(z[:, :1] for z in many))


@gpu_case
def real_sizes(device: str) -> Any:
    moe = MoE(2048, 768, 32, 8, shared_intermediate_size=768, device=device)
    trained = MoE(2048, 768, 32, 8, device=device, trainable=True)
    outputs = [moe(randn(t, 2048, device=device)) for t in (1, 16, 128, 1500)]
    steps = [step(x, randn(512, 2048, device=device)) for x in (moe, trained)]
    return outputs, steps


@case
def frozen_gradients(device: str) -> Any:
    outcomes = {}
    for saved in (BF16, torch.float8_e4m3fn):
        for kept in (True, None):
            experts = GroupedExperts(
                E, H, I, device=device, saved_dtype=saved, keep_transposed=kept
            )
            x, ids, scores = _tokens(device)
            addend = randn(*x.shape, device=device)
            outcomes[saved, kept] = step(experts, x, ids, scores, addend=addend)
    return outcomes


@case
def masked_gradients(device: str) -> Any:
    experts = GroupedExperts(E, H, I, device=device, layout="masked", swiglu_limit=1.0)
    return step(experts, *_tokens(device))


@case
def trained_gradients(device: str) -> Any:
    outcomes = {}
    for wgrad in ("128x1", "128x128", "bf16"):
        for dtype in (BF16, torch.float32):
            experts = GroupedExperts(
                E, H, I, device=device, trainable=True, dtype=dtype, wgrad=wgrad
            )
            outcomes[wgrad, dtype] = step(experts, *_tokens(device)), experts
    return outcomes


@case
def activations(device: str) -> Any:
    outcomes = {}
    gate_up, down = randn(E, 2 * I, H, device=device), randn(E, H, I, device=device)
    for kind in ("swiglu", "geglu", "geglu_tanh", "gpt_oss"):
        alpha = 1.3 if kind == "gpt_oss" else None
        activation = moefp8.Activation(kind=kind, limit=2.0, alpha=alpha)
        for trainable in (False, True):
            experts = GroupedExperts(
                E, H, I, device=device, trainable=trainable, activation=activation
            )
            outcomes[kind, trainable] = step(experts, *_tokens(device)), experts
        of_weights = GroupedExperts.from_weights(gate_up, down, activation=kind)
        plain = PlainExperts(E, H, I, device=device, activation=kind)
        moe = MoE(H, I, E, K, shared_intermediate_size=I, device=device, activation=kind)
        x, *chosen = _tokens(device)
        outcomes[kind] = of_weights(x, *chosen), plain(x, *chosen), step(moe, x)
    return outcomes


@case
def biases(device: str) -> Any:
    outcomes = {}
    for trainable in (False, True):
        experts = GroupedExperts(E, H, I, device=device, trainable=trainable, bias=True)
        for bias in experts.biases.values():
            bias.requires_grad_()
        plain = experts.to_plain()
        outcomes[trainable] = step(experts, *_tokens(device)), step(plain, *_tokens(device))
    gate_up, down = randn(E, 2 * I, H, device=device), randn(E, H, I, device=device)
    of_weights = GroupedExperts.from_weights(
        gate_up,
        down,
        gate_up_proj_bias=randn(E, 2 * I, device=device),
        down_proj_bias=randn(E, H, device=device),
    )
    plain = PlainExperts(E, H, I, device=device, bias=True)
    return outcomes, of_weights(*_tokens(device)), plain(*_tokens(device))


@case
def from_weights(device: str) -> Any:
    gate_up, down = randn(E, 2 * I, H, device=device), randn(E, H, I, device=device)
    made = [
        GroupedExperts.from_weights(gate_up, down),
        GroupedExperts.from_weights(
            gate_up_proj=gate_up, down_proj=down, swiglu_limit=7.0, layout="masked"
        ),
        GroupedExperts.from_weights(gate_up, down, trainable=True, wgrad="128x128"),
    ]
    return made, [experts(*_tokens(device)) for experts in made]


@case
def to_plain(device: str) -> Any:
    experts = GroupedExperts(E, H, I, device=device, swiglu_limit=2.0)
    plain = [experts.to_plain(), experts.to_plain(dtype=torch.float32)]
    weights = experts.dequantize(), experts.dequantize(dtype=torch.float32)
    return plain, weights, step(plain[0], *_tokens(device))


@case
def plain_experts(device: str) -> Any:
    plain = PlainExperts(
        num_experts=E,
        hidden_size=H,
        intermediate_size=I,
        swiglu_limit=1.5,
        device=device,
        dtype=torch.float32,
    )
    x, ids, scores = _tokens(device, dtype=torch.float32)
    return plain, plain(hidden_states=x, top_k_index=ids, top_k_weights=scores)


@case
def freeze_and_unfreeze(device: str) -> Any:
    experts = GroupedExperts(E, H, I, device=device)
    trained = experts.unfreeze(dtype=torch.float32, wgrad="128x128")
    outcomes = [step(trained, *_tokens(device)), copy.deepcopy(trained)]
    again = trained.freeze().unfreeze()
    return outcomes, step(again, *_tokens(device)), again.freeze()


@case
def routers(device: str) -> Any:
    outcomes = {}
    for scoring in ("softmax", "sigmoid"):
        for renormalize in (True, False):
            router = TopKRouter(
                hidden_size=H,
                num_experts=16,
                top_k=4,
                scoring=scoring,
                renormalize=renormalize,
                num_groups=4 if scoring == "sigmoid" else 1,
                topk_groups=2 if scoring == "sigmoid" else 1,
                scaling_factor=2.5 if scoring == "sigmoid" else 1.0,
                correction_bias=scoring == "sigmoid",
                device=device,
            )
            for name, buffer in router.state_dict().items():
                if name != "weight":
                    buffer.copy_(randn(*buffer.shape, device=device))
            for dtype in (BF16, torch.float32):
                x = randn(30, H, device=device, dtype=dtype).requires_grad_()
                ids, scores = router(hidden_states=x)
                scores.square().sum().backward()
                grads = x.grad, router.weight.grad
                outcomes[scoring, renormalize, dtype] = ids, scores, grads
                router.weight.grad = None
            outcomes[scoring, renormalize, "router"] = router, router.bfloat16()
    return outcomes


@case
def layer(device: str) -> Any:
    moe = MoE(
        hidden_size=H,
        intermediate_size=I,
        num_experts=16,
        top_k=4,
        shared_intermediate_size=152,
        shared_expert_gate=True,
        swiglu_limit=7.0,
        layout="contiguous",
        device=device,
        scoring="sigmoid",
        num_groups=4,
        topk_groups=2,
        scaling_factor=2.5,
        correction_bias=True,
    )
    x = randn(2, 11, H, device=device)
    return moe, moe(hidden_states=x), moe(x.float()), step(moe, x)


@case
def other_layers(device: str) -> Any:
    layers = [
        MoE(H, I, 8, 2, device=device),
        MoE(H, I, 8, 2, shared_intermediate_size=128, device=device),
        MoE(H, I, 8, 2, shared_intermediate_size=128, device=device, trainable=True),
        MoE(H, I, 8, 2, device=device, trainable=True, dtype=torch.float32, wgrad="128x128"),
        MoE(H, I, 8, 2, renormalize=False, layout="masked", expert_mesh=None, device=device),
        MoE(H, I, 8, 2, shared_intermediate_size=128, batch_invariant=True, device=device),
    ]
    return [(step(moe, randn(13, H, device=device)), moe) for moe in layers]


@case
def compiled(device: str) -> Any:
    moe = MoE(H, I, 8, 2, shared_intermediate_size=128, device=device)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    return step(compiled, randn(9, H, device=device))


@case
def errors(device: str) -> Any:
    experts = GroupedExperts(E, H, I, device=device)
    x, ids, scores = _tokens(device)
    outcomes = [
        attempt(lambda: experts(x[:, :100], ids, scores)),
        attempt(lambda: experts(x, ids[:4], scores)),
        attempt(lambda: experts(x, ids.float(), scores)),
        attempt(lambda: experts(x, ids, scores, addend=x.float())),
        attempt(lambda: GroupedExperts(E, H, I, layout="packed")),
        attempt(lambda: GroupedExperts(E, H, I, saved_dtype=torch.float32)),
        attempt(lambda: GroupedExperts.from_weights(x, x)),
        attempt(lambda: TopKRouter(H, 8, 9)),
        attempt(lambda: TopKRouter(H, 8, 2, scoring="relu")),
        attempt(lambda: TopKRouter(H, 8, 2, scoring="softmax", num_groups=2, topk_groups=1)),
        attempt(lambda: MoE(H, I, 8, 2, expert_mesh="none")),
        attempt(lambda: MoE(H, I, 8, 2, no_such_argument=1)),
        attempt(lambda: MoE(H, I, 8, 2, device=device)(x[:, :100])),
    ]
    if device == "cpu":
        outcomes.append(attempt(lambda: experts(x, ids + 3, scores)))
    return outcomes
