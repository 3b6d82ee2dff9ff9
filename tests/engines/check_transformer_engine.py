# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's library as far as it goes without a GPU: it loads, with the structures that gpu.py's cases use.

    CROSSDOCK_ENGINES_MIB=300 python tests/engines/check_transformer_engine.py

The wheel has 264 MiB. What runs on a GPU is in gpu_transformer_engine.py; gpu.py starts it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

import ranks
import wheels
from gpu import library_folders
from gpu_transformer_engine import BFLOAT16, Engine


def check() -> int:
    [library] = wheels.folder(wheels.TRANSFORMER_ENGINE).rglob("libtransformer_engine.so")
    if "CROSSDOCK_ENGINES_AGAIN" not in os.environ:  # the loader reads its path only as a process begins
        os.environ |= {"LD_LIBRARY_PATH": ":".join(library_folders()), "CROSSDOCK_ENGINES_AGAIN": "1"}
        os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve())])
    try:
        engine = Engine(str(library))
    except OSError as error:
        raise wheels.Skip(f"its library does not load here: {error}") from error
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    made, found = engine.tensor(tensor), engine.library
    found.nvte_tensor_data.restype = ctypes.c_void_p
    for name in ("nvte_tensor_ndims", "nvte_tensor_numel", "nvte_tensor_size_bytes"):
        getattr(found, name).restype = ctypes.c_size_t
    assert found.nvte_tensor_data(made) == tensor.data_ptr()
    assert (found.nvte_tensor_ndims(made), found.nvte_tensor_numel(made)) == (2, 12)
    assert (found.nvte_tensor_size_bytes(made), found.nvte_tensor_type(made)) == (24, BFLOAT16)
    print(f"TransformerEngine {wheels.TRANSFORMER_ENGINE.version}: its library loads; the cases need a GPU (gpu.py)")
    return 0


if __name__ == "__main__":
    ranks.main("transformer_engine", check)
