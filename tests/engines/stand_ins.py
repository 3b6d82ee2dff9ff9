# SPDX-License-Identifier: Apache-2.0
"""Some files of an engine that cannot be imported here as a whole; everything else of it is stood in for."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers all imports from a package: the real files, stand-ins' attributes, and mocks for all others."""

    def __init__(self, home: Path, package: str, real: Sequence[str], known: dict[str, dict[str, Any]]) -> None:
        self._home, self._package, self._real, self._known = home, package, real, known

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] != self._package:
            return None
        if name not in self._real:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        file = self._home.joinpath(*name.split("."))
        if file.is_dir():
            return importlib.util.spec_from_file_location(
                name, file / "__init__.py", submodule_search_locations=[str(file)]
            )
        return importlib.util.spec_from_file_location(name, file.with_suffix(".py"))

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__dict__.update(self._known.get(spec.name, {}))
        module.__getattr__ = lambda name: mock.MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def load(home: Path, folder: str, names: Sequence[str], known: dict[str, dict[str, Any]]) -> list[ModuleType]:
    """The modules `names` of the dotted folder below home, from their files; known: what others have to have."""
    full = [f"{folder}.{name}" for name in names]
    sys.meta_path.insert(0, Finder(home, folder.split(".")[0], full, known))
    return [importlib.import_module(name) for name in full]
