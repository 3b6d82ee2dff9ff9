# SPDX-License-Identifier: Apache-2.0
"""Runs a Python program that uses NVIDIA's nccl.ep, or with --as-deep-ep DeepEP, unchanged, on Crossdock."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from functools import partial

from crossdock.as_deep_ep import install_for_children
from crossdock.take_over import take_over_for_children


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--as-deep-ep", action="store_true", help="the program imports deep_ep, as may the processes that it starts"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="script is the name of a module")
    parser.add_argument("script", help="file, or with -m module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")


def main(options: argparse.Namespace) -> Callable[[], int]:
    """Prepares, and returns what runs the program."""
    sentence = install_for_children() if options.as_deep_ep else take_over_for_children()
    print(f"crossdock: {sentence}", file=sys.stderr)
    return partial(_run, options)


def _run(options: argparse.Namespace) -> int:
    sys.argv = [options.script, *options.arguments]
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, options.script.rpartition("/")[0] or ".")
        runpy.run_path(options.script, run_name="__main__")
    return 0
