#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each instance of a kernel takes of a GPU, as ptxas counts it, against the table that is committed.

    ./dev resources [--update], or python3 tools/resources.py BUILD_FOLDER [--update]

Reads what tools/nvcc_report.sh kept when the library's .cu files were compiled in that CUDA build. A register more can
halve the blocks of an SM, and a spill costs bandwidth, so a change is to be seen in review and not in a profile. A
build for some of the GPUs in the table is compared with their rows.

All kernels together have a budget (BUDGET): a variant that is compiled for a special case costs every user who builds,
downloads or loads the library. Whoever needs more raises it, and says why in the commit."""

import difflib
import json
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "src/kernels/resources.txt"
COLUMNS = ("kernel", "GPU", "registers", "static shared", "stack", "spill stores", "spill loads", "code", "rare code")
# Kernels of some microseconds wait for every line of their machine code, so theirs is counted, on this GPU.
COUNTED, COUNTED_GPU = ROOT / "src/kernels/ll", "sm_90"
GIN = "-DCROSSDOCK_GIN_PEERS"  # not in the variant for GIN peers
# For each GPU: kernels, KiB of their machine code (an average over the build's GPUs, of which sm_90 takes most), and
# seconds of processor time to compile the slowest file.
BUDGET = (104, 11500, 240)
# Of a kernel's name; variants for LSA peers only are not marked.
# Of an LL kernel's config (kernels/ll/variants.h): a word for each value of its first members.
HALVES, ORDERS = {"1": "send", "2": "receive", "3": "both"}, {"0": "by rank", "1": "by expert"}
CONFIGS = {
    "Dispatch": (
        HALVES,
        ORDERS,
        {"1": "LL128", "2": "plain"},
        {"1": "FP8"},
        {"true": "transposed"},
        {"true": "elastic"},
    ),
    "Combine": (HALVES, ORDERS, {"1": "sums"}, {"true": "masks"}, {"true": "own stay"}, {"true": "elastic"}),
}
WORDS = {
    "crossdock::": "",
    "gpu::": "",
    "gpu_gin::": "",
    "<(Peers)0>": "",
    ", (Peers)0": "",
    "(Peers)1": "GIN",
    ", (HtWire)0": "",
    "(HtWire)1": "MXFP8",
    ">>": "> >",
}


def nvcc_version(nvcc):
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release [\d.]+, V([\d.]+)", text)[1]


def number(pattern, text):
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def words_of(config):
    values = re.findall(r"(\d+|true|false)u?(?:,|$)", config[2])
    return " ".join(words[value] for words, value in zip(CONFIGS[config[1]], values, strict=False) if value in words)


def kernel_of(signature):
    signature = re.sub(r"Ll(Dispatch|Combine)Known<\(?(?:\w+::)*Ll\w+Config\)?\{([^}]*)\}>", words_of, signature)
    name = re.search(r"\w+(<.*>)?(?=\([^()]*\)$)", signature)[0]
    for word, short in WORDS.items():
        name = name.replace(word, short)
    return name


def code_of(cubins):
    """Bytes of machine code of each kernel in a folder of them: what lies before its first function that is called, and
    those functions, which only faults and rare cases need."""
    files = list(cubins.glob("*.cubin"))
    named = COUNTED_GPU.replace("sm", "compute")  # as a file is with several GPUs
    cubin = files[0] if len(files) == 1 else next((file for file in files if named in file.name), None)
    if cubin is None:
        return {}
    symbols = subprocess.run(["readelf", "-sW", cubin], capture_output=True, text=True, check=True).stdout
    sizes, first_called = {}, {}
    for address, size, section, name in re.findall(r"(\w+)\s+(\d+|0x\w+) FUNC .* (\d+) (\S+)$", symbols, re.MULTILINE):
        if name.startswith("$"):
            first_called[section] = min(first_called.get(section, 1 << 62), int(address, 16))
        else:
            sizes[section] = (name, int(size, 0))
    code = {}
    for section, (name, size) in sizes.items():
        signature = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
        hot = min(size, first_called.get(section, size))
        code[kernel_of(signature)] = (hot, size - hot)
    return code


def rows_of(report, code):
    """A row for each kernel and GPU of a compiled file; numbers are bytes, but for registers."""
    report = subprocess.run(["c++filt"], input=report, capture_output=True, text=True, check=True).stdout
    for entry in report.split("Compiling entry function ")[1:]:
        signature, gpu = re.match(r"'(.*)' for '(.*)'", entry).groups()
        kernel = kernel_of(signature)
        hot, rare = code.get(kernel, ("-", "-")) if gpu == COUNTED_GPU else ("-", "-")
        yield (
            kernel,
            gpu,
            number(r"Used (\d+) registers", entry),
            number(r"(\d+) bytes smem", entry),
            number(r"(\d+) bytes stack frame", entry),
            number(r"(\d+) bytes spill stores", entry),
            number(r"(\d+) bytes spill loads", entry),
            hot,
            rare,
        )


def used_of(files, num_gpus):
    """Of the compiled files: KiB of machine code and seconds for the slowest, each for one of the GPUs."""
    code = 0
    for cubin in (cubin for kept in files for cubin in kept.with_name(kept.name + ".cubins").glob("*.cubin")):
        sections = subprocess.run(["readelf", "-SW", cubin], capture_output=True, text=True, check=True).stdout
        code += sum(int(size, 16) for size in re.findall(r"\.text\.\S+ +PROGBITS +\w+ +\w+ +(\w+)", sections))
    times = [kept.with_name(kept.name + ".times") for kept in files]
    lines = [path.read_text().splitlines()[1] for path in times if path.exists()]  # not after an older nvcc_report.sh
    seconds = [sum(60 * int(m) + float(s) for m, s in re.findall(r"(\d+)m([\d.]+)s", line)) for line in lines]
    return round(code / 1024 / num_gpus), round(max(seconds, default=0) / num_gpus)


def lines_of(rows):
    cells = [COLUMNS] + rows
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def rows_in(lines):
    return [tuple(re.split(" {2,}", line)) for line in lines[2:]]


def main():
    build, update = pathlib.Path(sys.argv[1]), sys.argv[2:] == ["--update"]
    if sys.argv[2:] and not update:
        sys.exit(f"{sys.argv[0]}: the only option is --update, not '{' '.join(sys.argv[2:])}'")
    reports, compiled, nvcc = [], [], None
    for unit in json.loads((build / "compile_commands.json").read_text()):
        if unit["file"].endswith(".cu") and pathlib.Path(unit["file"]).is_relative_to(ROOT / "src"):
            command = shlex.split(unit["command"])
            nvcc = next(word for word in command if pathlib.Path(word).name == "nvcc")
            is_counted = pathlib.Path(unit["file"]).parent == COUNTED and GIN not in command
            kept = build / command[command.index("-o") + 1]
            code = code_of(kept.with_name(kept.name + ".cubins")) if is_counted else {}
            compiled.append(kept)
            reports.append((kept.with_name(kept.name + ".ptxas").read_text(), code))
    version = nvcc_version(nvcc)
    title = f"# ./dev resources --update (nvcc {version}, bytes where it is not registers)"
    rows = sorted(tuple(map(str, row)) for report, code in reports for row in rows_of(report, code))
    committed = TABLE.read_text().splitlines()
    gpus = {row[1] for row in rows}

    if update:
        missing = {row[1] for row in rows_in(committed)} - gpus
        if missing:
            sys.exit(
                f"this build has no code for {', '.join(sorted(missing))}, which the table has: configure it with them"
            )
        TABLE.write_text("\n".join([title, *lines_of(rows)]) + "\n")
    elif committed[0] != title:
        print(f"{TABLE.relative_to(ROOT)} is of another compiler ({committed[0]}), not compared with nvcc {version}")
    else:
        expected = [row for row in rows_in(committed) if row[1] in gpus]
        if expected != rows:
            print(
                "\n".join(
                    difflib.unified_diff(lines_of(expected), lines_of(rows), "committed", "this build", lineterm="")
                )
            )
            sys.exit(f"{TABLE.relative_to(ROOT)} differs: if that is meant, ./dev resources --update and commit it")

    used = (round(len(rows) / len(gpus)), *used_of(compiled, len(gpus)))
    parts = zip(used, BUDGET, ("kernels", "KiB of machine code", "s for the slowest file"), strict=True)
    print("each GPU: " + ", ".join(f"{have} {what} (budget: {most})" for have, most, what in parts))
    if any(have > most for have, most in zip(used, BUDGET, strict=True)):
        sys.exit("the kernels take more than their budget: tools/resources.py, BUDGET")


main()
