# SPDX-License-Identifier: Apache-2.0
"""The name deep_ep for crossdock.deep_ep; this package's parent folder goes on PYTHONPATH. It never stands in front of
another deep_ep."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

_own = Path(__file__).resolve().parent.parent
try:
    from crossdock.as_deep_ep import _install
except ModuleNotFoundError as error:
    if error.name != "crossdock":
        raise
    raise ImportError(
        f"Crossdock is installed in {_own.parent.parent}, not for {sys.executable}: install it for this Python, or "
        f"take {_own} off PYTHONPATH"
    ) from None

_others = [path for path in sys.path if not path or Path(path).resolve() != _own]
_found = PathFinder.find_spec("deep_ep", _others)
if _found is not None and _found.origin is not None:
    raise ImportError(f"another deep_ep is installed, {_found.origin}: take {_own} off the path to use it")
_install()
