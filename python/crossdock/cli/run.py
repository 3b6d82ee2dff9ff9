# SPDX-License-Identifier: Apache-2.0
"""Runs a Python program that uses NVIDIA's nccl.ep, unchanged, on Crossdock's library."""

from __future__ import annotations

import argparse
import runpy
import sys

from crossdock.take_over import take_over_nccl_ep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="is_module", action="store_true", help="script is the name of a module")
    parser.add_argument("script", help="file, or with -m module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")


def main(options: argparse.Namespace) -> int:
    print(f"crossdock: {take_over_nccl_ep()}", file=sys.stderr)
    sys.argv = [options.script, *options.arguments]
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, options.script.rpartition("/")[0] or ".")
        runpy.run_path(options.script, run_name="__main__")
    return 0
