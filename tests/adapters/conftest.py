"""A model with adapters, and the directory to which they were saved."""

from pathlib import Path

import pytest

from moefp8.adapters import add_lora, save_lora
from tests.adapters.cases import Net, trained


@pytest.fixture
def model():
    made = Net()
    add_lora(made, 4, 8, targets=["first", "experts", "head"])
    return trained(made)


@pytest.fixture
def saved(model, tmp_path) -> Path:
    save_lora(model, tmp_path / "adapter")
    return tmp_path / "adapter"
