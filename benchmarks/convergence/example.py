"""`examples/train.py` as a module: model, text and optimizer are those of the example."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FILE = Path(__file__).parents[2] / "examples" / "train.py"
_NAME = "moefp8_examples_train"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, _FILE)
    if spec is None or spec.loader is None:
        raise ImportError(f"{_FILE} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


train = _load()
