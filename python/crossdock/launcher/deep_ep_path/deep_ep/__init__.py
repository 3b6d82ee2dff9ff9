# SPDX-License-Identifier: Apache-2.0
"""The name deep_ep for crossdock.deep_ep; this package's parent folder goes on PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

_own = Path(__file__).resolve().parent.parent
try:
    from crossdock.launcher.as_deep_ep import _install
except ModuleNotFoundError as error:
    if error.name != "crossdock":
        raise
    raise ImportError(
        f"Crossdock is installed in {_own.parents[2]}, not for {sys.executable}: install it for this Python, or "
        f"take {_own} off PYTHONPATH"
    ) from None

_install()
