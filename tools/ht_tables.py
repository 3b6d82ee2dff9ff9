# SPDX-License-Identifier: Apache-2.0
"""High throughput's part of the documents' tables."""
import re

import results
from table_parts import KERNEL, LAUNCH, METRICS, PERIOD, shape, table, us, wrap

# Of a library, whatever the operation.
MEMORY, START_UP = "MiB a rank", "ms"

# What is aimed at, by number of ranks: text, run, operation, by what it is measured, us.
GOALS = {
    4: [
        ("flat in windows, dispatch", "ht-flat-windows-16-sms", "dispatch", LAUNCH, 475),
        ("flat in windows, combine", "ht-flat-windows-24-sms", "combine", LAUNCH, 490),
        ("flat in windows, both", "ht-flat-windows", "pair", PERIOD, 950),
        ("flat in windows, dispatch", "ht-flat-windows-8-sms", "dispatch", LAUNCH, 520),
        ("flat in windows, combine", "ht-flat-windows-8-sms", "combine", LAUNCH, 600),
        ("expert-major in windows, dispatch", "ht-expert-major-windows-24-sms", "dispatch", LAUNCH, 510),
        ("expert-major in windows, combine", "ht-expert-major-windows-24-sms", "combine", LAUNCH, 510),
        ("flat, staged, dispatch", "ht-flat", "dispatch", LAUNCH, 540),
        ("flat, staged, combine", "ht-flat", "combine", LAUNCH, 550),
        ("flat in windows, FP8 with scales, dispatch", "ht-flat-fp8-windows", "dispatch", LAUNCH, 255),
        ("flat in windows, dispatch", "ht-flat-windows-8192", "dispatch", LAUNCH, 945),
        ("flat in windows, combine", "ht-flat-windows-8192", "combine", LAUNCH, 960),
        ("update of the routing", "ht-flat-windows", "update", KERNEL, 20),
        ("flat, staged, memory", "ht-flat", "dispatch", MEMORY, 240),
        ("flat in windows, memory", "ht-flat-windows", "dispatch", MEMORY, 40),
        ("group, handle and first operations", "ht-flat-windows-16-sms", "dispatch", START_UP, 300),
    ],
    8: [
        ("flat in windows, dispatch", "ht-flat-windows-16-sms", "dispatch", LAUNCH, 840),
        ("flat in windows, combine", "ht-flat-windows-16-sms", "combine", LAUNCH, 840),
        ("flat in windows, FP8 with scales, dispatch", "ht-flat-fp8-windows", "dispatch", LAUNCH, 440),
        ("update of the routing", "ht-flat-windows-16-sms", "update", KERNEL, 25),
    ],
}
OPERATIONS = ("update", "dispatch", "combine", "pair")

# The runs beside another library, and the sweeps: setting, heading, run.
COMPARED = ["ht-flat-windows-16-sms", "ht-flat-windows-24-sms", "ht-flat-windows-32-sms", "ht-flat-windows-8-sms",
            "ht-flat-windows", "ht-flat", "ht-expert-major-windows-24-sms", "ht-expert-major", "ht-flat-fp8-windows",
            "ht-flat-windows-8192", "ht-flat-backward", "ht-zipf"]
SWEEPS = [("tokens", "tokens", "ht-tokens"), ("tokens", "tokens", "ht-expert-major-tokens"),
          ("max_num_sms", "SMs at most", "ht-sms"), ("max_num_sms", "SMs at most", "ht-expert-major-sms"),
          ("hidden", "hidden size", "ht-hidden"), ("topk", "top-k", "ht-topk")]


def describe(run):
    common = run.common
    words = [common["layout"]]
    words += ["windows"] if common["windows"] else ["staged"]
    words += ["FP8, scales"] if common["recipe"] == "fwd" else []
    words += ["backward"] if common["pass"] == "backward" else []
    words += ["eager"] if common["eager"] else []
    words += [common["routing"]] if common["routing"] != "uniform" else []
    return ", ".join(words)


def sms(run, case):
    return run.setting(case, "max_num_sms") or "default"


def part(row):
    """What of a time the floor is."""
    time = row.value("time_us")
    return f"{row.floor / time * 100:.0f} %" if time else "-"


def readme(runs):
    lines = []
    for machine in results.machines(runs):
        run = runs.get(f"ht-flat-windows-16-sms-{machine}")
        if run is None or run.ranks not in GOALS:
            continue
        model = run.machine["gpu"].split(",")[0]
        nccl = re.search(r"NCCL [0-9.]+", run.machine["gpu"]).group()
        lines += wrap(f"""High throughput on {run.ranks} GPUs of one host ({model}), {shape(run)}, BF16 unless said
            otherwise, uniform routing, {nccl}; medians in us, both libraries in one run with the same bound of
            SMs. Memory is what a library says that it holds, or else what the GPU has less since it was made.""")
        lines += goal_table(runs, machine, GOALS[run.ranks])
    return lines


def goal_table(runs, machine, goals):
    rows, other_name = [], "another library"
    for text, name, operation, by, goal in goals:
        run = runs.get(f"{name}-{machine}")
        own, other = (run and run.row(operation, is_own) for is_own in (True, False))
        if not own:
            continue
        if other:
            other_name = results.library_name(other.library)
        rows.append((text, own.case["tokens"], sms(run, own.case), by, f"≤ {goal}",
                     *(us(row and measured(row, by)) for row in (own, other)), us(own.floor if by in METRICS else None)))
    return table(["work", "tokens:", "SMs:", "by", "goal:", "Crossdock:", f"{other_name}:", "floor:"], rows)


def measured(row, by):
    library = row.library
    if by == MEMORY:  # what it says, or else what the GPU has less since it was made
        memory = library["symmetric_bytes"] + library["local_bytes"] or library.get("device_bytes", 0)
        return memory / 2**20 if memory else None
    if by == START_UP:
        return sum(library["start_up_ms"][key] for key in ("group", "handle", "first_operations"))
    return row.value(METRICS[by])


def performance(runs, machine):
    if not any(name.startswith("ht-") and name.endswith("-" + machine) for name in runs):
        return []
    lines = []
    for each in (details_table, pictures, sweep_tables, start_up_table):
        lines += each(runs, machine)
    return lines


def details_table(runs, machine):
    rows = []
    for name in COMPARED:
        run = runs.get(f"{name}-{machine}")
        for row in run.rows(OPERATIONS) if run else ():
            rows.append((describe(run), row.case["tokens"], sms(run, row.case), row.operation,
                         results.library_name(row.library), us(row.value("time_us")), us(row.value("time_us", "p99")),
                         us(row.period), us(row.value("kernel_us")), us(row.value("host_us")), us(row.floor),
                         part(row)))
    text = """Medians in us; "part" is the floor's of launch to end. An update of another library has no period: it is
        not repeated without a dispatch in between."""
    return ["### High throughput: times", "", *wrap(text), *table(
        ["case", "tokens:", "SMs:", "operation", "library", "launch to end:", "p99:", "period:", "kernels:", "host:",
         "floor:", "part:"], rows)] if rows else []


def pictures(runs, machine):
    return [line for plot in results.plots(runs) if plot.machine == machine and plot.mode == "ht"
            for line in (f"![{plot.title}]({plot.file})", "")]


def sweep_tables(runs, machine):
    lines = []
    for key, heading, name in SWEEPS:
        run = runs.get(f"{name}-{machine}")
        if run is None:
            continue
        rows = []
        for case in run.cases():
            update, dispatch, combine, pair = (results.Row(run, case, case["libraries"][0], operation)
                                               for operation in OPERATIONS)
            cells = [run.setting(case, key), us(update.value("time_us"))]
            for row in (dispatch, combine):
                cells += [us(row.value("time_us")), us(row.floor), part(row)]
            rows.append(cells + [us(pair.value("time_us"))])
        others = "" if key == "tokens" else f", {run.cases()[0]['tokens']} tokens"
        lines += [f"### High throughput by {heading}: {describe(run)}{others}", "", *wrap("Launch to end, us."), *table(
            [f"{heading}:", "update:", "dispatch:", "floor:", "part:", "combine:", "floor:", "part:", "both:"], rows)]
    return lines


def start_up_table(runs, machine):
    rows = []
    for name in COMPARED:
        run = runs.get(f"{name}-{machine}")
        for library in run.cases()[0]["libraries"] if run else ():
            start = library["start_up_ms"]
            steps = [f"{start[key]:.0f}" for key in ("group", "handle", "first_operations")]
            says = library["symmetric_bytes"] + library["local_bytes"]
            memory = [f"{value / 2**20:.1f}" if value else "-" for value in (says, library.get("device_bytes", 0))]
            rows.append((describe(run), run.cases()[0]["tokens"], results.library_name(library), *steps, *memory))
    text = """Milliseconds for the group, the first handle, and the first update, dispatch and combine; MiB a rank that
        the library says it holds, and that the GPU has less after these three."""
    return ["### High throughput: start-up and memory", "", *wrap(text), *table(
        ["case", "tokens:", "library", "group:", "handle:", "first operations:", "MiB:", "MiB of the GPU:"],
        rows)] if rows else []


def cpu_table(runs):
    cpu = sorted((run for name, run in runs.items() if name.startswith("cpu-") and run.is_high_throughput),
                 key=lambda run: (-run.ranks, run.common["layout"], run.common["windows"], run.common["world"]))
    rows = []
    for run in cpu:
        for case in run.cases():
            timed = {row.operation: row for row in run.rows(OPERATIONS, own_only=True, tokens=case["tokens"])}
            rows.append((f"{run.ranks} {run.common['world']}", describe(run), case["tokens"],
                         *(f"{timed[operation].compared / 1000:.1f}" for operation in OPERATIONS),
                         *(part(timed[operation]) for operation in ("dispatch", "combine"))))
    return wrap("High throughput on the same CPU, ms:") + table(
        ["ranks", "case", "tokens:", "update:", "dispatch:", "combine:", "both:", "dispatch of floor:",
         "combine of floor:"], rows) if rows else []
