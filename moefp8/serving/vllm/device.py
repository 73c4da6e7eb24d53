"""Where the plug-in runs."""

from vllm.platforms import current_platform


def why_not_here() -> str | None:
    """Why no layer runs on moefp8 on this machine, or None: on a Hopper GPU and on a CPU."""
    if current_platform.is_cpu() or current_platform.is_device_capability(90):
        return None
    return f"{current_platform.get_device_name()} is no Hopper GPU"
