"""What `updating` refuses: before a call writes anything, and at the end what is missing."""

import pytest
import torch
from torch import nn

import moefp8
from tests.checkpoint.cases import E, H, I, Tiny, deepseek_tensors, fp8_pair, model_bytes
from tests.checkpoint.update.cases import EXPERTS, spoiled_tiny, trainer_tensors, update

NORM = "model.layers.0.norm.weight"
KV = "model.layers.0.kv_a_proj_with_mqa.weight"
GATE = f"{EXPERTS}.0.gate_proj.weight"


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32).to(dtype)


def refused(*calls, model: nn.Module | None = None, error: type = ValueError) -> str:
    """The message of the last call, which writes nothing of what it is given."""
    model = spoiled_tiny() if model is None else model

    def run() -> None:
        with moefp8.updating(model) as block:
            for call in calls[:-1]:
                block.add(call)
            before.update(model_bytes(model))
            block.add(calls[-1])

    before: dict[str, bytes] = {}
    with pytest.raises(error) as caught:
        run()
    assert model_bytes(model) == before
    assert "the block has ended" not in str(caught.value)
    return str(caught.value)


def test_unknown_names_come_with_the_nearest():
    message = refused(
        {
            NORM: weight(H),
            "model.layers.0.mlp.expert.1.gate_proj.weight": weight(I, H),
            "model.layers.7.norm.weight": weight(H),
            f"{EXPERTS}.3.gate_proj.weight": weight(I, H),
            "nothing": weight(1),
        }
    )
    assert "4 of the tensors do not fit the model; none of this call was written" in message
    assert "model.layers.0.mlp.expert.1.gate_proj.weight: extra" in message
    assert "near is model.layers.*.mlp.experts.*.gate_proj.weight" in message
    assert "model.layers.7.norm.weight: extra, the model has no place for it" in message
    assert f"{EXPERTS}.3.gate_proj.weight: expert 3, but {EXPERTS} has 3 experts" in message
    assert "nothing: extra, the model has no place for it; no name is near" in message


@pytest.mark.parametrize(
    ("sent", "rule"),
    [
        ({NORM: weight(H + 1)}, f"{NORM}: shape must be [256], got [257]"),
        ({KV: weight(H, 576)}, "shape must be [576, 256], got [256, 576]"),
        ({GATE: weight(2 * I, H)}, "shape must be [320, 256], got [640, 256]"),
        ({f"{EXPERTS}.down_proj": weight(E, I, H)}, "shape must be [3, 256, 320], got"),
        (
            {f"{KV}_scale_inv": weight(4, 2, dtype=torch.float32)},
            "shape must be [5, 2], got [4, 2]",
        ),
        (
            {f"{EXPERTS}.gate_up_proj_scale_inv": weight(E, 5, 2, dtype=torch.float32)},
            "each must be cut by itself: requantize them",
        ),
        ({KV: weight(576, H, dtype=torch.float64)}, "dtype must be BF16, F16, F32 or F8_E4M3"),
        ({KV: weight(576, H, dtype=torch.int8)}, "or F8_E4M3, got I8"),
        ({NORM: weight(H, dtype=torch.int64)}, "dtype must be BF16, got I64"),
        (
            {NORM: weight(H, dtype=torch.float8_e4m3fn)},
            "an FP8 weight, but model.layers.0.norm takes BF16; send it in BF16",
        ),
        (
            {f"{KV}_scale_inv": weight(5, 2, dtype=torch.float64)},
            "dtype of a scale must be one of F32, BF16, F16, F8_E8M0, got F64",
        ),
        ({NORM: torch.empty(H, dtype=torch.bfloat16, device="meta")}, "on the meta device"),
        ({NORM: weight(H).to_sparse()}, "its layout is torch.sparse_coo"),
        ({KV: weight(576, H), f"{KV}_scale_inv": weight(5, 2)}, "which did not come in FP8"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(sent, rule):
    assert rule in refused({"model.layers.0.norm.bias": weight(H), **sent})


def test_a_rounded_correction_bias_is_refused():
    model = Tiny(1)
    router = model.model.layers[0].mlp.gate
    router.e_score_correction_bias = torch.zeros(E, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    message = refused({name: torch.randn(E)}, model=model)
    assert "dtype must be BF16, got F32, which a load would keep" in message
    update(model, {name: weight(E)})


def test_codes_of_a_stack_whose_cut_nobody_knows_are_refused():
    """200 rows of gate and 200 of up have as many blocks as 400 rows."""
    model = nn.ModuleDict({"experts": moefp8.GroupedExperts(2, 128, 200)})
    message = refused(model.state_dict(), model=model)
    assert "nothing tells whether gate and up were cut into blocks one after the other" in message
    update(model, {"experts.gate_up_proj": weight(2, 400, 128)})


def test_a_part_comes_once():
    message = refused({GATE: weight(I, H)}, {GATE: weight(I, H)})
    assert f"{GATE}: {GATE} came for {GATE} in this block already" in message
    pairs = [(NORM, weight(H)), (NORM, weight(H))]
    assert f"{NORM} came for {NORM}" in refused(pairs)
    stack = {f"{EXPERTS}.gate_up_proj": weight(E, 2 * I, H)}
    assert f"{EXPERTS}.gate_up_proj: {GATE} came for {GATE}" in refused({GATE: weight(I, H)}, stack)
    assert f"{EXPERTS}.gate_up_proj came for {GATE}" in refused(stack, {GATE: weight(I, H)})
    w1 = GATE.replace("mlp", "block_sparse_moe").replace("gate_proj", "w1")
    assert f"{w1}: {GATE} came for {GATE}" in refused({GATE: weight(I, H)}, {w1: weight(I, H)})


@pytest.mark.parametrize(
    ("changed", "error", "rule"),
    [
        (weight(H, I), ValueError, "shape must be"),
        (weight(I, H).to(torch.int32), ValueError, "dtype must be BF16, F16, F32 or F8_E4M3"),
        (weight(I, H).to("meta"), ValueError, "it is on the meta device, and has no values"),
        (weight(I, H).to_sparse(), ValueError, "torch.sparse_coo"),
        (None, TypeError, "NoneType"),
    ],
)
def test_names_that_came_before_are_checked_again(changed, error, rule):
    model = spoiled_tiny()
    update(model, tensors := trainer_tensors())
    assert rule in refused(tensors | {GATE: changed}, model=model, error=error)


def test_a_part_comes_once_also_under_names_that_came_before():
    model = spoiled_tiny()
    update(model, tensors := trainer_tensors())
    assert "in this block already" in refused(tensors, tensors, model=model)
    assert "in this block already" in refused({NORM: weight(H)}, tensors, model=model)


def test_scales_of_weights_in_16_bits_are_refused_in_any_order():
    scale = {f"{KV}_scale_inv": weight(5, 2, dtype=torch.float32)}
    assert "which did not come in FP8" in refused({KV: weight(576, H)}, scale)
    assert f"its scale {KV}_scale_inv came before" in refused(scale, {KV: weight(576, H)})
    update(model := spoiled_tiny(), {KV: weight(576, H)})
    assert "came before" in refused(scale, {KV: weight(576, H)}, model=model)


@pytest.mark.parametrize(
    ("sent", "rule"),
    [
        (5, "got int"),
        (NORM, "got str"),
        (weight(2, 2), "got Tensor"),
        ([NORM], "got str"),
        ([(NORM, weight(H), 1)], "got tuple"),
        ({NORM: 1.0}, r"got (str, float)"),
        ([(1, weight(H))], r"got (int, Tensor)"),
    ],
)
def test_what_is_no_named_tensor_is_a_type_error(sent, rule):
    message = refused(sent, error=TypeError)
    assert "takes a mapping of names to tensors, or pairs (name, tensor)" in message
    assert rule in message


def test_missing_parts_are_named_at_the_end():
    tensors = trainer_tensors()
    lost = [f"{EXPERTS}.{i}.{name}_proj.weight" for i in (1, 2) for name in ("gate", "up")]
    kept = {key: x for key, x in tensors.items() if key not in lost}
    with pytest.raises(ValueError, match="did not come, of tensors that were begun") as caught:
        update(spoiled_tiny(), kept)
    assert f"ended, but {', '.join(lost)} did not come" in str(caught.value)
    one = {f"{EXPERTS}.0.down_proj.weight": tensors[f"{EXPERTS}.0.down_proj.weight"]}
    with pytest.raises(ValueError, match=r"experts\.1\.down_proj\.weight, .* did not come"):
        update(spoiled_tiny(), one)
    many = nn.ModuleDict({"experts": moefp8.GroupedExperts(9, 128, 128)})
    with pytest.raises(ValueError, match=r"experts\.5\.down_proj\.weight and 3 more did not come"):
        update(many, {"experts.0.down_proj.weight": weight(128, 128)})


def test_codes_and_scales_belong_together():
    pair = fp8_pair(KV.removesuffix(".weight"), 576, H)
    for name, other in (pair.keys(), reversed(pair.keys())):
        with pytest.raises(ValueError, match=f"ended, but {other} did not come"):
            update(spoiled_tiny(), {name: pair[name]})
    codes = {key: x for key, x in deepseek_tensors(1).items() if "experts.1.up" not in key}
    with pytest.raises(ValueError, match=rf"but {EXPERTS}\.1\.up_proj\.weight did not come"):
        update(spoiled_tiny(), codes)


def test_an_exception_says_nothing_of_missing_parts():
    def run() -> None:
        with moefp8.updating(spoiled_tiny()) as block:
            block.add({GATE: weight(I, H)})
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()


def test_a_call_that_was_refused_may_be_repeated():
    model = spoiled_tiny()
    with moefp8.updating(model) as block:
        with pytest.raises(ValueError, match="shape must be"):
            block.add({NORM: weight(H), KV: weight(1, 1)})
        block.add({NORM: weight(H)})
    assert bool((model.model.layers[0].norm.weight == 1).all())


def test_a_block_that_has_ended_takes_nothing():
    with moefp8.updating(spoiled_tiny()) as block:
        pass
    with pytest.raises(RuntimeError, match=r"the block of moefp8\.updating has ended"):
        block.add({})


def test_models_that_cannot_be_written_are_refused():
    with torch.device("meta"):
        on_meta = Tiny(1)
    sparse = nn.Linear(2, 2)
    sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse())
    for model, error, rule in (
        (
            on_meta,
            ValueError,
            r"^updating: model\.embed_tokens\.weight, .* are on the meta device;",
        ),
        (sparse, ValueError, r"cannot be written to:\n  - weight: its layout is torch.sparse_coo"),
        ({}, TypeError, "model must be an nn.Module, got dict"),
    ):
        with pytest.raises(error, match=rule), moefp8.updating(model):
            pass
