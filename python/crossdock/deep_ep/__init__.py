# SPDX-License-Identifier: Apache-2.0
"""DeepEP's Python classes on Crossdock: programs that were written for `import deep_ep` find them here, unchanged.

    crossdock.install_as_deep_ep()          # import deep_ep is this module from now on; or
    python -m crossdock run --as-deep-ep SCRIPT ...

docs/engines.md says what is the same, and which callers were tried.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    message = f"crossdock.deep_ep needs PyTorch: pip install 'crossdock[torch]' ({error})"
    raise ModuleNotFoundError(message, name=error.name) from error

from crossdock.deep_ep import buffers, utils
from crossdock.deep_ep.buffers.elastic import (
    ElasticBuffer,
    EPHandle,
    get_logical_domain_size,
    get_physical_domain_size,
)
from crossdock.deep_ep.buffers.legacy import Buffer
from crossdock.deep_ep.checks import topk_idx_t
from crossdock.deep_ep.config import Config
from crossdock.deep_ep.utils.event import EventHandle, EventOverlap
from crossdock.launcher.as_deep_ep import VERSION

__version__ = VERSION

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "buffers",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]
