# SPDX-License-Identifier: Apache-2.0
"""What all tests share: short bounds, so that a mistake fails quickly instead of hanging."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("CROSSDOCK_JOIN_TIMEOUT_MS", "20000")
os.environ.setdefault("NCCL_EP_TIMEOUT_MS", "20000")

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=15)
settings.load_profile("fixed")
