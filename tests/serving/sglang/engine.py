"""Enough of SGLang to make its layers, with stand-ins for packages that these do not call.

What must be there is SGLang's own Python and what else it imports, in the versions that it pins;
its kernels need not be, neither on a CPU nor on a GPU.

An environment for version 0.5.17 is one for development with

    pip install --no-deps sglang==0.5.17 transformers==5.12.1 "tokenizers<=0.23.0" \\
        "huggingface_hub<2" apache-tvm-ffi==0.1.11 triton xgrammar compressed-tensors loguru gguf \\
        msgspec orjson pyzmq pybase64 partial-json-parser sentencepiece setproctitle openai jiter \\
        distro sniffio dill fastapi starlette uvicorn uvloop watchfiles python-multipart \\
        opentelemetry-api aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache \\
        yarl zstandard xxhash

and for 0.5.23 with that version, transformers 5.19.0, and without the next two.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What SGLang imports and its layers do not call.
PACKAGES = ("IPython", "sgl_kernel", "soundfile", "torchaudio", "torchvision", "vllm")
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class _Name(type):
    """A name in a package that is not there; so are all names in it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Name(name, (), {})
        setattr(cls, name, value)
        return value


class StandIn(types.ModuleType):
    """A package in which every name exists."""

    __path__: Sequence[str] = ()
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Name(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for packages that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def is_here() -> bool:
    """Whether SGLang is installed, if without its kernels."""
    return find_spec("sglang") is not None


def entry_point() -> str:
    """The lines of pyproject.toml by which SGLang finds the plug-in, as installers write them."""
    lines = (Path(__file__).parents[3] / "pyproject.toml").read_text().splitlines()
    at = lines.index('[project.entry-points."sglang.srt.plugins"]')
    return f"[sglang.srt.plugins]\n{lines[at + 1]}\n".replace('"', "")


def installed(folder: Path) -> Path:
    """Write what pip leaves of this checkout in a folder of packages; an older one may be there."""
    metadata = folder / "moefp8-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: moefp8\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(entry_point())
    return folder


@contextmanager
def started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of SGLang, the only rank, with the plug-in. folder: an empty one."""
    sys.meta_path.append(Finder())
    from sglang.srt import distributed
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_context

    monkeypatch.setattr(ModelRunner, "load_model", lambda self: None)  # it would need a server
    with get_context().override_server_args(device=DEVICE):
        distributed.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{folder}/store",
            backend="nccl" if DEVICE == "cuda" else "gloo",
        )
        distributed.initialize_model_parallel()
        monkeypatch.setenv("MOEFP8_SGLANG", "1")
        monkeypatch.syspath_prepend(str(installed(folder)))
        load_plugins()
        with torch.device(DEVICE):
            yield
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()


@contextmanager
def rank(place: int = 0, of: int = 1, experts: str = "tp") -> Iterator[None]:
    """Let SGLang make layers of one rank of several, of which there is no other.

    experts: "ep" if ranks have whole experts, "tp" if each has a part of every expert.
    """
    from sglang.srt.runtime_context import get_parallel

    other = {"tp": "ep", "ep": "tp"}[experts]
    group = types.SimpleNamespace(world_size=of, rank_in_group=place)
    fields: dict[str, Any] = {
        **{"tp_rank": place, "attn_tp_rank": place, f"moe_{experts}_rank": place},
        **{"tp_size": of, "attn_tp_size": of, f"moe_{experts}_size": of},
        **{f"moe_{other}_rank": 0, f"moe_{other}_size": 1},
        **{"pp_rank": 0, "attn_dp_rank": 0, "attn_cp_rank": 0, "attn_dp_size": 1},
    }
    if of > 1:
        alone = types.SimpleNamespace(world_size=1, rank_in_group=0)
        fields |= {"tp_group": group, "attn_tp_group": group}
        fields |= {"moe_ep_group": group if experts == "ep" else alone}
    with get_parallel().override(**fields):
        yield


def config(**fields: Any) -> Any:
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    return Fp8Config.from_config(BLOCKS | fields)
