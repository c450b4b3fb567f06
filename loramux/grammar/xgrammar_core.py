"""xgrammar's native library, without its Python package.

`import xgrammar` imports torch and transformers, seconds and hundreds of megabytes that a compile worker has no use for. The
library's own bindings need neither, so the package's `__init__` is stepped over: 0.3 s and 43 MB.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


def _bindings() -> Any:
    if "xgrammar" in sys.modules:
        return importlib.import_module("xgrammar.base")._core
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("xgrammar is not installed")
    package = ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["xgrammar"] = package
    try:
        importlib.import_module("xgrammar.load_binding")
        importlib.import_module("xgrammar.exception")
        return importlib.import_module("xgrammar.base")._core
    finally:
        # Whoever imports xgrammar later gets the whole package, on top of the modules loaded here.
        del sys.modules["xgrammar"]


core = _bindings()
"""`TokenizerInfo`, `GrammarCompiler`, `CompiledGrammar`, `GrammarMatcher`: xgrammar's classes of these names wrap them one to one."""
