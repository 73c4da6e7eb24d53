"""NVRTC, NVIDIA's compiler as a library, which CUDA builds of torch bring along."""

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from .cubin import CompileError, Cubin, JitError, Program

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
        """The exact build, which `nvrtcVersion` does not return, from the head of a PTX file."""
        with self._made(Program("", "empty.cu", {"empty.cu": ""})) as handle:
            self._compile(handle, [])
            ptx = self._output("nvrtcGetPTX", handle).decode()
        return " ".join(re.findall(r"\bV\d\S+|\bCL-\d+", ptx)) or ptx

    def compile(self, program: Program, options: Sequence[str]) -> Cubin:
        """Raises CompileError."""
        expression = program.expression.encode()
        with self._made(program) as handle:
            self._call("nvrtcAddNameExpression", handle, expression)
            log = self._compile(handle, options)
            symbol = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", handle, expression, ctypes.byref(symbol))
            image = self._output("nvrtcGetCUBIN", handle)
            return Cubin(image, (symbol.value or b"").decode(), log)

    def _compile(self, handle: ctypes.c_void_p, options: Sequence[str]) -> str:
        argv = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = self._lib.nvrtcCompileProgram(handle, len(options), argv)
        log = self._output("nvrtcGetProgramLog", handle).rstrip(b"\0").decode(errors="replace")
        if failed:
            raise CompileError(f"{self._error(failed)}\n{log}")
        return log

    @contextmanager
    def _made(self, program: Program) -> Iterator[ctypes.c_void_p]:
        """An nvrtcProgram."""
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
        try:
            yield handle
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(handle))

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
        path = Path(os.environ.get("MOEFP8_NVRTC") or _path_of_torch() or _path_of_pathfinder())
        lib = ctypes.CDLL(str(path))
    except (ImportError, RuntimeError, OSError) as error:
        raise JitError(_NO_NVRTC.format(error)) from error
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    # NVRTC opens its builtins by name alone, and 13.0 does not look beside itself for them.
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    builtins = path.resolve().with_name(f"libnvrtc-builtins.so.{major.value}.{minor.value}")
    if builtins.exists():
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return lib, str(path)


def _path_of_torch() -> Path | None:
    """NVRTC of the CUDA that torch was built for: the driver may not run kernels of a newer one."""
    version = getattr(sys.modules.get("torch"), "version", None)
    major = (getattr(version, "cuda", None) or "").partition(".")[0]
    packages = find_spec("nvidia")
    folders = (packages and packages.submodule_search_locations) or ()
    paths = (x for folder in folders for x in Path(folder).glob(f"*/lib/libnvrtc.so.{major}"))
    return next(paths, None) if major else None


def _path_of_pathfinder() -> str:
    from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-untyped]

    return str(load_nvidia_dynamic_lib("nvrtc").abs_path)
