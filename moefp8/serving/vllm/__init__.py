"""The plug-in for vLLM, which loads it in each of its processes: `MOEFP8_VLLM=1 vllm serve ...`."""

import os

FIRST, LAST = "0.26", "0.33"  # the versions that it was tried with


def register() -> None:
    """Let vLLM run FP8 layers with blocks of 128x128 on moefp8, if `MOEFP8_VLLM` is 1.

    vLLM calls it by the entry point group `vllm.general_plugins`. Without the variable it does
    nothing, since vLLM loads the plug-ins of all packages that are installed.

    Raises:
        ValueError: `MOEFP8_VLLM` is neither 0 nor 1.
        RuntimeError: this vLLM lacks what the plug-in builds upon.
    """
    value = os.environ.get("MOEFP8_VLLM", "0")
    if value not in ("0", "1"):
        raise ValueError(f"MOEFP8_VLLM must be 0 or 1, got {value!r}")
    if value == "0":
        return
    try:
        from .config import register_layers

        register_layers()
    except (ImportError, AttributeError, TypeError) as error:
        import vllm

        raise RuntimeError(
            f"moefp8's plug-in fits vLLM {FIRST} to {LAST}, got {vllm.__version__} ({error}); "
            "install one of these, or unset MOEFP8_VLLM to serve without the plug-in"
        ) from error
