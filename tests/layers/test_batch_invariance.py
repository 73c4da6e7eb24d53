"""A row has the same bits in every batch, and frozen layers those of trainable ones."""

import copy
import pickle

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts, MoE, TopKRouter, set_batch_invariant
from moefp8.adapters import add_lora
from moefp8.kernels import fp8_gemm_nt
from moefp8.kernels.gemm.sm90.heuristic import choose_config
from moefp8.kernels.gemm.sm90.tuned import ConfigSource, Dense, Table
from moefp8.quant import quantize_1x128, quantize_128x128
from tests.gpu import NUM_SMS, on_cpu_and_gpu, on_gpu

H, I, E, K = 520, 264, 6, 2
SOME = 1, 2, 3, 5, 7, 16, 33
# All that choose another number of tokens for WGMMA's columns or rows, and some thousands.
MANY = *range(1, 130), 192, 256, 257, 384, 511, 512, 513, 640, 777, 1024, 1500, 2048, 3000, 4096


def pairs(x: torch.Tensor, sign: int, dim: int = -1) -> torch.Tensor:
    """x, changed in place: all blocks of 128 but the last are large, and have equal halves.

    Where one operand has them with sign 1 and the other with sign -1, products cancel: a result is
    that of the last block, and of all that is rounded in the others.
    """
    blocks = x.transpose(dim, -1)[..., : (x.shape[dim] - 1) // 128 * 128].unflatten(-1, (-1, 2, 64))
    blocks *= 64
    blocks[..., 1, :] = sign * blocks[..., 0, :]
    return x


def tokens(device: str, num: int = 40, width: int = H) -> torch.Tensor:
    torch.manual_seed(3)
    octaves = torch.exp2(torch.randint(-4, 4, (num, width), device=device))
    return pairs((torch.randn(num, width, device=device) * octaves), 1).bfloat16()


@torch.no_grad()
def cancelling(layer: nn.Module) -> nn.Module:
    """Give a layer weights whose products with `tokens`, or with what experts activate, cancel."""
    is_frozen = not layer.trainable
    layer.unfreeze()
    for name in layer.master_names:
        weight = layer.get_parameter(name)
        pairs(weight, -1)
        for half in weight.chunk(2, dim=-2) if name == "gate_up_proj" else [weight]:
            pairs(half, 1, dim=-2)
    return layer.freeze() if is_frozen else layer


def assert_same_rows(layer, x: torch.Tensor, numbers, more=None) -> None:
    """What `layer` gives the first tokens does not depend on how many there are."""
    more = len(x) if more is None else more
    with torch.no_grad():
        whole = layer(x[:more])
        for num in numbers:
            part = layer(x[:num])
            assert torch.equal(part, whole[:num]), num


def moe_pair(device: str, cancels: bool = True, **options) -> tuple[MoE, MoE]:
    """A trainable layer, and one that serves the same master weights."""
    sizes = {"shared_intermediate_size": 400, "shared_expert_gate": True, **options}
    trainer = MoE(H, I, E, K, device=device, trainable=True, batch_invariant=True, **sizes)
    trainer.shared_expert_gate.bfloat16()
    for experts in (trainer.experts, *trainer.shared_experts.children()) if cancels else ():
        cancelling(experts)
    return trainer, moefp8.freeze(copy.deepcopy(trainer)).eval()


# ---- Rows ----


@on_cpu_and_gpu
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_linear(device, trainable, dtype):
    """K = 2048 is long enough to be divided on a GPU; CPUs sum in another order for few rows."""
    linear = FP8Linear(2048, 600, device=device, trainable=trainable, batch_invariant=True)
    assert_same_rows(cancelling(linear), tokens(device, 40, 2048).to(dtype), SOME)


def test_a_gemm():
    """Rows one by one; on a CPU no order of FP32 sums would be that of more rows."""
    weight = quantize_128x128(pairs(torch.randn(300, 2048), -1))
    data, scale_inv = quantize_1x128(tokens("cpu", 40, 2048))
    d, alone = torch.empty(2, 40, 300, dtype=torch.bfloat16)
    fp8_gemm_nt((data, scale_inv), weight, d, batch_invariant=True)
    for row in (slice(i, i + 1) for i in range(40)):
        a = data[row], scale_inv[row]
        fp8_gemm_nt(a, weight, alone[row], batch_invariant=True)
    assert torch.equal(alone, d)


@on_cpu_and_gpu
@pytest.mark.parametrize("trainable", [False, True])
def test_routed_experts_need_no_option(device, trainable):
    experts = cancelling(GroupedExperts(E, H, I, device=device, trainable=trainable))
    router = TopKRouter(H, E, K, device=device)
    assert_same_rows(lambda x: experts(x, *router(x)), tokens(device), SOME)


@on_cpu_and_gpu
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_router_needs_no_option(device, scoring):
    router = TopKRouter(H, E, K, scoring=scoring, device=device)
    for which in (0, 1):
        assert_same_rows(lambda x, which=which: router(x)[which], tokens(device), SOME)


@on_cpu_and_gpu
def test_a_whole_layer_frozen_and_trained(device):
    for layer in moe_pair(device):
        assert_same_rows(layer, tokens(device), SOME)


@on_gpu
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (4096, 512), (136, 2048), (1000, 1100)])
def test_all_numbers_of_rows_on_a_gpu(n, k):
    linear = cancelling(FP8Linear(k, n, device="cuda", batch_invariant=True))
    x = tokens("cuda", MANY[-1], k)
    assert_same_rows(linear, x, MANY)
    trained = copy.deepcopy(linear).unfreeze()
    trained.requires_grad_()
    same = trained(x.requires_grad_()).detach()
    assert torch.equal(same, copy.deepcopy(trained).freeze()(x.detach()))


@on_gpu
def test_all_numbers_of_tokens_on_a_gpu():
    for layer in moe_pair("cuda", shared_intermediate_size=2048):
        assert_same_rows(layer, tokens("cuda", MANY[-1]), MANY)


@on_cpu_and_gpu
def test_gradients_of_rows(device):
    linear = FP8Linear(136, 2048, device=device, batch_invariant=True).unfreeze()
    with torch.no_grad():
        pairs(linear.weight, -1, dim=-2)
    grad = tokens(device, 40, 2048)
    x = tokens(device, 40, 136).requires_grad_()
    for layer in (linear, copy.deepcopy(linear).freeze()):
        (whole,) = torch.autograd.grad(layer(x), x, grad)
        for num in SOME:
            part = x[:num].detach().requires_grad_()
            (found,) = torch.autograd.grad(layer(part), part, grad[:num])
            assert torch.equal(found, whole[:num]), num


# ---- Trainer and server ----


@on_cpu_and_gpu
@pytest.mark.parametrize("num_tokens", [1, 7, 130])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_server_has_the_bits_of_its_trainer(device, num_tokens, invariant):
    """Those of a training forward, of one without gradients, and of frozen codes."""
    trainer, server = (set_batch_invariant(x, invariant) for x in moe_pair(device))
    x = tokens(device, num_tokens)
    trained = trainer(x.clone().requires_grad_())
    assert trained.grad_fn is not None
    with torch.no_grad():
        for other in (trainer(x), trainer.eval()(x), server(x)):
            assert torch.equal(other, trained.detach())


@on_cpu_and_gpu
@pytest.mark.parametrize("options", [{}, {"swiglu_limit": 0.5}, {"wgrad": "bf16"}])
def test_after_steps_of_an_optimizer(device, options):
    trainer, _ = moe_pair(device, cancels=False, **options)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    x = torch.randn(20, H, device=device).bfloat16()
    before = trainer(x).detach()
    for _ in range(2):
        trainer(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = trainer(x).detach()
    assert trained.isfinite().all()
    assert not torch.equal(trained, before)
    assert torch.equal(moefp8.freeze(copy.deepcopy(trainer))(x), trained)


# ---- Where it is set ----


def test_it_is_set_for_all_layers_of_a_model_and_kept():
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 64), nn.GELU(), MoE(64, 128, 2, 1))
    model = moefp8.convert(model, only=["0", "1"])
    assert not any(getattr(x, "batch_invariant", False) for x in model.modules())
    assert set_batch_invariant(model) is model
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [other[i].batch_invariant for i in (0, 1, 3)] == [True] * 3
    moefp8.unfreeze(model)
    assert "batch_invariant=True" in repr(moefp8.freeze(model)[0])
    assert "batch_invariant" not in repr(set_batch_invariant(model, False))


def test_it_compiles_whole():
    linear = FP8Linear(256, 64, batch_invariant=True)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    x = tokens("cpu", 3, 256)
    assert torch.equal(compiled(x), linear(x))


def test_what_cannot_be_set_is_said():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got list"):
        set_batch_invariant([])
    with pytest.raises(TypeError, match="enabled must be a bool, got 1"):
        set_batch_invariant(nn.GELU(), 1)
    with pytest.warns(UserWarning, match="no FP8Linear and no MoE, so nothing was changed"):
        set_batch_invariant(nn.Linear(4, 4))
    model = nn.Sequential(FP8Linear(128, 64))
    add_lora(model, rank=2, alpha=4)
    with pytest.raises(ValueError, match="in BF16 depend on the batch"):
        set_batch_invariant(model)
    set_batch_invariant(model, False)


# ---- What is launched and listed ----


@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (64, 16384), (24576, 128), (136, 1100)])
def test_no_number_of_rows_divides_k(n, k):
    for num_sms in (1, 78, NUM_SMS):
        source = ConfigSource(num_sms, num_sms)
        assert {source.dense(m, n, k, True).split_k for m in range(1, 700)} == {1}
    assert ConfigSource(NUM_SMS, NUM_SMS).dense(1, 2112, 7168).split_k > 1


def test_what_was_tuned_counts_if_it_divides_no_k():
    divided = choose_config(1, 2112, 7168, NUM_SMS)
    whole = choose_config(100, 2112, 7168, NUM_SMS, batch_invariant=True)
    assert divided.split_k > 1
    table = Table({Dense(2112, 7168): {8: divided, 16: whole}})
    source = ConfigSource(NUM_SMS, NUM_SMS, table)
    assert source.dense(8, 2112, 7168) is divided
    assert source.dense(8, 2112, 7168, True).split_k == 1
    assert source.dense(16, 2112, 7168, True) is whole
