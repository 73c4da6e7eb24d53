"""`precompile`: what launchers load is what was compiled ahead, for all numbers of tokens."""

import copy
import ctypes
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts, MoE, TopKRouter
from moefp8.adapters import add_lora
from moefp8.kernels import jit
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.sm90 import tuned
from moefp8.kernels.gemm.sm90.config import GemmConfig, with_most_stages
from moefp8.kernels.gemm.sm90.gemms import Sm90
from moefp8.kernels.gemm.sm90.launch import kernel_of
from moefp8.kernels.jit.nvrtc import Nvrtc
from moefp8.kernels.program import Target
from moefp8.kernels.targets import target_with
from moefp8.precompile import layers as ahead
from moefp8.routing import sigmoid_group_topk, softmax_topk
from tests.fakes.emulator import Emulator, FakeDriver
from tests.gpu import ARCH, on_gpu
from tests.kernels.jit.cases import forget
from tests.routing.cases import ids_of

MAX_TOKENS = 3000
NEEDS_GROUPED_MM_ON_A_CPU = pytest.mark.skipif(
    not hasattr(nn.functional, "grouped_mm"), reason="torch's grouped_mm runs on a CPU from 2.10 on"
)


class Model(nn.Module):
    """Every kind of layer; sizes that 8 divides and sizes that it does not."""

    def __init__(self, layout: str = "auto") -> None:
        super().__init__()
        scoring = {"scoring": "sigmoid", "num_groups": 2}
        self.moe = MoE(256, 144, 12, 3, shared_intermediate_size=264, layout=layout, **scoring)
        self.odd = nn.ModuleDict(
            {"router": TopKRouter(100, 5, 2), "experts": GroupedExperts(5, 100, 36, layout=layout)}
        )
        self.linears = nn.ModuleList(
            FP8Linear(k, n, bias=dtype is not None, dtype=dtype or torch.bfloat16)
            for n, k, dtype in (
                (2000, 512, None), (136, 1024, torch.bfloat16),
                (77, 130, torch.float32), (300, 60, torch.float16),
            )
        )  # fmt: skip


@torch.inference_mode()
def run(model: Model, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """`tokens` tokens through every layer, on a GPU of which nothing comes back."""
    for linear in (*model.linears, model.moe.shared_experts):
        features = linear.in_features if isinstance(linear, FP8Linear) else 256
        linear(torch.zeros(tokens, features, dtype=dtype))
    logits = torch.randn(tokens, 12)
    sigmoid_group_topk(logits, None, 3, 2, 1, True, 1.0)
    softmax_topk(logits[:, :5], 2, True)
    model.moe.gate(torch.zeros(tokens, 256, dtype=dtype))
    for experts, top_k in ((model.moe.experts, 3), (model.odd["experts"], 2)):
        ids = ids_of("distinct", tokens, top_k, experts.num_experts)
        x = torch.zeros(tokens, experts.hidden_size, dtype=dtype)
        experts(x, ids, torch.ones(tokens, top_k))


def step(model: Model, tokens: int, dtype: torch.dtype) -> None:
    """The gradients of `tokens` tokens through every layer."""
    for linear in (*model.linears, model.moe.shared_experts):
        features = linear.in_features if isinstance(linear, FP8Linear) else 256
        x = torch.zeros(tokens, features, dtype=dtype, requires_grad=True)
        linear(x).sum().backward()
    logits = torch.randn(tokens, 12, requires_grad=True)
    chosen = sigmoid_group_topk(logits, None, 3, 2, 1, True, 1.0)
    (chosen.top_k_weights.sum() + softmax_topk(logits[:, :5], 2, True)[1].sum()).backward()
    if dtype == torch.bfloat16:  # others go to the experts that come back
        model.moe.gate(torch.zeros(tokens, 256, dtype=dtype)).top_k_weights.sum().backward()
    for experts, top_k in ((model.moe.experts, 3), (model.odd["experts"], 2)):
        ids = ids_of("distinct", tokens, top_k, experts.num_experts)
        x = torch.zeros(tokens, experts.hidden_size, dtype=dtype, requires_grad=True)
        experts(x, ids, torch.ones(tokens, top_k)).sum().backward()


WORKSPACE = 1 << 20  # what is no memory; it ends below 2^40


class Idle(Emulator):
    """It runs nothing; in a plan, all tokens have row 0, which is token 0 and of no expert."""

    def compute(self, made, parameters):
        stem = made.kernel.source.stem
        if stem not in ("plan", "dispatch"):
            return
        arguments = jit.struct_of(made.kernel.source).from_address(parameters[-1])
        of = arguments.routing
        maps = [
            (of.tokens_per_expert, of.num_experts),
            (of.expert_offsets, of.num_experts + 1),
            (of.token_to_row, of.num_tokens * of.top_k),
        ]
        if stem == "plan":
            num_rows = arguments.num_rows
            maps += [(arguments.row_to_token, num_rows), (arguments.row_to_expert, num_rows)]
        for address, size in maps:
            if address >= 1 << 40:
                ctypes.memset(address, 0, 4 * size)


class IdleDriver(FakeDriver):
    """Of a GPU that runs nothing and has no memory: workspaces of all sizes would be some GB."""

    def __init__(self, library: Idle | None = None) -> None:
        super().__init__(library=library or Idle())

    def allocate(self, num_bytes: int, stream: int) -> int:
        return WORKSPACE


def kernels_of(model: nn.Module, max_tokens: int = 64, **options) -> set[jit.Kernel]:
    return set(ahead.kernels_of(model, max_tokens, **options))


@pytest.fixture(scope="module", params=["auto", "masked"])
def model(request) -> Model:
    return Model(request.param)


def test_it_lists_what_launchers_need_for_some_number_of_tokens(model):
    """It lists nothing else but kernels for tokens that lie unaligned."""
    with jit.using(IdleDriver()) as gpu:
        for tokens in (*range(1, 130), *range(130, 513, 21), *range(513, MAX_TOKENS, 45)):
            run(model, tokens)
        run(model, MAX_TOKENS)
    assert set(gpu.kernels) - kernels_of(model, MAX_TOKENS) == set()
    named = kernels_of(model, MAX_TOKENS) - set(gpu.kernels)
    unaligned = re.compile(r"quantize_1x128_kernel<.*, false>|dispatch_kernel<\S+ false, ")
    other_weights = re.compile(r"combine_kernel<Input::kBFloat16")
    rest = [k.name for k in named if not (unaligned.match(k.name) or other_weights.match(k.name))]
    assert len(rest) <= 2, rest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_lists_what_new_weights_need(dtype):
    """W^T is written beside them where a backward has kept it."""
    whole = nn.ModuleDict({"linear": FP8Linear(72, 400), "experts": GroupedExperts(2, 128, 64)})
    model = moefp8.shard(whole, {"linear": "rows"}, 0, 3)  # in the midst of a block
    weights = {"linear.weight": torch.ones(400, 72)}
    for name, shape in {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}.items():
        weights |= {f"experts.{e}.{name}_proj.weight": torch.ones(shape) for e in range(2)}
    with jit.using(IdleDriver()) as gpu, moefp8.updating(model) as block:
        block.add({name: x.to(dtype) for name, x in weights.items()})
    before = kernels_of(model, 1, top_k=1)
    named = kernels_of(model, 1, top_k=1, updating=dtype) - before
    assert {kernel.source.stem for kernel in gpu.kernels} == {"each", "quantize"}
    assert set(gpu.kernels) - named == set()
    assert all(", false" in kernel.name for kernel in named - set(gpu.kernels))  # unaligned
    of_backward = kernels_of(model, 1, top_k=1, updating=dtype, backward=True) - before
    each, others = ({x for x in y if x.source.stem == "each"} for y in (named, of_backward))
    assert each < others
    assert len(others) == 2 * len(each)
    with pytest.raises(TypeError, match="precompile"):
        kernels_of(model, 1, top_k=1, updating=torch.int8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_lists_what_gradients_need(model, dtype):
    model = copy.deepcopy(model)
    model.odd["experts"].saved_dtype = torch.float8_e4m3fn
    with jit.using(IdleDriver()) as gpu:
        for tokens in (1, 2, 5, 17, 40, 130, 260, 500, 1200, MAX_TOKENS):
            step(model, tokens, dtype)
    named = kernels_of(model, MAX_TOKENS, dtype=dtype, backward=True)
    assert set(gpu.kernels) - named == set()
    more = named - kernels_of(model, MAX_TOKENS, dtype=dtype)
    assert any("activation_backward" in kernel.name for kernel in more)
    assert any(".saves_gate_up = true" in kernel.name for kernel in more)


@pytest.mark.parametrize(
    "wgrad", ["128x1", "128x128", pytest.param("bf16", marks=NEEDS_GROUPED_MM_ON_A_CPU)]
)
@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
)
def test_it_lists_what_trained_weights_need(model, wgrad, dtype, master):
    model = moefp8.unfreeze(copy.deepcopy(model), master, wgrad=wgrad)
    model.odd["experts"].saved_dtype = torch.float8_e4m3fn
    model.linears[2].weight.requires_grad_(False)
    model.linears[0].weight.main_grad = torch.zeros_like(model.linears[0].weight).float()
    sizes = (1, 2, 17, 130, 500, 1200, MAX_TOKENS)[: 4 if wgrad == "bf16" else 7]
    with jit.using(IdleDriver()) as forward:
        for tokens in sizes:
            run(model, tokens, dtype)
    named = kernels_of(model, MAX_TOKENS, dtype=dtype)
    assert set(forward.kernels) - named == set()
    assert any("both_kernel" in kernel.name for kernel in forward.kernels)
    with jit.using(IdleDriver()) as whole:
        for tokens in sizes:
            step(model, tokens, dtype)
        model.linears[0].weight.overwrite_main_grad = True
        step(model, 40, dtype)
    with_backward = kernels_of(model, MAX_TOKENS, dtype=dtype, backward=True)
    assert set(whole.kernels) - with_backward == set()
    more = {kernel.source.name for kernel in with_backward - named}
    assert ("k_grouped.cu" in more) == ("activation_columns.cu" in more) == (wgrad != "bf16")
    of_weights = {x for x in with_backward if x.source.name == "k_grouped.cu"}
    assert len(of_weights) <= len(of_weights & set(whole.kernels)) + 12  # d may lie unaligned


@pytest.mark.parametrize("trained", [False, True])
def test_it_lists_what_batch_invariant_layers_need(model, trained):
    """No launch divides K, and gradients divide it neither."""
    model = moefp8.set_batch_invariant(copy.deepcopy(model))
    if trained:
        moefp8.unfreeze(model)
    with jit.using(IdleDriver()) as gpu:
        for tokens in (1, 2, 9, 17, 40, 130, 260, 500):
            run(model, tokens)
            step(model, tokens, torch.bfloat16)
    named = kernels_of(model, 500, backward=True)
    assert set(gpu.kernels) - named == set()
    gemms = [x.name for x in named if x.source.name == "gemm.cu"]
    assert all(".split_k = 1," in name for name in gemms)
    others = kernels_of(moefp8.set_batch_invariant(model, False), 500)
    assert any(".split_k = 2," in x.name for x in others)


def test_master_weights_that_get_no_gradient_need_no_kernels_for_it():
    model = moefp8.unfreeze(nn.Sequential(FP8Linear(256, 512), GroupedExperts(4, 256, 128)))
    trained = kernels_of(model, backward=True, top_k=2)
    frozen = kernels_of(model.requires_grad_(False), backward=True, top_k=2)
    assert frozen < trained
    assert not any(kernel.source.name == "k_grouped.cu" for kernel in frozen)
    assert any(kernel.source.name == "columns.cu" for kernel in trained - frozen)


@NEEDS_GROUPED_MM_ON_A_CPU
@pytest.mark.parametrize("num_experts", [1, 12])
@pytest.mark.parametrize(("h", "i"), [(256, 144), (100, 256)])
def test_it_lists_what_adapted_experts_need(num_experts, h, i):
    top_k, sizes = min(3, num_experts), (1, 2, 9, 40, 130, 260, 777, MAX_TOKENS)
    experts = nn.Sequential(GroupedExperts(num_experts, h, i))
    add_lora(experts, rank=8, alpha=8.0)
    for dtype in (torch.bfloat16, torch.float32):
        forward, whole = IdleDriver(), IdleDriver()
        for tokens in sizes:
            ids = ids_of("distinct", tokens, top_k, num_experts)
            x = torch.zeros(tokens, h, dtype=dtype, requires_grad=True)
            with jit.using(forward), torch.no_grad():
                experts[0](x, ids, torch.ones(tokens, top_k))
            with jit.using(whole):
                experts[0](x, ids, torch.ones(tokens, top_k)).sum().backward()
        named = kernels_of(experts, MAX_TOKENS, dtype=dtype, top_k=top_k)
        assert set(forward.kernels) - named == set()
        with_backward = kernels_of(experts, MAX_TOKENS, dtype=dtype, top_k=top_k, backward=True)
        assert set(whole.kernels) - with_backward == set()
        assert any("transpose" in kernel.name for kernel in with_backward - named)
        gemms = {kernel for kernel in named if "gemm" in kernel.name}
        assert {kernel.source.name for kernel in forward.kernels} >= {"gemm.cu", "plan.cu"}
        assert len(gemms) <= len([x for x in forward.kernels if "gemm" in x.name]) + 12


@pytest.mark.parametrize("layout", ["auto", "masked"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_needs_what_its_load_does(layout, rank):
    """Of 64 experts it holds 21 or 22."""
    whole = GroupedExperts(64, 256, 144, layout=layout)
    experts = moefp8.shard(whole, {"": "experts"}, rank, 3)
    named = kernels_of(experts, MAX_TOKENS, top_k=2)
    with jit.using(IdleDriver()) as gpu, torch.inference_mode():
        for tokens in (*range(1, 130), *range(130, MAX_TOKENS, 45), MAX_TOKENS):
            x, ids = torch.zeros(tokens, 256).bfloat16(), ids_of("distinct", tokens, 2, 64)
            experts(x, ids, torch.ones(tokens, 2))
    assert set(gpu.kernels) - named == set()
    gemms = {kernel for kernel in named if kernel.name.startswith("gemm")}
    assert gemms <= set(gpu.kernels)
    alone = GroupedExperts(experts.num_experts, 256, 144, layout=layout, device="meta")
    assert not gemms >= {x for x in kernels_of(alone, MAX_TOKENS, top_k=2) if "gemm" in x.name}


@pytest.fixture
def compile_no_more(fresh_jit, monkeypatch) -> Callable[[], None]:
    """A call of it is like the start of a new process, in which it is an error to compile."""

    def compile_anything(self, program, options):
        raise AssertionError(f"{program.expression} is compiled")

    def compile_no_more():
        forget()
        monkeypatch.setattr(Nvrtc, "compile", compile_anything)

    return compile_no_more


@pytest.mark.slow
def test_after_it_the_first_request_compiles_nothing(compile_no_more, capsys):
    model = Model()
    done = moefp8.precompile(model, 8, progress=True)
    assert done.num_kernels == len(ahead.kernels_of(model, 8)) > 15
    assert f"{done.num_kernels}/{done.num_kernels} kernels" in capsys.readouterr().err
    compile_no_more()
    with jit.using(IdleDriver()) as gpu:
        for tokens in range(1, 9):
            run(model, tokens)
        for kernel in gpu.kernels:
            jit.compile_kernel(kernel, ARCH)
        run(model, 1000)
        with pytest.raises(AssertionError, match="is compiled"):
            jit.compile_kernels(gpu.kernels, ARCH)


@on_gpu
@pytest.mark.slow
@torch.inference_mode()
def test_on_a_gpu_the_first_request_compiles_nothing(compile_no_more):
    model = Model().cuda()
    moefp8.precompile(model, 300)
    compile_no_more()
    for tokens in (1, 2, 7, 33, 64, 65, 129, 300):
        for linear in model.linears:
            linear(torch.randn(tokens, linear.in_features, device="cuda").bfloat16())
        model.moe(torch.randn(tokens, 256, device="cuda").bfloat16())
        x = torch.randn(tokens, 100, device="cuda").bfloat16()
        model.odd["experts"](x, *model.odd["router"](x))


# What it takes


def test_dtypes_are_those_of_the_model():
    class Mixed(nn.Module):
        def __init__(self, dtype: torch.dtype | None) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)  # fp32
            if dtype is not None:
                self.embedding = nn.Embedding(2, 8, dtype=dtype)
            self.linear = FP8Linear(128, 128, bias=False)

    def inputs(model: nn.Module, **options) -> set[str]:
        names = (kernel.name for kernel in kernels_of(model, **options))
        return {match[1] for name in names if (match := re.search(r"quantize.*Input::(\w+)", name))}

    assert inputs(Mixed(torch.float16)) == {"kHalf"}
    assert inputs(Mixed(None)) == {"kFloat"}
    assert inputs(FP8Linear(128, 128, bias=False)) == {"kBFloat16"}
    assert inputs(Mixed(None), dtype=torch.bfloat16) == {"kBFloat16"}


def test_top_k_is_found_beside_the_experts_or_in_the_config():
    experts = GroupedExperts(64, 128, 128, device="meta")
    with pytest.raises(ValueError, match="top_k="):
        kernels_of(experts)
    expected = kernels_of(experts, top_k=8)
    assert expected != kernels_of(experts, top_k=1)
    beside = nn.ModuleDict({"gate": TopKRouter(128, 64, 8, device="meta"), "experts": experts})
    assert kernels_of(beside) > expected  # and the router's
    told = nn.ModuleDict({"experts": experts})
    with pytest.raises(ValueError, match="GroupedExperts experts: nothing beside it says"):
        kernels_of(told)
    told.config = SimpleNamespace(num_experts_per_tok=8)
    assert kernels_of(told) == expected
    told.config = SimpleNamespace(text_config=SimpleNamespace(num_experts_per_tok=8))
    assert kernels_of(told) == expected


def test_a_model_without_our_layers_is_refused_and_told_the_way():
    with pytest.raises(ValueError, match=r"got Linear without any, .*; moefp8\.convert\(model\)"):
        moefp8.precompile(nn.Linear(8, 8), 100)
    with pytest.raises(ValueError, match="FP8Linear, GroupedExperts"):
        moefp8.precompile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 1)


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 0), ("num_sms", 0), ("top_k", -1), ("num_threads", 0)]
)
def test_wrong_arguments_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        moefp8.precompile(FP8Linear(8, 8), **{"max_tokens": 1, name: value})
    with pytest.raises(TypeError, match=r"torch\.float16, torch\.float32, got torch\.float64"):
        moefp8.precompile(FP8Linear(8, 8), 1, dtype=torch.float64)


@pytest.mark.parametrize("tokens", [5, 40, 64])  # 40 is no first one of its load
def test_tuned_choices_are_among_them(tokens):
    linear = FP8Linear(512, 2000, bias=False, device="meta")
    experts = GroupedExperts(16, 256, 144, device="meta")
    flat = with_most_stages(GemmConfig(64, 128, 0, num_product_buffers=2))
    pair = tuple(
        with_most_stages(GemmConfig(192, 128, 0, grouped=True, gate_up=gate_up))
        for gate_up in (True, False)
    )
    found = {tuned.Dense(2000, 512): {tokens + -tokens % 8: flat}}
    found[tuned.Experts(16, 2, 256, 144)] = {tokens: pair}
    target = Target(ARCH, 132, Sm90(tuned.ConfigSource(132, 132, tuned.Table(found))))
    model = nn.ModuleList([linear, experts])
    expected = {kernel_of(flat, None), *(kernel_of(x, None, GroupLayout.OFFSETS) for x in pair)}
    assert expected <= kernels_of(model, top_k=2, target=target)
    assert not expected & kernels_of(model, top_k=2)


def test_other_numbers_of_sms_need_other_kernels():
    linear = FP8Linear(7168, 2048, bias=False, device="meta")
    assert kernels_of(linear, 2000) != kernels_of(linear, 2000, target=target_with(ARCH, 78))
