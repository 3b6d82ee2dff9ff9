#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md and docs/performance.md from bench/results/*.json.

    tables.py                rewrites what stands between the marks
    tables.py --check        fails, saying where, if that would change a document, or if a plot is of other results
    tables.py --take FOLDER  first takes FOLDER's JSON files over into bench/results, without the names of host, kernel
                             and folders

A document's part stands between `<!-- tables begin -->` and `<!-- tables end -->`. Needs nothing but Python.
"""
import json
import pathlib
import re
import sys

import ht_tables
import results
from table_parts import KERNEL, LAUNCH, METRICS, PERIOD, shape, table, us, wrap

# What is aimed at, by number of ranks: text, run, tokens, operation, by what it is measured, us.
GOALS = {
    4: [
        ("rank-major in windows, dispatch", "ll-rank-major-windows", 128, "dispatch", PERIOD, 18),
        ("rank-major in windows, combine", "ll-rank-major-windows", 128, "combine", PERIOD, 19),
        ("rank-major in windows, both", "ll-rank-major-windows", 128, "pair", PERIOD, 36),
        ("expert-major, dispatch", "ll-expert-major", 128, "dispatch", KERNEL, 20),
        ("expert-major, combine, exact sums", "ll-expert-major", 128, "combine", KERNEL, 36),
        ("expert-major, combine, sender's sums", "ll-expert-major-sums", 128, "combine", KERNEL, 21),
        ("expert-major, both, exact sums", "ll-expert-major", 128, "pair", PERIOD, 56),
        ("expert-major, both, sender's sums", "ll-expert-major-sums", 128, "pair", PERIOD, 40),
        ("FP8 quantised in dispatch, expert-major", "ll-fp8", 128, "dispatch", KERNEL, 12),
        ("FP8 quantised in dispatch, rank-major", "ll-rank-major-fp8", 128, "dispatch", KERNEL, 12),
        ("rank-major in windows, both", "ll-rank-major-windows-few-tokens", 64, "pair", PERIOD, 22),
        ("rank-major in windows, both", "ll-rank-major-windows-few-tokens", 8, "pair", PERIOD, 11.5),
        ("rank-major in windows, both", "ll-rank-major-windows-few-tokens", 1, "pair", PERIOD, 10),
        ("rank-major in windows, dispatch", "ll-rank-major-windows", 128, "dispatch", LAUNCH, 25),
    ],
    8: [
        ("rank-major in windows, dispatch", "ll-rank-major-windows", 128, "dispatch", PERIOD, 30),
        ("rank-major in windows, combine", "ll-rank-major-windows", 128, "combine", PERIOD, 32),
        ("rank-major in windows, both", "ll-rank-major-windows", 128, "pair", PERIOD, 62),
        ("expert-major, combine, exact sums", "ll-expert-major", 128, "combine", KERNEL, 45),
        ("expert-major, combine, sender's sums", "ll-expert-major-sums", 128, "combine", KERNEL, 34),
        ("FP8 quantised in dispatch, expert-major", "ll-fp8", 128, "dispatch", KERNEL, 19),
        ("rank-major in windows, both", "ll-rank-major-windows-few-tokens", 1, "pair", PERIOD, 12),
    ],
}
def goal_table(runs, machine, goals):
    rows, other_name = [], "another library"
    for text, name, tokens, operation, by, goal in goals:
        run = runs.get(f"{name}-{machine}")
        if run is None:
            continue
        own, other = (run.row(operation, is_own, tokens=tokens) for is_own in (True, False))
        if other:
            other_name = results.library_name(other.library)
        rows.append((text, tokens, by, f"≤ {goal}", *(us(row and row.value(METRICS[by])) for row in (own, other)),
                     us(own.floor)))
    return table(["work", "tokens:", "by", "goal:", "Crossdock:", f"{other_name}:", "floor:"], rows)


def readme(runs):
    lines = []
    for machine in results.machines(runs):
        run = runs.get(f"ll-rank-major-windows-{machine}")
        if run is None or run.ranks not in GOALS:
            continue
        nccl = re.search(r"NCCL [0-9.]+", run.machine["gpu"]).group()
        model = run.machine["gpu"].split(",")[0]
        lines += wrap(f"""Low latency on {run.ranks} GPUs of one host ({model}), {shape(run)}, BF16, uniform routing,
            {nccl}; medians in us, both libraries in one run. "Period" is that of operations back to back in CUDA
            graphs, "kernel" what the kernels take by CUPTI when all ranks begin at once, "launch to end" is event to
            event on an idle stream. The floor is the bulk writes of the bytes that must leave a rank, measured in the
            same run.""")
        lines += goal_table(runs, machine, GOALS[run.ranks])
    lines += ht_tables.readme(runs)
    lines += cpu_table(runs) + ht_tables.cpu_table(runs)
    return lines + wrap("""All other figures are in [docs/performance.md](docs/performance.md), their sources with
        commands and machine in [bench/results](bench/results).""")


def cpu_table(runs):
    cpu = sorted((run for name, run in runs.items() if name.startswith("cpu-") and not run.is_high_throughput),
                 key=lambda run: (-run.ranks, run.common["layout"], run.common["world"]))
    if not cpu:
        return []
    rows = []
    for run in cpu:
        for case in run.cases():
            dispatch, combine, pair = run.rows(own_only=True, tokens=case["tokens"])
            rows.append((f"{run.ranks} {run.common['world']}", run.common["layout"], case["tokens"],
                         *(us(row.compared) for row in (dispatch, combine, pair)),
                         *(f"{row.floor / row.compared * 100:.0f} %" for row in (dispatch, combine))))
    machine = cpu[0].machine
    lines = wrap(f"""On a CPU ({machine['cpu']}, {machine['cpus']} cores), {shape(cpu[0])}; the floor is memcpy of the
        delivered bytes by the same ranks, in the same run.""")
    return lines + table(["ranks", "layout", "tokens:", "dispatch, us:", "combine, us:", "both, us:",
                          "dispatch of floor:", "combine of floor:"], rows)


# The runs beside another library.
COMPARED = ["ll-rank-major-windows", "ll-rank-major-windows-few-tokens", "ll-rank-major-fp8", "ll-expert-major",
            "ll-expert-major-few-tokens", "ll-expert-major-sums", "ll-fp8"]


def details_table(runs, machine):
    rows = []
    for name in COMPARED:
        run = runs.get(f"{name}-{machine}")
        for row in run.rows() if run else ():
            rows.append((describe(run), row.case["tokens"], row.operation, results.library_name(row.library),
                         us(row.value("time_us")), us(row.value("time_us", "p99")), us(row.period),
                         us(row.value("kernel_us")), us(row.value("host_us")), us(row.value("host_us", "min")),
                         us(row.floor)))
    return ["### Times", "", *wrap("Medians in us; \"host\" is the call itself while the GPU is idle."),
            *table(["case", "tokens:", "operation", "library", "launch to end:", "p99:", "period:", "kernel:", "host:",
                    "host, least:", "floor:"], rows)]


def describe(run):
    common = run.common
    words = [common["layout"]]
    words += ["windows"] if common["windows"] else []
    words += ["sender's sums"] if common.get("sums") == "sender" else []
    words += [common["recipe"]] if common["recipe"] != "none" else []
    return ", ".join(words)


# The sweeps: what a column holds, its heading, and the run's name.
SWEEPS = [("tokens", "tokens", "ll-tokens"), ("tokens", "tokens", "ll-expert-major-tokens"),
          ("hidden", "hidden size", "ll-hidden"), ("topk", "top-k", "ll-topk"), ("experts", "experts", "ll-experts"),
          ("max_num_sms", "SMs at most", "ll-sms"), ("max_num_sms", "SMs at most", "ll-expert-major-sms")]


def sweep_tables(runs, machine):
    lines = []
    for key, heading, name in SWEEPS:
        run = runs.get(f"{name}-{machine}")
        if run is None:
            continue
        has_bound, rows = key != "max_num_sms", []
        for case in run.cases():
            cells = [run.setting(case, key)]
            for operation in ("dispatch", "combine"):
                row = results.Row(run, case, case["libraries"][0], operation)
                cells += [us(row.period), us(row.floor)]
                if has_bound:
                    cells.append(us(row.bound) + (" (over)" if row.period > row.bound else ""))
            rows.append(cells + [us(results.Row(run, case, case["libraries"][0], "pair").period)])
        others = "" if key == "tokens" else f", {run.cases()[0]['tokens']} tokens"
        beside = ["floor:", "1.35 floors + 6:"] if has_bound else ["floor:"]
        headings = [f"{heading}:", "dispatch:", *beside, "combine:", *beside, "both:"]
        lines += [f"### By {heading}: {describe(run)}{others}", "", *table(headings, rows)]
    return lines


def pictures(runs, machine):
    return [line for plot in results.plots(runs) if plot.machine == machine and plot.mode == "ll"
            for line in (f"![{plot.title}]({plot.file})", "")]


def skew_table(runs, machine):
    rows = []
    for run in runs.values():
        if run.name.endswith("-" + machine) and run.common["routing"] != "uniform" and not run.is_high_throughput:
            rows += [(run.common["routing"], describe(run), row.operation, results.library_name(row.library),
                      us(row.period), us(row.floor)) for row in run.rows()]
    return ["### Skewed routing", "", *wrap("The floor is that of the rank with most bytes."), *table(
        ["routing", "case", "operation", "library", "period:", "floor:"], rows)] if rows else []


def overlap_table(runs, machine):
    rows = []
    for run in runs.values():
        for row in run.rows(("dispatch", "combine")) if run.name.endswith("-" + machine) else ():
            overlap = row.timing.get("overlap")
            if overlap:
                rows.append((describe(run), row.case["tokens"], row.operation, results.library_name(row.library),
                             us(overlap["product_alone_us"]["median"]), us(overlap["product_between_us"]["median"]),
                             f"{overlap['loss'] * 100:.1f} %", us(overlap["send_us"]["median"]),
                             us(overlap["complete_us"]["median"])))
    text = "4096 x 4096 x 4096 in BF16 on the same stream between `send_only` and `ncclEpComplete`; medians in us."
    return ["### A matrix product between the halves", "", *wrap(text), *table(
        ["case", "tokens:", "operation", "library", "product alone:", "between:", "loss:", "send half:",
         "receive half:"], rows)] if rows else []


def start_up_table(runs, machine):
    rows = []
    for name in ("ll-rank-major-windows", "ll-expert-major"):
        run = runs.get(f"{name}-{machine}")
        for library in run.cases()[0]["libraries"] if run else ():
            start = library.get("start_up_ms")
            if start:
                memory = library["symmetric_bytes"] + library["local_bytes"]
                steps = [f"{start[key]:.0f}" for key in ("communicator", "first_window", "group", "handle")]
                rows.append((describe(run), results.library_name(library), *steps,
                             f"{memory / 2**20:.1f}" if memory else "-"))
    text = """Milliseconds for NCCL's communicator and its first window, then for the group and the first handle; MiB
        that the library holds a rank, as far as it says."""
    return ["### Start-up and memory", "", *wrap(text), *table(
        ["case", "library", "communicator:", "window:", "group:", "handle:", "MiB:"], rows)] if rows else []


def performance(runs):
    lines = []
    for machine in results.machines(runs):
        run = next(run for name, run in runs.items() if name.endswith("-" + machine))
        lines += [f"## {run.ranks} ranks: {run.machine['gpu'].split(';')[0]}", ""]
        lines += wrap(f"""{run.machine['gpu'].split('; ')[1]}; {run.machine['cpu']}. Unless a table says otherwise:
            {shape(run)}, BF16, uniform routing.""")
        if any(name.startswith("ll-") and name.endswith("-" + machine) for name in runs):
            for part in (details_table, pictures, sweep_tables, skew_table, overlap_table, start_up_table):
                lines += part(runs, machine)
        lines += ht_tables.performance(runs, machine)
    cpu = cpu_table(runs) + ht_tables.cpu_table(runs)
    return lines + (["## CPU", ""] + cpu if cpu else [])


DOCUMENTS = {"README.md": readme, "docs/performance.md": performance}
MARKED = re.compile(r"(<!-- tables begin -->\n).*?(<!-- tables end -->)", re.DOTALL)


def take(folder):
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        document = json.loads(path.read_text(), parse_float=lambda text: round(float(text), 3))
        document["machine"].pop("host", None)
        document["machine"]["system"] = document["machine"]["system"].split()[0]
        document["command"] = re.sub(r"[^ ]*/([^ /]+)", r"\1", document["command"])
        (results.FOLDER / path.name).write_text(json.dumps(document, indent=1) + "\n")
        print(f"took {path.name}")


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--take"] and len(arguments) == 2:
        take(arguments[1])
    elif arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    runs, stale = results.load(), []
    for name, part in DOCUMENTS.items():
        path = results.ROOT / name
        text = path.read_text()
        fresh = MARKED.sub(lambda match: match[1] + "\n".join([""] + part(runs)) + "\n" + match[2], text)
        if fresh != text and arguments == ["--check"]:
            stale.append(name)
        elif fresh != text:
            path.write_text(fresh)
    for plot in results.plots(runs) if arguments == ["--check"] else ():
        path = results.ROOT / "docs" / plot.file
        if not path.is_file() or plot.digest() not in path.read_text():
            stale.append(f"docs/{plot.file}")
    if stale:
        sys.exit(f"{', '.join(stale)}: not as bench/results has it; ./dev tables mends that")


if __name__ == "__main__":
    main()
