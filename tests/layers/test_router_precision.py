"""Global switches of FP32 matmuls reach no router: the same inputs choose the same experts."""

import pytest
import torch

from moefp8 import TopKRouter
from tests.gpu import on_cpu_and_gpu

H, E = 7168, 256


@pytest.fixture(params=["high", "medium", "allow_tf32"])
def switch(request):
    """A switch that turns FP32 matmuls to TF32 or BF16, on devices that can."""
    before = torch.get_float32_matmul_precision()

    def turn() -> None:
        if request.param == "allow_tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
        else:
            torch.set_float32_matmul_precision(request.param)

    yield turn
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision(before)


@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 300])
def test_the_same_experts_with_the_same_weights(switch, device, num_tokens, dtype):
    torch.manual_seed(0)
    router = TopKRouter(H, E, 8, device=device)
    x = torch.randn(num_tokens, H, device=device).to(dtype)
    with torch.no_grad():
        wanted = router(x)
        switch()
        got = router(x)
    assert torch.equal(got.top_k_index, wanted.top_k_index)
    assert torch.equal(got.top_k_weights, wanted.top_k_weights)


@on_cpu_and_gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 64])
def test_logits_are_exact_to_fp32(device, num_tokens):
    """Where one of two experts is chosen, the softmax tells the difference of two logits."""
    torch.manual_seed(0)
    router = TopKRouter(H, 2, 2, renormalize=False, device=device)
    x = torch.randn(num_tokens, H, device=device) * 30
    with torch.no_grad():
        index, weights = router(x)
        exact = (x.double() @ router.weight.double().T).softmax(-1).gather(1, index.long())
    assert ((weights - exact).abs() < 2e-6 + 2e-5 * exact).all()


def test_it_compiles_whole():
    router = TopKRouter(64, 8, 2)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    for num_tokens in (1, 5):
        x = torch.randn(num_tokens, 64)
        with torch.no_grad():
            for got, wanted in zip(compiled(x), router(x), strict=True):
                assert torch.equal(got, wanted)
