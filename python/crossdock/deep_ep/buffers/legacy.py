# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from crossdock.deep_ep.config import Config
from crossdock.deep_ep.events import EventHandle, EventOverlap
from crossdock.deep_ep.legacy import Buffer

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
