"""What the tests of the routed experts on a GPU are run with."""

import pytest
import torch

from tests.functional.cases import Weights, weights_of
from tests.functional.gpu_cases import E, H, I, poison


@pytest.fixture
def poisoned() -> None:
    poison()


@pytest.fixture(scope="module")
def layer() -> Weights:
    torch.manual_seed(1)
    return weights_of(E, H, I, "cuda")
