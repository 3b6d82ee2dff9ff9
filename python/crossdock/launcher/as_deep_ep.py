# SPDX-License-Identifier: Apache-2.0
"""`import deep_ep` finds crossdock.deep_ep, in this process or, by an environment variable, in its children, too.

It stands in front of any other deep_ep, installed or in a script's own folder, which stays as it is: containers of
engines bring one, as the package sgl-deep-ep.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
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
# Goes on PYTHONPATH: a package deep_ep that is nothing but this, its metadata, and what lets it win.
FOLDER = Path(__file__).parent / "deep_ep_path"


def _is_ours(module: ModuleType) -> bool:
    return module.__name__ in (HOME, NAME) and getattr(module, "__file__", "") in (
        str(FOLDER / NAME / "__init__.py"),
        getattr(sys.modules.get(HOME), "__file__", None),
    )


def expect_not_imported() -> None:
    """InvalidUsage, with both files, where another deep_ep is imported."""
    loaded = sys.modules.get(NAME)
    if loaded is not None and not _is_ours(loaded):
        file = getattr(loaded, "__file__", None)
        raise InvalidUsage(
            f"deep_ep is imported already, from {_named(file) if file else 'elsewhere'}, and {_own_file()} cannot take "
            "its place: call install_as_deep_ep before anything imports deep_ep, or start the program with "
            "python -m crossdock run --as-deep-ep"
        )


def other_deep_ep() -> str:
    """The file that `import deep_ep` would find without this one, with the distributions that own it, or ""."""
    path = [entry for entry in sys.path if not entry or Path(entry) != FOLDER]
    for finder in sys.meta_path:
        spec = finder.find_spec(NAME, path) if hasattr(finder, "find_spec") else None
        # A folder of that name that is no package has no origin, and a package comes before it.
        if spec is not None and spec.origin is not None and Path(spec.origin).parent != FOLDER / NAME:
            return _named(spec.origin)
    return ""


def distributions() -> list[Distribution]:
    """The installed distributions that bring a module deep_ep: pip knows their names, not the module's."""
    found = []
    for name in dict.fromkeys(packages_distributions().get(NAME, [])):
        with contextlib.suppress(PackageNotFoundError):  # its folder has another name than its metadata
            found.append(distribution(name))
    return found


def _named(file: str) -> str:
    """The file, behind the distributions that own it."""
    owners = [one for one in distributions() if Path(str(one.locate_file(NAME))) == Path(file).parent]
    named = " and ".join(f"{owner.name} {owner.version}" for owner in owners)
    return f"{named}, {file}" if named else file


def _own_file() -> str:
    return str(Path(__file__).parents[1] / "deep_ep" / "__init__.py")


def deep_ep_message() -> str:
    other = other_deep_ep()
    in_front = f", in front of {other}" if other else ""
    return f"deep_ep is crossdock.deep_ep, with the interface of DeepEP {VERSION}{in_front}"


def install_as_deep_ep() -> str:
    """Makes `import deep_ep` find crossdock.deep_ep, in this process, and returns the message that says so.

    The message names another deep_ep that is installed. InvalidUsage: another one is imported.
    """
    expect_not_imported()
    message = deep_ep_message()
    _install()
    return message


def _install() -> None:
    home = importlib.import_module(HOME)
    sys.modules[NAME] = home
    for name in SUBMODULES:
        sys.modules[f"{NAME}.{name}"] = importlib.import_module(f"{HOME}.{name}")
    for alias, name in ALIASES.items():
        sys.modules[alias] = importlib.import_module(name)
        setattr(home, alias.rpartition(".")[2], sys.modules[alias])
    # For importlib.metadata, and for multiprocessing's spawn, which hands it down: there, too, it comes first.
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
