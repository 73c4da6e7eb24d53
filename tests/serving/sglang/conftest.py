"""A process of SGLang for tests that ask for it; without SGLang they are skipped."""

from collections.abc import Iterator

import pytest
import torch

from tests.serving.sglang import engine


@pytest.fixture(scope="package")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not engine.is_here():
        pytest.skip("SGLang is not installed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("sglang")
        with engine.started(folder, monkeypatch), engine.rank():
            torch.manual_seed(0)
            yield
