# SPDX-License-Identifier: Apache-2.0
"""What all tests share: bounds, so that a mistake fails instead of hanging; and the server that processes of
ranks are forked from, which has imported torch."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from hypothesis import settings

# ctest hides what the user has set (tests/environment.cmake); without it, these may be.
os.environ["CROSSDOCK_JOIN_TIMEOUT_MS"] = os.environ["NCCL_EP_TIMEOUT_MS"] = "60000"

multiprocessing.set_start_method("forkserver")
multiprocessing.set_forkserver_preload(["torch"])  # seconds

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=15)
settings.load_profile("fixed")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A file whose tests are all skipped, since torch or a GPU is not there, has not failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.OK
