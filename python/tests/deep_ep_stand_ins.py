# SPDX-License-Identifier: Apache-2.0
"""Some files of an installed package that cannot be imported here as a whole; everything else of it is stood in for."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers all imports from a package but the real ones: a stand-in's attributes, and mocks for others."""

    def __init__(self, package: str, real: list[str], known: dict[str, dict[str, Any]]) -> None:
        self._package, self._real, self._known = package, real, known

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] != self._package or name in self._real:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__dict__.update(self._known.get(spec.name, {}))
        module.__getattr__ = lambda name: mock.MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def load(folder: str, names: tuple[str, ...], known: dict[str, dict[str, Any]]) -> list[ModuleType]:
    """The modules `names` of the package's folder, from their files; known: what others have to have."""
    package, *inner = folder.split(".")
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations, f"{package} is not installed"
    home = Path(next(iter(found.submodule_search_locations)), *inner)
    sys.meta_path.insert(0, Finder(package, [f"{folder}.{name}" for name in names], known))
    modules = []
    for name in names:
        spec = importlib.util.spec_from_file_location(f"{folder}.{name}", home / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        modules.append(module)
    return modules
