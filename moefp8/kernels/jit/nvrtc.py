"""NVRTC, NVIDIA's compiler as a library, which CUDA builds of torch bring along."""

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .compiler import CompileError, Program
from .cubin import Cubin, JitError

_NO_NVRTC = (
    "no usable NVRTC, which compiles the kernels; CUDA builds of torch bring it, else "
    "`pip install nvidia-cuda-nvrtc` (CUDA 13) or `pip install nvidia-cuda-nvrtc-cu12`, or set "
    "MOEFP8_COMPILER=nvcc to use an installed nvcc. Cause: {}"
)


class Nvrtc:
    """NVRTC through ctypes, which releases the GIL: threads compile in parallel."""

    def __init__(self) -> None:
        self._lib, self.path = _load()
        try:
            self.version = f"nvrtc {self._build()}"
        except CompileError as error:  # not even an empty file compiles
            raise JitError(_NO_NVRTC.format(error)) from error

    def _build(self) -> str:
        """The exact build, which `nvrtcVersion` does not tell: it heads every PTX file."""
        program = self._create(Program("", "empty.cu", {"empty.cu": ""}))
        try:
            self._compile(program, ["--gpu-architecture=compute_90a"])
            ptx = self._output("nvrtcGetPTX", program).decode()
        finally:
            self._destroy(program)
        return " ".join(re.findall(r"\bV\d\S+|\bCL-\d+", ptx)) or ptx

    def compile(self, program: Program, options: Sequence[str]) -> Cubin:
        handle = self._create(program)
        try:
            expression = program.expression.encode()
            self._call("nvrtcAddNameExpression", handle, expression)
            log = self._compile(handle, options)
            symbol = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", handle, expression, ctypes.byref(symbol))
            image = self._output("nvrtcGetCUBIN", handle)
            return Cubin(image, (symbol.value or b"").decode(), log)
        finally:
            self._destroy(handle)

    def _compile(self, handle: ctypes.c_void_p, options: Sequence[str]) -> str:
        argv = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = self._lib.nvrtcCompileProgram(handle, len(options), argv)
        log = self._output("nvrtcGetProgramLog", handle).rstrip(b"\0").decode(errors="replace")
        if failed:
            raise CompileError(f"{self._error(failed)}\n{log}")
        return log

    def _create(self, program: Program) -> ctypes.c_void_p:
        headers = {name: text for name, text in program.files.items() if name != program.main}
        strings = ctypes.c_char_p * len(headers)
        handle = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(handle),
            program.files[program.main].encode(),
            program.main.encode(),
            len(headers),
            strings(*[text.encode() for text in headers.values()]),
            strings(*[name.encode() for name in headers]),
        )
        return handle

    def _destroy(self, program: ctypes.c_void_p) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _output(self, getter: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{getter}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(getter, program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        if failed := getattr(self._lib, name)(*arguments):
            raise CompileError(f"{name}: {self._error(failed)}")

    def _error(self, result: int) -> str:
        message: bytes = self._lib.nvrtcGetErrorString(result)
        return message.decode()


def _load() -> tuple[ctypes.CDLL, str]:
    try:
        path = _chosen() or _of_torch() or _found()
        lib = ctypes.CDLL(str(path))
    except (ImportError, RuntimeError, OSError) as error:
        raise JitError(_NO_NVRTC.format(error)) from error
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    _load_builtins(lib, path)
    return lib, str(path)


def _chosen() -> Path | None:
    """The library that `MOEFP8_NVRTC` names, if it is set."""
    path = os.environ.get("MOEFP8_NVRTC")
    return Path(path) if path else None


def _of_torch() -> Path | None:
    """Of the CUDA that torch was built for: a newer one's kernels may be none for its driver."""
    version = getattr(sys.modules.get("torch"), "version", None)
    major = (getattr(version, "cuda", None) or "").partition(".")[0]
    packages = find_spec("nvidia")
    folders = (packages and packages.submodule_search_locations) or ()
    found = (x for folder in folders for x in Path(folder).glob(f"*/lib/libnvrtc.so.{major}"))
    return next(found, None) if major else None


def _found() -> Path:
    from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-untyped]

    return Path(str(load_nvidia_dynamic_lib("nvrtc").abs_path))


def _load_builtins(lib: ctypes.CDLL, path: Path) -> None:
    """NVRTC opens its builtins by name alone, and 13.0 does not look beside itself for them."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    name = f"libnvrtc-builtins.so.{major.value}.{minor.value}"
    if (builtins := path.resolve().with_name(name)).exists():
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
