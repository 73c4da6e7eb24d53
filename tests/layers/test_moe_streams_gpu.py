"""MoE layers on several streams of one CUDA graph: shared experts run beside, and meet nobody."""

import pytest
import torch

from moefp8 import MoE
from tests.gpu import on_gpu

H, I, E, K = 2048, 768, 64, 8


def layer(**options) -> MoE:
    return MoE(H, I, E, K, shared_intermediate_size=256, device="cuda", **options).eval()


@on_gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 128])
@pytest.mark.parametrize("gate", [False, True])
@torch.no_grad()
def test_layers_on_forked_streams_keep_their_shared_experts_apart(num_tokens, gate):
    """Shared experts of the second layer are done long before routed ones of the first."""
    torch.manual_seed(0)
    layers = [layer(shared_expert_gate=gate).bfloat16() for _ in range(4)]
    x = torch.empty(num_tokens, H, dtype=torch.bfloat16, device="cuda")
    streams = [torch.cuda.Stream() for _ in layers]
    for moe in layers:  # compiled before a capture
        moe(x.normal_())
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        home = torch.cuda.current_stream()
        for stream, moe in zip(streams, layers, strict=True):
            stream.wait_stream(home)
            with torch.cuda.stream(stream):
                results.append(moe(x))
        for stream in streams:
            home.wait_stream(stream)
    for _ in range(20):
        x.normal_()
        wanted = [moe(x) for moe in layers]
        graph.replay()
        torch.cuda.synchronize()
        for got, exact in zip(results, wanted, strict=True):
            assert torch.equal(got, exact)


@on_gpu
@torch.no_grad()
def test_layers_on_one_stream_of_a_graph_follow_one_another():
    torch.manual_seed(0)
    layers = [layer().bfloat16() for _ in range(3)]
    x = torch.empty(8, H, dtype=torch.bfloat16, device="cuda")

    def run(y):
        for moe in layers:
            y = moe(y)
        return y

    run(x.normal_())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(x)
    for _ in range(20):
        x.normal_()
        wanted = run(x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, wanted)
