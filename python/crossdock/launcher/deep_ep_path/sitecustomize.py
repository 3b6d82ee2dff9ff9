# SPDX-License-Identifier: Apache-2.0
"""Python imports this at its start where the folder is on PYTHONPATH. It makes `import deep_ep` find the package beside
it, although Python searches a script's own folder before PYTHONPATH; then the module of this name that it hides runs.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec

_own = os.path.dirname(os.path.abspath(__file__))


class DeepEpFinder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_own]) if name == "deep_ep" else None


sys.meta_path.insert(0, DeepEpFinder)

_hidden = PathFinder.find_spec(__name__, [entry for entry in sys.path if os.path.abspath(entry) != _own])
if _hidden is not None and _hidden.loader is not None:
    sys.modules[__name__] = module_from_spec(_hidden)
    _hidden.loader.exec_module(sys.modules[__name__])
