"""Which body of an op runs on which GPU."""

from types import SimpleNamespace

import pytest
import torch

from moefp8.kernels.common import registry


def test_which_body_runs(monkeypatch):
    ran = []
    bodies = [lambda x: ran.append("portable"), lambda x: ran.append("hopper")]
    x = SimpleNamespace(device=torch.device("cpu"), get_device=lambda: 0)
    on_gpu = registry._on_gpu("some_op", *bodies)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {index}")
    for hip, capability, expected in (
        (None, (9, 0), "hopper"),
        (None, (8, 0), "portable"),
        (None, (10, 0), "portable"),
        ("7.0", (9, 4), "portable"),
    ):
        registry.runs_our_kernels.cache_clear()
        registry._announce_portable.cache_clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i, c=capability: c)
        if expected == "portable":
            with pytest.warns(UserWarning, match="some_op runs its portable .* NVIDIA 0"):
                on_gpu(x)
        on_gpu(x)
        assert ran[-1] == expected
    registry._announce_portable.cache_clear()
    monkeypatch.setenv("MOEFP8_STRICT", "1")
    with pytest.raises(RuntimeError, match="MOEFP8_STRICT=1 forbids that"):
        on_gpu(x)
    registry._announce_portable.cache_clear()
    registry.runs_our_kernels.cache_clear()


def test_a_body_for_other_gpus_needs_no_warning(monkeypatch):
    bodies = [lambda x: "portable", lambda x: "hopper", lambda x: "cuda"]
    x = SimpleNamespace(device=torch.device("cpu"), get_device=lambda: 0)
    for is_hopper, expected in ((True, "hopper"), (False, "cuda")):
        monkeypatch.setattr(registry, "runs_our_kernels", lambda index, is_it=is_hopper: is_it)
        assert registry._on_gpu("some_op", *bodies)(x) == expected
        assert registry._on_gpu("some_op", bodies[0], None, bodies[2])(x) == "cuda"
