"""Modules whose weights train: states, copies, casts, and what they say of themselves."""

import copy
import io
import pickle

import pytest
import torch

from moefp8 import MoE, freeze
from moefp8.testing import relative_error
from tests.layers.training.trainable_cases import DTYPES, KINDS, H, fresh, make, output


@KINDS
@DTYPES
def test_states_of_the_same_form_come_back(kind, dtype):
    module, other = make(kind, dtype=dtype), make(kind, dtype=dtype)
    other.load_state_dict(module.state_dict())
    assert not any(name.endswith("_scale_inv") for name in module.state_dict())
    assert torch.equal(output(other, kind), output(module, kind))
    wide = make(kind, dtype=torch.float32)  # other masters are cast, as nn.Linear does
    wide.load_state_dict(module.state_dict())
    assert all(x.dtype == torch.float32 for x in wide.parameters())


@KINDS
def test_states_of_the_other_form_are_refused_with_the_way_out(kind):
    trained, frozen = make(kind), make(kind, trainable=False)
    weight = trained.master_names[0]
    before = {name: x.clone() for name, x in trained.state_dict().items()}
    rule = rf"{weight} must be bfloat16 .* got float8_e4m3fn; freeze\(\) the module first, or load"
    with pytest.raises(RuntimeError, match=rule):
        trained.load_state_dict(frozen.state_dict())
    assert all(torch.equal(x, before[name]) for name, x in trained.state_dict().items())
    rule = rf"{weight} must be float8_e4m3fn, got bfloat16; .*unfreeze\(\) the module first"
    with pytest.raises(RuntimeError, match=rule):
        frozen.load_state_dict(trained.state_dict())
    frozen.unfreeze().load_state_dict(trained.state_dict())
    trained.freeze().load_state_dict(frozen.freeze().state_dict())


@KINDS
@pytest.mark.parametrize("form", ["trained", "frozen", "unfrozen"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies(kind, form, way):
    module = make(kind, wgrad="128x128")
    if form != "trained":
        module.freeze()
    if form == "unfrozen":
        module.unfreeze(torch.float32)
    y = output(module, kind)
    if way == "deepcopy":
        twin = copy.deepcopy(module)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(output(twin, kind), y)
    assert (twin.trainable, twin.wgrad) == (module.trainable, "128x128")
    assert [x.requires_grad for x in twin.parameters()] == [
        x.requires_grad for x in module.parameters()
    ]
    if module.trainable:  # the copy has weights and codes of its own
        with torch.no_grad():
            twin.get_parameter(twin.master_names[0]).zero_()
        assert torch.equal(output(module, kind), y)
        assert not torch.equal(output(twin, kind), y)


@KINDS
def test_casts_are_of_master_weights(kind):
    module = make(kind)
    for cast, dtype in (
        (lambda x: x.half(), torch.float16),
        (lambda x: x.to(torch.float32), torch.float32),
        (lambda x: x.bfloat16(), torch.bfloat16),
    ):
        output(module, kind)
        assert cast(module) is module
        assert all(x.dtype == dtype and x.requires_grad for x in module.parameters())
        assert torch.equal(output(module, kind), fresh(module, kind))
    with pytest.raises(TypeError, match=r"must be .*float32, got .*float64"):
        output(module.double(), kind)


@KINDS
def test_meta_and_to_empty(kind):
    module = make(kind, device="meta")
    assert all(x.is_meta and x.requires_grad for x in module.parameters())
    module.to_empty(device="cpu").reset_parameters()
    assert module.trainable
    assert output(module, kind).isfinite().all()
    assert all(x.is_meta for x in make(kind).to("meta").parameters())
    frozen = make(kind, device="meta").freeze()
    assert frozen.state_dict().keys() == make(kind, trainable=False).state_dict().keys()
    assert all(x.is_meta for x in frozen.unfreeze().parameters())


@KINDS
def test_repr(kind):
    assert "trainable=True, wgrad='128x1'" in repr(make(kind))
    frozen = repr(make(kind).freeze())
    assert "trainable=False" in frozen
    assert "wgrad" not in frozen


@KINDS
def test_wgrad_is_checked_and_kept_for_later(kind):
    with pytest.raises(ValueError, match="wgrad must be '128x1', '128x128' or 'bf16', got 'fp8'"):
        make(kind, wgrad="fp8")
    frozen = make(kind, trainable=False, wgrad="bf16")
    assert frozen.unfreeze().wgrad == "bf16"
    assert frozen.unfreeze(wgrad="128x128").wgrad == "128x128"
    for module in (frozen, make(kind, trainable=False)):
        with pytest.raises(ValueError, match="wgrad must be '128x1', '128x128' or 'bf16', got"):
            module.unfreeze(wgrad="fp8")
        with pytest.raises(ValueError, match="wgrad must be '128x1', '128x128' or 'bf16', got"):
            module.wgrad = "fp8"
    assert frozen.wgrad == "128x128"


def test_a_layer_trains_and_is_frozen():
    torch.manual_seed(0)
    moe = MoE(H, 24, 4, 2, shared_intermediate_size=16, shared_expert_gate=True, trainable=True)
    assert moe.shared_experts.up_proj.trainable
    x = torch.randn(64, H).bfloat16()
    optimizer, losses = torch.optim.AdamW(moe.parameters(), 1e-2), []
    for _ in range(6):
        loss = (moe(x) - x).float().square().mean()
        loss.backward()
        assert all(p.grad is not None for p in moe.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    y = moe.eval()(x).detach()
    assert relative_error(freeze(moe)(x), y) < 0.05  # shared experts are one op then


@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_shared_experts_take_any_dtype(master):
    moe = MoE(H, 24, 4, 2, shared_intermediate_size=16, trainable=True, dtype=master)
    for dtype in (torch.bfloat16, torch.float32):
        y = moe(torch.randn(5, H, dtype=dtype))
        assert y.dtype == dtype
        y.sum().backward()
