"""What lets a benchmark run where there is no GPU."""

import pytest
import torch

from benchmarks import session


@pytest.fixture
def no_gpu_needed(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = {"date": "2026-11-21", "commit": "abc", "gpu": "none", "driver": "0", "torch": "2"}
    monkeypatch.setattr(session, "circumstances", lambda: about)
    monkeypatch.setattr(session, "copy_gbps", lambda: 4300.0)
