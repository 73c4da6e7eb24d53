"""Which body of an op runs on which GPU, and who sees a call: the dispatcher, or nobody."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moefp8.functional.linear import fp8_linear
from moefp8.kernels import jit, registry
from moefp8.kernels.targets import runs_kernels
from moefp8.quant import numerics
from tests.kernels.gemm import grouped_cases
from tests.kernels.gemm.cases import run_gemm

# ---- Bodies ----


@pytest.mark.parametrize(
    ("hip", "capability", "arch", "runs"),
    [
        (None, (9, 0), "sm_90a", True),
        (None, (8, 9), "sm_89", False),
        (None, (10, 0), "sm_100a", False),
        ("7.0", (9, 0), "", False),
    ],
)
def test_which_gpus_run_our_kernels(monkeypatch, hip, capability, arch, runs):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    with jit.using(jit.Driver()) as driver:
        assert (driver.arch(0), driver.arch(-1)) == (arch, "")
        assert (runs_kernels(0), runs_kernels(-1)) == (runs, False)


ON_GPU = SimpleNamespace(device=torch.device("cpu"), get_device=lambda: 0)


@pytest.mark.parametrize(
    ("arch", "bodies", "takes", "expected"),
    [
        ("sm_90a", {"kernels"}, True, "kernels"),
        ("sm_90a", {"kernels"}, False, "reference"),
        ("sm_89", {"kernels"}, True, "reference"),
        ("sm_90a", {"kernels", "cuda"}, True, "kernels"),
        ("sm_90a", {"kernels", "cuda"}, False, "cuda"),
        ("sm_89", {"kernels", "cuda"}, True, "cuda"),
        ("sm_90a", {"cuda"}, True, "cuda"),
    ],
)
def test_which_body_runs(monkeypatch, new_driver, arch, bodies, takes, expected):
    """The reference warns once for each op and GPU, or does not run where that is asked."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {index}")
    monkeypatch.setattr(new_driver, "arch", lambda index: arch)
    name = f"op {arch} {sorted(bodies)} {takes}"
    kernels, cuda = ((lambda x, y=y: y) if y in bodies else None for y in ("kernels", "cuda"))
    on_gpu = registry._on_gpu(
        name, lambda x: "reference", kernels, cuda, lambda x: takes, {"sm_90a"}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if expected == "reference":
            with monkeypatch.context() as patch:
                patch.setenv("MOEFP8_STRICT", "1")
                with pytest.raises(RuntimeError, match="MOEFP8_STRICT=1 forbids that"):
                    on_gpu(ON_GPU)
            told = r"runs its portable PyTorch body on NVIDIA 0: correct, but slow"
            with pytest.warns(UserWarning, match=told):
                on_gpu(ON_GPU)
        assert on_gpu(ON_GPU) == expected


# ---- Who sees a call ----


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def within(manager=nullcontext):
    """Return what makes a call within such a context."""

    def run(call, x):
        with manager():
            return call(x)

    return run


def faked(call, x):
    """A fake call computes no numbers, and so this gives what the call expects."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = call(mode.from_tensor(x))
    assert (y.shape, y.dtype) == (call.expected.shape, torch.bfloat16)
    return call.expected


def profiled(profile):
    def run(call, x):
        with profile() as found:
            y = call(x)
        assert any(x.key == f"moefp8::{call.name}" for x in found.key_averages())
        return y

    return run


WATCHED = {
    "a dispatch mode": within(Dispatches),
    "a function mode": within(Functions),
    "a default device": within(lambda: torch.device("cpu")),
    "fake tensors": faked,
    "compiled": lambda call, x: torch.compile(call, fullgraph=True, backend="aot_eager")(x),
    "made a graph": lambda call, x: make_fx(call)(x)(x),
    "traced": lambda call, x: torch.jit.trace(call, x, check_trace=False)(x),
    "vmap": lambda call, x: torch.vmap(call)(x[None])[0],
    "functionalized": lambda call, x: torch.func.functionalize(call)(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,))[0],
    "profiled": profiled(torch.profiler.profile),
    "profiled by autograd": profiled(torch.autograd.profiler.profile),
    "negative bit": lambda call, x: call(torch._neg_view(-x)),
    "a subclass": lambda call, x: call(x.as_subclass(Subclass)),
}
UNSEEN = {
    "plain": within(),
    "no gradients": within(torch.no_grad),
    "inference": within(torch.inference_mode),
    "a parameter": lambda call, x: call(torch.nn.Parameter(x, requires_grad=False)),
    "once all have gone": lambda call, x: (WATCHED["a dispatch mode"](call, x), call(x))[1],
}


def linear():
    """An op that returns its result, as a function of x."""
    x = torch.randn(5, 256)
    weight = numerics.quantize_128x128(torch.randn(48, 256), False)

    def call(x: torch.Tensor) -> torch.Tensor:
        return fp8_linear(x, *weight, None)

    call.name, call.expected = "fp8_linear", fp8_linear.overload(x, *weight, None)
    return call, x


def gemm():
    """One that writes its result, as a function of the bias."""
    routing = grouped_cases.dense(5)
    made = grouped_cases.operands(routing, 48, 256)
    bias, at = grouped_cases.bias_of(torch.float32, 48), made._fields.index("d")
    before, d, behind = made[:at], made.d, made[at + 1 :]

    def call(x: torch.Tensor) -> torch.Tensor:
        return run_gemm(*before, torch.zeros_like(d), *behind, x)

    expected = grouped_cases.expected_of(routing, made, bias)
    call.name, call.expected = "fp8_gemm_nt", expected
    return call, bias


@pytest.mark.parametrize(
    ("op", "how"),
    [
        *((linear, how) for how in WATCHED),
        # PyTorch transforms no ops that write: these two refuse.
        *((gemm, how) for how in WATCHED if how not in ("vmap", "functionalized")),
    ],
)
def test_who_watches_sees_the_op(gpu, op, how):
    """The dispatcher calls the body, on tensors of the CPU that of the CPU."""
    call, x = op()
    assert torch.equal(WATCHED[how](call, x), call.expected)
    assert gpu.launched == []


@pytest.mark.parametrize("op", [linear, gemm])
@pytest.mark.parametrize("how", UNSEEN)
def test_where_nobody_watches_the_launcher_is_called_at_once(gpu, op, how):
    call, x = op()
    y = UNSEEN[how](call, x)
    assert torch.equal(y, call.expected)
    assert not y.requires_grad
    assert len(gpu.launched) == (2 if op is linear else 1)


def test_a_result_that_is_written_has_a_new_version(gpu):
    made = grouped_cases.operands(grouped_cases.dense(5), 48, 256)
    for version in (1, 2, 3):
        run_gemm(*made)
        assert (made.d._version, len(gpu.launched)) == (version, version)


@pytest.mark.parametrize("op", [linear, gemm])
def test_a_zero_tensor_has_no_memory_to_launch_on(gpu, op):
    call, x = op()
    expected = call(torch.zeros_like(x))
    gpu.launched.clear()
    assert torch.equal(call(torch._efficientzerotensor(x.shape)), expected)
    assert gpu.launched == []
