# SPDX-License-Identifier: Apache-2.0
"""Libraries and programs of a few lines, for tests of what the loader does with several of one name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NCCL_EP = "int ncclEpGetVersion(int* version) { *version = 100; return 0; }\n"
NCCL = "int ncclGetVersion(int* version) { *version = %d; return 0; }\n"
PLUGIN = "int ncclRmaPlugin_v14;\n"

# Says of each name which file the loader gives for it, as nccl_ep.h's callers, TransformerEngine and torch ask for it.
ASKING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void say(const char* what, void* library, const char* name) {
    Dl_info info;
    void* function = library ? dlsym(library, name) : NULL;
    if (!function || !dladdr(function, &info)) printf("%s: %s\\n", what, dlerror());
    else printf("%s: %s\\n", what, info.dli_fname);
}

int main(int count, char** arguments) {
    char path[4096] = "";
    say("global", dlopen(NULL, RTLD_NOW), "ncclEpGetVersion");
    say("libnccl_ep.so.0", dlopen("libnccl_ep.so.0", RTLD_NOW), "ncclEpGetVersion");
    say("libnccl_ep.so", dlopen("libnccl_ep.so", RTLD_NOW), "ncclEpGetVersion");
    if (getenv("NCCL_EP_HOME")) snprintf(path, sizeof path, "%s/lib/libnccl_ep.so", getenv("NCCL_EP_HOME"));
    else if (count > 1) snprintf(path, sizeof path, "%s", arguments[1]);
    say("by path", dlopen(path, RTLD_NOW), "ncclEpGetVersion");
    return count > 2 ? atoi(arguments[2]) : 0;
}
"""


def compile_c(source: str, output: Path, *options: str) -> Path:
    """Skips where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler: skipped")
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_name(output.name + ".c")
    file.write_text(source)
    subprocess.run([compiler, file, "-o", output, *options, "-ldl"], check=True)
    return output


def library(source: str, output: Path, soname: str = "") -> Path:
    return compile_c(source, output, "-shared", "-fPIC", f"-Wl,-soname,{soname or output.name}")


def nccl(folder: Path, code: int) -> Path:
    """A library of NCCL's name that says it is of that version."""
    return library(NCCL % code, folder / "libnccl.so.2")


def foreign_nccl_ep(folder: Path) -> Path:
    """A library of the soname of Crossdock's, under the name that TransformerEngine and nccl.ep bring theirs."""
    return library(NCCL_EP, folder / "libnccl_ep.so", "libnccl_ep.so.0")
