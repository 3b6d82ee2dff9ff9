# SPDX-License-Identifier: Apache-2.0
"""The environment in which all engines of a program, and of the processes it starts, run on Crossdock.

nccl.ep looks for functions among those of the process, C and C++ programs ask the loader for libnccl_ep.so.0 or
libnccl_ep.so, TransformerEngine opens NCCL_EP_HOME/lib/libnccl_ep.so and else the file that it brings: docs/engines.md.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crossdock._core import has_cuda
from crossdock.errors import InvalidUsage
from crossdock.launcher import plugin as network_plugin
from crossdock.launcher import take_over
from crossdock.launcher.as_deep_ep import FOLDER, deep_ep_message, expect_not_imported, install_as_deep_ep
from crossdock.launcher.libraries import NCCL_VERSION, Library, ask, find_nccl, preloaded
from crossdock.launcher.loaded import loaded_files
from crossdock.nccl import MIN_VERSION

# Its lib/libnccl_ep.so leads to the package's library: a wheel has no links.
HOME = Path(__file__).parents[1] / "nccl_ep_home"


@dataclass(frozen=True)
class Program:
    """Paths of the libraries to load first; nccl is None if nothing needs it, plugin may be empty. chose_plugin: the
    user has not named it. lacks_plugin: it would be needed."""

    library: str
    home_library: str
    nccl: Library | None
    plugin: str
    chose_plugin: bool
    lacks_plugin: bool
    as_deep_ep: bool

    @property
    def libraries(self) -> list[str]:
        """In the order in which the loader must see them."""
        nccl = [self.nccl.file] if self.nccl and not self.nccl.problem else []
        return [file for file in (self.library, self.home_library, *nccl) if file]

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Environment variables to add or replace."""
        variables = {"NCCL_EP_HOME": str(HOME)} if self.home_library else {}
        if not environment.get("NCCL_HOME") and not environment.get("NCCL_EP_JIT_BUILD_INCLUDE_DIR"):
            # Nothing is compiled at run time here, but TransformerEngine ends where it finds no headers of NCCL.
            variables["NCCL_EP_JIT_BUILD_INCLUDE_DIR"] = str(HOME)
        # LD_PRELOAD takes spaces for ends of names.
        usable = [file for file in self.libraries if not set(file) & set(" :")]
        folders = [os.path.dirname(file) for file in self.libraries if file not in usable and ":" not in file]
        kept = [file for file in environment.get("LD_PRELOAD", "").replace(":", " ").split() if file not in usable]
        variables["LD_PRELOAD"] = ":".join([*usable, *kept])
        _prepend(variables, environment, "LD_LIBRARY_PATH", folders)
        if self.plugin:
            variables[network_plugin.VARIABLE] = self.plugin
        if self.plugin or network_plugin.is_own(environment.get(network_plugin.VARIABLE, "")):
            name, value = network_plugin.LOADING
            variables[name] = environment.get(name) or value
        if self.as_deep_ep:
            _prepend(variables, environment, "PYTHONPATH", [str(FOLDER)])
        return variables

    def enter(self) -> None:
        """Sets this process up, and those that it starts."""
        # NCCL first: installing deep_ep imports torch, which brings its own.
        present = self._expect_no_old_nccl()
        for file in reversed(self.libraries):
            if not (present and self.nccl and file == self.nccl.file):
                ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
        take_over.expect_ours_first()
        os.environ.update(self.variables(os.environ))
        if self.as_deep_ep:
            install_as_deep_ep()

    def _expect_no_old_nccl(self) -> bool:
        """Whether this process has loaded NCCL. InvalidUsage: it has, and that one is too old."""
        loaded = loaded_files("libnccl.so") if self.nccl and not self.nccl.problem else []
        for found in (ask(file, NCCL_VERSION) for file in loaded):
            if self.nccl and found.code < MIN_VERSION:
                raise InvalidUsage(
                    f"NCCL {found.version} ({found.file}) is loaded in this process already, and {self.nccl.file} "
                    "would come second: take it out of LD_PRELOAD, or keep Python from importing what loads it at "
                    "its start"
                )
        return bool(loaded)

    def nccl_ep_note(self) -> str:
        """Why nccl.ep would not use Crossdock, or ""."""
        return take_over.nccl_ep_note(self.variables(os.environ), self.libraries)

    def message(self) -> str:
        """Which library serves which interface."""
        other = self.nccl_ep_note()
        users = ["nccl_ep.h", *([] if other else ["nccl.ep"]), *(["TransformerEngine"] if self.home_library else [])]
        named = f"{', '.join(users[:-1])} and {users[-1]} use" if len(users) > 1 else f"{users[0]} uses"
        note = "" if has_cuda else ", which has no GPU backend: only CPU communicators work"
        parts = [f"{named} {take_over.own_name()}, {self.library}{note}"]
        if other:
            parts.append(other)
        if self.as_deep_ep:
            parts.append(deep_ep_message())
        if self.nccl:
            parts.append(self.nccl.problem or f"NCCL is {self.nccl.version}, {self.nccl.file}")
        if self.plugin:
            why = ", since GPUs here may need a network and there is no RDMA device" if self.chose_plugin else ""
            loading = "=".join(network_plugin.LOADING)
            how = "" if os.environ.get(network_plugin.LOADING[0]) else f", with {loading}"
            parts.append(f"NCCL's network plugin is {self.plugin}{why}{how}")
        elif self.lacks_plugin:
            parts.append(
                "GPUs here may need a network, which NCCL does not have without an RDMA device, and this package has "
                "no plugin: build it with libucx-dev and libssl-dev"
            )
        if any(" " in file or ":" in file for file in self.libraries):
            parts.append("LD_PRELOAD takes no spaces or colons, so processes that it starts may use other libraries")
        return "; ".join(parts)


def _prepend(variables: dict[str, str], environment: Mapping[str, str], name: str, paths: list[str]) -> None:
    kept = [path for path in environment.get(name, "").split(os.pathsep) if path and path not in paths]
    if paths:
        variables[name] = os.pathsep.join([*paths, *kept])


def prepare(as_deep_ep: bool = False, plugin: str = "", needs_nccl: bool = has_cuda) -> Program:
    """Finds everything and changes nothing. InvalidUsage, naming both files, if two libraries of one name would be
    loaded, or if another DeepEP is imported."""
    library = take_over.own_library()
    home_library = HOME / "lib" / "libnccl_ep.so"
    for file in preloaded(os.environ, "libnccl_ep.so"):
        _expect_same(file, library, str(home_library))
    if as_deep_ep:
        expect_not_imported()
    nccl = find_nccl(os.environ, MIN_VERSION) if needs_nccl else None
    if nccl and not nccl.problem:
        for file in preloaded(os.environ, "libnccl.so"):
            _expect_same(file, nccl.file)
    home_file = str(home_library) if home_library.exists() else ""
    if plugin:
        return Program(library, home_file, nccl, network_plugin.checked(plugin, nccl), False, False, as_deep_ep)
    code = nccl.code if nccl else 0
    chosen = network_plugin.chosen(os.environ, code)
    lacks = not network_plugin.own_file() and network_plugin.is_wanted(os.environ, code)
    return Program(library, home_file, nccl, chosen, bool(chosen), lacks, as_deep_ep)


def _expect_same(preloaded_file: str, *ours: str) -> None:
    if not any(os.path.realpath(preloaded_file) == os.path.realpath(own) for own in ours):
        raise InvalidUsage(
            f"LD_PRELOAD names {preloaded_file}, and a process can have one library of that name, which is to be "
            f"{ours[0]}: take it out of LD_PRELOAD"
        )
