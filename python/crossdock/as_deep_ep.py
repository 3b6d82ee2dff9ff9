# SPDX-License-Identifier: Apache-2.0
"""`import deep_ep` finds crossdock.deep_ep, in this process or, by an environment variable, in its children, too."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from crossdock.errors import InvalidUsage

NAME = "deep_ep"
VERSION = "2.1.0"  # of DeepEP, whose interface this is
HOME = "crossdock.deep_ep"
# Where DeepEP's versions keep things, beside the modules that have the same names here.
ALIASES = {f"{NAME}.buffer": f"{HOME}.buffers.legacy"}
SUBMODULES = (
    "buffers",
    "buffers.elastic",
    "buffers.legacy",
    "utils",
    "utils.envs",
    "utils.event",
    "utils.gate",
    "utils.math",
    "utils.refs",
    "utils.testing",
)
# Holds a package deep_ep that is nothing but this, and its metadata.
FOLDER = Path(__file__).parent / "deep_ep_path"


def _is_ours(module: ModuleType) -> bool:
    return module.__name__ in (HOME, NAME) and getattr(module, "__file__", "") in (
        str(FOLDER / NAME / "__init__.py"),
        getattr(sys.modules.get(HOME), "__file__", None),
    )


def expect_no_other_deep_ep() -> None:
    """InvalidUsage, with both files, where another deep_ep is imported or installed."""
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        if not _is_ours(loaded):
            raise InvalidUsage(
                f"deep_ep is imported already, from {getattr(loaded, '__file__', 'elsewhere')}, and {_own_file()} "
                "cannot take its place: call install_as_deep_ep before anything imports deep_ep, or start the program with "
                "python -m crossdock run --as-deep-ep"
            )
        return
    spec = importlib.util.find_spec(NAME)
    # A folder of that name that is no package has no origin, and a package comes before it.
    if spec is not None and spec.origin is not None and Path(spec.origin).parent != FOLDER / NAME:
        refuse_other(spec.origin)


def refuse_other(file: str) -> None:
    """InvalidUsage: import deep_ep finds that file."""
    is_installed = bool({"site-packages", "dist-packages"} & set(Path(file).parts))
    remedy = "pip uninstall deep_ep" if is_installed else f"keep {Path(file).parent.parent} off Python's path"
    raise InvalidUsage(
        f"another deep_ep is installed, {file}, and {_own_file()} does not stand in front of it: {remedy}, or go "
        "without --as-deep-ep"
    )


def _own_file() -> str:
    return str(Path(__file__).parent / "deep_ep" / "__init__.py")


def deep_ep_message() -> str:
    return f"deep_ep is crossdock.deep_ep, with the interface of DeepEP {VERSION}"


def install_as_deep_ep() -> str:
    """Makes `import deep_ep` find crossdock.deep_ep, in this process, and returns the message that says so.

    InvalidUsage: another deep_ep is imported or installed.
    """
    expect_no_other_deep_ep()
    return _install()


def _install() -> str:
    home = importlib.import_module(HOME)
    sys.modules[NAME] = home
    for name in SUBMODULES:
        sys.modules[f"{NAME}.{name}"] = importlib.import_module(f"{HOME}.{name}")
    for alias, name in ALIASES.items():
        sys.modules[alias] = importlib.import_module(name)
        setattr(home, alias.rpartition(".")[2], sys.modules[alias])
    if str(FOLDER) not in sys.path:  # for importlib.metadata, and for multiprocessing's spawn, which hands it down
        sys.path.append(str(FOLDER))
    return deep_ep_message()
