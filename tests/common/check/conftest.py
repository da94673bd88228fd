"""The toy task, as the tests of the training have it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[1] / "training" / "conftest.py"
_spec = importlib.util.spec_from_file_location("luthier_training_conftest", FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
toy_module, toy = _module.toy_module, _module.toy
