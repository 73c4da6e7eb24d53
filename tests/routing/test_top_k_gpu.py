"""The router's choice on a GPU: the same as on the CPU."""

import pytest
import torch

from moefp8 import TopKRouter
from moefp8.routing import sigmoid_group_topk, softmax_topk
from moefp8.routing.top_k import _sigmoid
from tests.gpu import NEEDS_GPU, no_synchronisation
from tests.routing.top_k_cases import (
    DTYPES,
    assert_same_choice,
    bias_of,
    group_limits,
    logits_of,
    samples,
)

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_experts", [1, 8, 33, 64, 128, 160, 256, 384, 512])
def test_choices_on_a_gpu_equal_the_cpu(num_experts, dtype):
    ks = [k for k in (1, 2, 6, 8, 10, 40, num_experts) if k <= num_experts]
    bias = bias_of(num_experts)
    gpu_bias = bias.cuda()
    for num_tokens in (1, 3, 257):
        wide = logits_of(num_tokens, num_experts + 3, dtype)
        for first in (0, 1):
            logits, gpu_logits = (x[:, first : first + num_experts] for x in (wide, wide.cuda()))
            for k in dict.fromkeys(ks):
                renormalize = k % 2 == 0
                with no_synchronisation():
                    ours = softmax_topk(gpu_logits, k, renormalize)
                assert_same_choice(ours, softmax_topk(logits, k, renormalize), 16)
                for groups in group_limits(num_experts, k):
                    rest = k, *groups, renormalize, 2.5
                    with no_synchronisation():
                        ours = sigmoid_group_topk(gpu_logits, gpu_bias, *rest)
                    assert_same_choice(ours, sigmoid_group_topk(logits, bias, *rest), 0)


def test_sigmoid_on_a_gpu_is_bit_equal():
    x = samples()
    ours = sigmoid_group_topk(x[:, None].cuda(), None, 1, renormalize=False).top_k_weights
    assert torch.equal(ours[:, 0].cpu().nan_to_num(7.0), _sigmoid(x).nan_to_num(7.0))
    ours = _sigmoid(x.cuda())
    assert torch.equal(ours.cpu().nan_to_num(7.0), _sigmoid(x).nan_to_num(7.0))


def test_many_tokens_on_a_gpu_equal_the_cpu():
    logits, bias = torch.randn(16384, 256), torch.randn(256) * 0.1
    gpu_logits, gpu_bias = logits.cuda(), bias.cuda()
    rest = 8, 8, 4, True, 2.5
    with no_synchronisation():
        ours = sigmoid_group_topk(gpu_logits, gpu_bias, *rest)
        softmaxes = softmax_topk(gpu_logits, 8, True)
    assert_same_choice(ours, sigmoid_group_topk(logits, bias, *rest), 0)
    assert_same_choice(softmaxes, softmax_topk(logits, 8, True), 16)


@pytest.mark.filterwarnings("ignore:.*portable PyTorch body")
def test_many_experts_on_a_gpu_do_not_wait():
    logits = torch.randn(9, 600)
    gpu_logits = logits.cuda()
    with no_synchronisation():
        ours = softmax_topk(gpu_logits, 8, True), sigmoid_group_topk(gpu_logits, None, 8, 6, 2)
    assert_same_choice(ours[0], softmax_topk(logits, 8, True), 16)
    assert_same_choice(ours[1], sigmoid_group_topk(logits, None, 8, 6, 2), 0)


def test_one_graph_serves_every_router_input():
    router = TopKRouter(64, 32, 4, scoring="sigmoid", correction_bias=True).cuda()
    x, logits = torch.randn(5, 64, device="cuda"), torch.randn(5, 32, device="cuda")

    def choose() -> list[torch.Tensor]:
        with torch.no_grad():
            router(x)
        choices = softmax_topk(logits, 4, True), sigmoid_group_topk(logits, logits[0], 4, 8, 4)
        return [tensor for choice in choices for tensor in choice]

    choose()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = choose()
    for _ in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, choose(), strict=True))
