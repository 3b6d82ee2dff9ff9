# SPDX-License-Identifier: Apache-2.0
"""Where DeepEP 2 keeps its two classes."""

from __future__ import annotations

from crossdock.deep_ep.buffers import elastic, legacy

__all__ = ["elastic", "legacy"]
