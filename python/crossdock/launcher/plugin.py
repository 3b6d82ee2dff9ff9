# SPDX-License-Identifier: Apache-2.0
"""The network plugin that NCCL loads for kernels: libnccl-rma-crossdock.so, which comes with a package for GPUs.

Where GPUs are on several hosts, or may not share the host's memory, kernels send through NCCL's network. NCCL's own
needs an RDMA device. So a program gets the plugin without asking if that may be so, the machine has none, and it names
no other one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from crossdock.errors import InvalidUsage
from crossdock.launcher import gpu_links
from crossdock.launcher.libraries import Library, ask, version_text

VARIABLE = "NCCL_RMA_PLUGIN"
NAME = "libnccl-rma-crossdock.so"
FUNCTIONS = ("ncclRmaPlugin_v14", "ncclRmaPlugin_v13")
MIN_NCCL = 23007
RDMA_DEVICES = Path("/dev/infiniband")  # a container may see those of its host in /sys, and not have them
PACKAGE = Path(__file__).parents[1]
# What splits a host's ranks: NCCL's for groups that do not share the host's memory, and Crossdock's for all.
SPLITTING = ("NCCL_LSA_TEAM_SIZE", "NCCL_HOSTID")
ALWAYS_SPLITTING = "CROSSDOCK_LSA_TEAM_SIZE"
# Of launchers: all ranks, and those of this host.
RANKS = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALNRANKS"),
)
HOSTS = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES")
# The plugin copies while kernels wait for what it brings. CUDA loads a kernel at its first launch otherwise, waits for
# running kernels before it does, and holds up the copies meanwhile.
LOADING = ("CUDA_MODULE_LOADING", "EAGER")


def own_file() -> str:
    """That of this package, or "": builds without the headers of UCX have none."""
    built = PACKAGE.parents[1] / "plugin" / NAME  # in a build tree
    return next((str(file) for file in (PACKAGE / "lib" / NAME, built) if file.is_file()), "")


def is_own(named: str) -> bool:
    """Whether a value of NCCL_RMA_PLUGIN names this plugin."""
    return os.path.basename(named) in (NAME, "crossdock")


def is_wanted(environment: Mapping[str, str], nccl_code: int) -> bool:
    """Whether kernels may need a network and would have none without the plugin."""
    names_another = any(environment.get(name, "none") not in ("", "none") for name in ("NCCL_GIN_PLUGIN", VARIABLE))
    is_off = environment.get("NCCL_GIN_ENABLE") == "0" or environment.get(VARIABLE) == "none"
    if names_another or is_off or nccl_code < MIN_NCCL or has_rdma_device():
        return False
    return may_need_network(environment)


def chosen(environment: Mapping[str, str], nccl_code: int) -> str:
    """The package's plugin, if it is wanted and there, or ""."""
    file = own_file()
    return file if file and is_wanted(environment, nccl_code) else ""


def may_need_network(environment: Mapping[str, str]) -> bool:
    """Whether ranks may be unable to reach each other's memory: they are on several hosts, as launchers say it, or in
    LSA teams that were asked for, or they may not share the host's memory, and GPUs have no peer access."""

    def number(name: str) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdigit() else 0

    if environment.get(ALWAYS_SPLITTING):
        return True
    if any(number(here) and number(all_ranks) > number(here) for all_ranks, here in RANKS):
        return True
    if next((number(name) for name in HOSTS if environment.get(name)), 1) > 1:
        return True
    if environment.get("CROSSDOCK_HOST_MEMORY", "").lower() not in ("0", "off", "false"):
        return False
    is_forbidden = environment.get("NCCL_P2P_DISABLE", "") not in ("", "0")
    if is_forbidden or any(environment.get(name) for name in SPLITTING):
        return True
    return not gpu_links.all_reach_each_other()


def has_rdma_device() -> bool:
    return any(RDMA_DEVICES.glob("uverbs*"))


def offer(nccl_code: int) -> None:
    """Before this process makes its first communicator: names the chosen plugin to NCCL, which reads the variable once
    per process. How CUDA loads kernels is settled by then; a group warns if it does not fit."""
    if file := chosen(os.environ, nccl_code):
        os.environ[VARIABLE] = file


def checked(plugin: str, nccl: Library | None) -> str:
    """The path of a plugin that the user names. InvalidUsage: NCCL cannot use it."""
    path = os.path.abspath(plugin)
    if not os.path.isfile(path):
        raise InvalidUsage(f"--plugin is {plugin}, which is no file: name {NAME} (docs/deployment.md)")
    library = ask(path, "", *FUNCTIONS)
    if not library.symbols:
        reason = library.problem or f"it has neither {FUNCTIONS[0]} nor {FUNCTIONS[1]}"
        raise InvalidUsage(f"--plugin is {plugin}, which NCCL cannot use: {reason}")
    if nccl and nccl.code and nccl.code < MIN_NCCL:
        raise InvalidUsage(f"--plugin needs NCCL {version_text(MIN_NCCL)} or newer, and {nccl.file} is {nccl.version}")
    return path
