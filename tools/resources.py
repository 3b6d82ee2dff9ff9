#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each instance of a kernel takes of a GPU, as ptxas counts it, against the table that is committed.

    ./dev resources [--update], or python3 tools/resources.py BUILD_FOLDER [--update]

Reads what tools/nvcc_report.sh kept when the library's .cu files were compiled in that CUDA build. A register more can
halve the blocks of an SM, and a spill costs bandwidth, so a change is to be seen in review and not in a profile."""
import difflib
import json
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "src/kernels/resources.txt"
COLUMNS = ("kernel", "GPU", "registers", "static shared", "stack", "spill stores", "spill loads")


def nvcc_version(nvcc):
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release [\d.]+, V([\d.]+)", text)[1]


def number(pattern, text):
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def rows_of(report):
    """A row for each kernel and GPU of a compiled file; numbers are bytes, but for registers."""
    report = subprocess.run(["c++filt"], input=report, capture_output=True, text=True, check=True).stdout
    for entry in report.split("Compiling entry function ")[1:]:
        signature, gpu = re.match(r"'(.*)' for '(.*)'", entry).groups()
        kernel = re.search(r"\w+(<.*>)?(?=\([^()]*\)$)", signature)[0].replace("crossdock::", "")
        yield (kernel, gpu, number(r"Used (\d+) registers", entry), number(r"(\d+) bytes smem", entry),
               number(r"(\d+) bytes stack frame", entry), number(r"(\d+) bytes spill stores", entry),
               number(r"(\d+) bytes spill loads", entry))


def lines_of(rows):
    cells = [COLUMNS] + [tuple(map(str, row)) for row in sorted(rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]


def main():
    build, update = pathlib.Path(sys.argv[1]), sys.argv[2:] == ["--update"]
    if sys.argv[2:] and not update:
        sys.exit(f"{sys.argv[0]}: the only option is --update, not '{' '.join(sys.argv[2:])}'")
    reports, nvcc = [], None
    for unit in json.loads((build / "compile_commands.json").read_text()):
        if unit["file"].endswith(".cu") and pathlib.Path(unit["file"]).is_relative_to(ROOT / "src"):
            command = shlex.split(unit["command"])
            nvcc = next(word for word in command if pathlib.Path(word).name == "nvcc")
            reports.append((build / (command[command.index("-o") + 1] + ".ptxas")).read_text())
    version = nvcc_version(nvcc)
    made = [f"# ./dev resources --update (nvcc {version}, bytes where it is not registers)"]
    made += lines_of(row for report in reports for row in rows_of(report))

    if update:
        TABLE.write_text("\n".join(made) + "\n")
        return
    committed = TABLE.read_text().splitlines()
    if committed[0] != made[0]:
        print(f"{TABLE.relative_to(ROOT)} is of another compiler ({committed[0]}), not compared with nvcc {version}")
    elif committed != made:
        print("\n".join(difflib.unified_diff(committed, made, "committed", "this build", lineterm="")))
        sys.exit(f"{TABLE.relative_to(ROOT)} differs: if that is meant, ./dev resources --update and commit it")


main()
