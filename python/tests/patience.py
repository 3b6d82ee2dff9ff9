# SPDX-License-Identifier: Apache-2.0
"""How long ranks wait for one that stays away, which nothing but a timeout tells of."""

from __future__ import annotations

import os
from pathlib import Path


def short_timeout_s() -> float:
    """A second where every thread that can run has a core; where they share cores, each may take as much longer. A
    healthy rank needs some milliseconds."""
    running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return max(1.0, max(os.getloadavg()[0], running) / len(os.sched_getaffinity(0)))


def short_timeout_ms() -> str:
    """As environment variables have it."""
    return str(int(1000 * short_timeout_s()))
