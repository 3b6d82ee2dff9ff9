# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from crossdock.deep_ep.elastic import ElasticBuffer, EPHandle
from crossdock.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
