"""The op of shared experts, and the layer that calls it."""

import pytest
import torch

from moefp8.functional.feed_forward import feed_forward
from moefp8.kernels.common.activation import SWIGLU, Activation
from moefp8.kernels.registry import as_in_schema
from moefp8.layers import moe
from moefp8.layers.moe import SharedExperts
from moefp8.quant import quantize_128x128
from moefp8.testing import assert_matches_reference
from tests import naive
from tests.fakes.emulator import emulated
from tests.functional.cases import run_body
from tests.gpu import no_synchronisation, on_gpu
from tests.layers.cases import assert_close, assert_matches_up_to_codes

SIZES = [(1, 128, 128), (3, 200, 72), (17, 136, 264), (40, 1024, 512), (130, 256, 384)]


def operands(t: int, h: int, i: int, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(t + h + i)
    x = torch.randn(t, h, device=device).bfloat16()
    weights = [
        torch.randn(shape, device=device) / shape[1] ** 0.5 for shape in ((i, h), (i, h), (h, i))
    ]
    return [x, *(part for weight in weights for part in quantize_128x128(weight))]


def assert_launches_right(*arguments) -> None:
    assert_matches_up_to_codes(feed_forward(*arguments), run_body(feed_forward, *arguments))


@pytest.mark.parametrize("activation", [SWIGLU, Activation("geglu", 0.3)])
@pytest.mark.parametrize(("t", "h", "i"), SIZES)
def test_is_right(t, h, i, activation):
    made = operands(t, h, i)
    y = feed_forward(*made, activation)
    assert (y.dtype, y.shape) == (torch.bfloat16, (t, h))
    assert_matches_up_to_codes(y, naive.fp8_feed_forward(*made, activation))
    swapped = made[0], *made[3:5], *made[1:3], *made[5:]
    with pytest.raises(AssertionError):
        assert_matches_up_to_codes(y, naive.fp8_feed_forward(*swapped, activation))


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (0, lambda x: x.double(), "x must be"),
        (1, lambda x: x[:, 1:], r"gate must be \[I, H\]"),
        (2, lambda x: x[:, :0], r"gate_scale_inv must be \[ceil"),
        (3, lambda x: x.float(), "up must be"),
        (5, lambda x: x.T, "down must be|last dimension of down"),
        (6, lambda x: x.half(), "down_scale_inv must be"),
        (7, lambda x: Activation(limit=-1.0), "swiglu_limit must be at least 0"),
    ],
)
def test_bad_input_is_named(at, wrong, message):
    made = [*operands(4, 256, 128), Activation(limit=1.0)]
    made[at] = wrong(made[at])
    with pytest.raises((TypeError, ValueError), match=f"feed_forward: .*({message})"):
        feed_forward(*made)


def test_op_is_well_formed():
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    made = (*operands(4, 256, 128), SWIGLU)
    torch.library.opcheck(
        torch.ops.moefp8.feed_forward.default, as_in_schema(made), test_utils=checks
    )


@pytest.mark.parametrize(("t", "i"), [(0, 128), (3, 0)])
def test_nothing_to_do(t, i):
    assert not feed_forward(*operands(max(t, 1), 128, max(i, 1)), SWIGLU)[:t].isnan().any()
    experts = SharedExperts(128, i)
    assert torch.equal(experts(torch.ones(t, 128)), torch.zeros(t, 128))


def test_a_hook_is_called():
    experts, called = SharedExperts(128, 128), []
    experts.up_proj.register_forward_hook(lambda *_: called.append(1))
    x = torch.randn(3, 128)
    with torch.no_grad():
        y = experts(x)
    assert called == [1]
    experts.up_proj._forward_hooks.clear()
    with torch.no_grad():
        assert_matches_reference(experts(x), y, 0.05)


def test_the_gradient_of_a_weight_is_refused_aloud():
    experts = SharedExperts(128, 128)
    experts.up_proj.weight.requires_grad_()
    y = experts(torch.randn(3, 128, requires_grad=True))
    with pytest.raises(NotImplementedError, match=r"SharedExperts: .*moefp8\.adapters\.add_lora"):
        y.sum().backward()


# ---- The launcher, without a GPU ----


@pytest.mark.parametrize("activation", [SWIGLU, Activation("geglu", 0.3)])
@pytest.mark.parametrize(("t", "h", "i"), [*SIZES, (140, 128, 256), (700, 128, 128), (5, 100, 36)])
def test_launches_compute_what_the_body_does(t, h, i, activation):
    made = operands(t, h, i)
    with emulated() as gpu:
        for calls in (1, 2):
            assert_launches_right(*made, activation)
            assert len(gpu.launched) == 3 * calls
    quantization, gate_up, down = gpu.launched[-3:]
    assert quantization.kernel.name.startswith("quantize")
    assert (gate_up.config.gate_up, down.config.grouped) == (True, False)
    assert gate_up.programmatic
    assert down.programmatic


@pytest.mark.parametrize("i", [272, 264], ids=["weights fit", "copies do"])
@pytest.mark.parametrize("at", [2, 4, 6])
def test_one_number_may_be_the_scale_of_all_blocks(at, i):
    made = operands(5, 256, i)
    made[at] = torch.full((1, 1), 0.01).expand(made[at].shape)
    with emulated():
        assert_launches_right(*made, SWIGLU)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_one_weight_alone_may_have_another_pitch(at):
    """PyTorch calls a single row contiguous, whatever its stride is."""
    made = operands(5, 16, 1)
    rows, columns = made[at].shape
    memory = torch.empty(rows, columns + 16, dtype=made[at].dtype)
    made[at] = memory[:, :columns].copy_(made[at])
    with emulated():
        assert_launches_right(*made, SWIGLU)


def test_other_layers_of_one_layout_prepare_nothing():
    layers, (x, *rest) = [operands(5, 256, 264) for _ in range(3)], operands(4, 256, 264)
    with emulated() as gpu:
        counts = set()
        for _, *weights in layers:
            assert_launches_right(torch.randn(5, 256), *weights, SWIGLU)
            counts.add(prepared := len(gpu.prepared()))
        assert len(counts) == 1
        assert len(gpu.kernels) == 3
        for arguments in ((x, *weights, Activation(limit=0.3)), (x[:4], *rest, SWIGLU)):
            assert_launches_right(*arguments)
            assert len(gpu.prepared()) > prepared
            prepared = len(gpu.prepared())


def test_tokens_behind_128_rows_are_a_tail():
    cases = [operands(t, 128, 128) for t in (128, 129, 152, 153)]
    with emulated() as gpu:
        for case in cases:
            feed_forward(*case, SWIGLU)
    assert [made.config.tail > 0 for made in gpu.launched[1::3]] == [False, True, True, False]


# ---- On a GPU ----


@on_gpu
@pytest.mark.parametrize("activation", [SWIGLU, Activation("geglu", 0.3)])
@pytest.mark.parametrize(
    ("t", "h", "i"), [*SIZES, (700, 512, 640), (2049, 384, 1408), (5, 100, 36)]
)
def test_gpu_is_right(t, h, i, activation):
    made = operands(t, h, i, "cuda")
    expected = run_body(feed_forward, *made, activation)
    for _ in range(2):
        with no_synchronisation():
            y = feed_forward(*made, activation)
        assert_close(y, expected, i)


@on_gpu
def test_layer_in_a_graph_as_alone():
    layer = moe.MoE(256, 128, 8, 2, shared_intermediate_size=384).cuda()
    x = torch.randn(33, 256, device="cuda").bfloat16()
    with torch.inference_mode():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for _ in range(3):
            x.copy_(torch.randn(33, 256, device="cuda"))
            graph.replay()
            assert torch.equal(y, layer(x))


@pytest.mark.parametrize("shape", [(128,), (0, 128), (2, 0, 128), (2, 3, 128)])
def test_tokens_may_have_any_shape(shape):
    layer = SharedExperts(128, 128)
    x = torch.randn(shape).bfloat16()
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.view(-1, 128)).view(shape))
