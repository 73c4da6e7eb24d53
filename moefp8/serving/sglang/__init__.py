"""The plug-in for SGLang, which loads it in its processes: `MOEFP8_SGLANG=1 sglang serve ...`."""

import os

FIRST, LAST = "0.5.17", "0.5.23"  # the versions that it was tried with


def register() -> None:
    """Let SGLang run FP8 layers with blocks of 128x128 on moefp8, if `MOEFP8_SGLANG` is 1.

    SGLang calls it by the entry point group `sglang.srt.plugins`. Without the variable it does
    nothing, since SGLang loads the plug-ins of all packages that are installed.

    Raises:
        SystemExit: `MOEFP8_SGLANG` is neither 0 nor 1, or this SGLang lacks what the plug-in
            builds upon. SGLang logs any other exception of a plug-in and serves without it.
    """
    value = os.environ.get("MOEFP8_SGLANG", "0")
    if value not in ("0", "1"):
        raise SystemExit(f"MOEFP8_SGLANG must be 0 or 1, got {value!r}")
    if value == "0":
        return
    try:
        from .hooks import add_hooks

        add_hooks()
    except (ImportError, AttributeError) as error:
        import sglang

        version = getattr(sglang, "__version__", "of unknown version")
        raise SystemExit(
            f"moefp8's plug-in fits SGLang {FIRST} to {LAST}, got {version} ({error}); "
            "install one of these, or unset MOEFP8_SGLANG to serve without the plug-in"
        ) from error
