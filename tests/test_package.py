"""The package from outside: what it imports and what it exports; `tests.dist` tries its wheel."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moefp8

ROOT = Path(moefp8.__file__).parent

CHECKPOINT = {"checkpoint/errors", "checkpoint/arguments", "checkpoint/files"}  # its foundations

# Rooms and what each may import: arrows point down only.
_ENGINE = "functional", "kernels/common"
ALLOWED = {
    "system": {"system"},
    "kernels/jit": {"kernels/jit", "system"},
    "kernels/common": {"kernels/common", "kernels/jit"},
    "kernels": {"kernels"},
    "quant": {"kernels", "quant"},
    "routing": {"kernels", "routing"},
    "functional": {"kernels", "quant", "routing", "functional"},
    "layers": {"kernels", "quant", "routing", "functional", "layers", "system"},
    "adapters": {"kernels", "quant", "routing", "functional", "layers", "system", "adapters"},
    "distributed": {"kernels", "quant", "routing", "functional", "layers", "distributed"},
    "deep_gemm": {"kernels", "quant", "deep_gemm"},
    "testing": {"kernels", "quant", "routing", "functional", "layers", "testing"},
    "checkpoint/errors": set(),
    "checkpoint/arguments": {"checkpoint/errors"},
    "checkpoint/files": {*CHECKPOINT, "kernels", "system"},
    "checkpoint/model": {*CHECKPOINT, "checkpoint/model", "kernels", "layers", "system"},
    **{
        room: {room, *CHECKPOINT, "checkpoint/model", "kernels", "quant", "layers", "system"}
        for room in (f"checkpoint/{name}" for name in ("load", "save", "inspect", "quantize"))
    },
    "checkpoint/update": {
        *("checkpoint/update", *CHECKPOINT, "checkpoint/model"),
        *("kernels", "quant", "functional", "layers", "system"),
    },
    "checkpoint": {"checkpoint"},
    "precompile": {
        *("kernels", "quant", "routing", "functional", "layers", "distributed", "system"),
        "precompile",
    },
    "tuning": {"kernels", "functional", "layers", "quant", "system", "distributed", "tuning"},
    "cli": {
        *("kernels", "layers", "distributed", "checkpoint", "precompile", "tuning", "cli"),
        *("testing", "hf", "__version__"),
    },
    "hf": {
        *("kernels", "quant", "routing", "functional", "layers", "distributed", "checkpoint"),
        "hf",
    },
    "serving/sglang": {"serving/sglang", "serving/common", "serving/loaders", *_ENGINE},
    "serving/vllm": {"serving/vllm", "serving/common", "serving/loaders", *_ENGINE},
    "serving/common": {"kernels", "layers", "precompile", "system"},
    "serving/loaders": {"kernels", "quant"},
    "serving": set(),
    "__main__": {"cli"},
}
OUTSIDE = {"torch", "cuda", "einops", "safetensors", "hypothesis"}
ALSO = {  # a room or a file -> what it may import besides
    "hf": {"accelerate", "transformers"},
    "serving/sglang": {"sglang"},
    "skeleton.py": {"accelerate", "transformers"},
    "untrusted.py": {"huggingface_hub"},  # it is told to be offline
    "register.py": {"peft"},
    "compare.py": {"transformers"},
    "compare_plot.py": {"matplotlib"},
    "peft.py": {"peft"},
    "serving/vllm": {"vllm"},
}


def imports_of(path: Path) -> set[str]:
    """Absolute dotted names that a file imports, also inside functions."""
    package = ["moefp8", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def room_of(parts: list[str]) -> str:
    """The room that a module, or a name in it, lies in."""
    place = "/".join(parts)
    return next((room for room in ALLOWED if f"{place}/".startswith(f"{room}/")), parts[0])


def may_import(room: str, imported: str) -> bool:
    return any(f"{imported}/".startswith(f"{allowed}/") for allowed in ALLOWED[room])


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    room = room_of(list(path.relative_to(ROOT).with_suffix("").parts))
    for name in imports_of(path):
        head, *rest = name.split(".")
        if head == "moefp8" and room != "__init__":
            assert may_import(room, room_of(rest)), f"{path.name} imports {name}"
        elif head != "moefp8":
            known = OUTSIDE | ALSO.get(path.name, ALSO.get(room, set())) | sys.stdlib_module_names
            assert head in known, f"{path.name} imports {name}"


def test_the_arrow_test_sees_an_upward_arrow(tmp_path):
    assert "moefp8.kernels.common.checks.check_shape" in imports_of(ROOT / "routing" / "combine.py")
    assert not may_import("kernels", "layers")
    assert may_import("kernels", room_of(["kernels", "jit", "load"]))
    assert not may_import("kernels/jit", room_of(["kernels", "common", "checks"]))


def test_public_names():
    expected = {
        moefp8: "FP8Linear GroupedExperts TopKRouter MoE convert precompile "
        "load_checkpoint save_checkpoint shard",
        moefp8.adapters: "add_lora remove_lora lora_state_dict save_lora load_lora "
        "register_with_peft LoRA",
        moefp8.quant: "BlockScaled quantize_1x128 quantize_128x128 dequantize",
        moefp8.routing: "softmax_topk sigmoid_group_topk RoutingPlan build_plan dispatch combine",
        moefp8.kernels: "fp8_gemm_nt m_grouped_fp8_gemm_nt_contiguous m_grouped_fp8_gemm_nt_masked "
        "get_mk_alignment_for_contiguous_layout",
    }
    for module, names in expected.items():
        for name in names.split():
            assert name in module.__all__
            assert getattr(module, name).__doc__


IMPORT = """
import sys, time
before = time.process_time()
import torch
between = time.process_time()
import moefp8
print((time.process_time() - between) / (between - before))
unused = {"transformers", "peft", "hypothesis", "pytest", "triton", "numpy.testing"}
heavy = unused & set(sys.modules)
assert not heavy, heavy
assert not torch.cuda.is_initialized()
"""


def run_python(code: str, *flags: str, **environment: str) -> str:
    command = [sys.executable, *flags, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_needs_nothing_and_costs_little():
    """No home, no PATH to an nvcc, no CUDA device: still imports, in a fraction of torch's time.

    CPU time counts, in the same process: what else the machine does slows both alike.
    """
    assert any(float(run_python(IMPORT, CUDA_VISIBLE_DEVICES="")) < 0.5 for _ in range(3))
