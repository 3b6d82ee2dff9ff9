# SPDX-License-Identifier: Apache-2.0
"""Which files this process has loaded."""

from __future__ import annotations

import os


def loaded_files(prefix: str) -> list[str]:
    """Paths of the loaded files whose names begin with prefix, in the order of the process's memory."""
    with open("/proc/self/maps") as maps:
        # The path is the sixth field, and may have spaces; memory without a file has five.
        fields = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    paths = dict.fromkeys(field[5] for field in fields if len(field) == 6)
    return [path for path in paths if os.path.basename(path).startswith(prefix)]
