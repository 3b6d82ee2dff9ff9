# SPDX-License-Identifier: Apache-2.0
"""The tables of README.md and docs/performance.md, and the pictures in docs, from bench/results.

tables                rewrites what stands between the documents' marks, and the pictures
tables --check        fails, and names the file, if that would change one
tables --take FOLDER  first takes over FOLDER's JSON files, as --json of ep_bench and deep_ep_bench.py writes them
"""

import re
import sys

from tools.results import charts, data, deep_ep
from tools.results.markdown import replaced, table, us, wrap

# README's six rows: text, run, tokens, operation, metric.
README_ROWS = [
    ("LL dispatch + combine, rank-major, windows, 128 tokens", "ll-rank-major-windows", 128, "pair", "device_us"),
    ("LL dispatch + combine, expert-major, 128 tokens", "ll-expert-major", 128, "pair", "device_us"),
    ("LL dispatch + combine, rank-major, windows, 1 token", "ll-rank-major-windows-few-tokens", 1, "pair", "device_us"),
    ("HT dispatch, flat, windows, 4096 tokens, 24 SMs", "ht-flat-windows-24-sms", 4096, "dispatch", "time_us"),
    ("HT combine, flat, windows, 4096 tokens, 24 SMs", "ht-flat-windows-24-sms", 4096, "combine", "time_us"),
    ("HT combine, expert-major, staged, 4096 tokens", "ht-expert-major", 4096, "combine", "time_us"),
]

# The rows of docs/performance.md: text, run.
LL_TOKENS = (1, 8, 64, 128)
LL_ROWS = [
    ("rank-major, windows", "ll-rank-major-windows"),
    ("rank-major, windows", "ll-rank-major-windows-few-tokens"),
    ("rank-major, windows, FP8", "ll-rank-major-fp8"),
    ("expert-major", "ll-expert-major"),
    ("expert-major", "ll-expert-major-few-tokens"),
    ("expert-major, sender's sums", "ll-expert-major-sums"),
    ("expert-major, FP8", "ll-fp8"),
    ("expert-major, as halves", "ll-expert-major-halves"),
    ("expert-major, FP8, as halves", "ll-fp8-halves"),
]
HT_ROWS = [
    ("flat, windows", "ht-flat-windows-8-sms"),
    ("flat, windows", "ht-flat-windows-16-sms"),
    ("flat, windows", "ht-flat-windows-24-sms"),
    ("flat, windows, FP8 rows", "ht-flat-fp8-windows"),
    ("flat, staged", "ht-flat"),
    ("expert-major, windows", "ht-expert-major-windows-24-sms"),
    ("expert-major, staged", "ht-expert-major"),
]
# Text, run, tokens.
ONE_GPU_ROWS = [
    ("rank-major, windows", "ll-rank-major-windows", LL_TOKENS),
    ("expert-major", "ll-expert-major", (1, 128)),
    ("expert-major, FP8", "ll-fp8", (1, 128)),
    ("expert-major, as halves", "ll-expert-major-halves", (1, 128)),
    ("rank-major, windows, 4 ranks", "ll-rank-major-windows-4-ranks", LL_TOKENS),
]
ONE_GPU_UPDATES = [("all SMs", "ht-flat-windows"), ("8 SMs", "ht-flat-windows-8-sms")]
CPU_ROWS = {
    "ll": [
        ("8 processes, expert-major", "processes"),
        ("8 processes, rank-major", "processes-rank-major"),
        ("2 processes, expert-major", "processes-two-ranks"),
    ],
    "ht": [
        ("4 processes, flat, windows", "ht-processes-windows"),
        ("4 processes, flat, staged", "ht-processes"),
        ("4 processes, expert-major, staged", "ht-processes-expert-major"),
    ],
}


def gpus(runs):
    """Such as "4 x H200"; and the software."""
    run = next(iter(runs.values()))
    model, software = run.machine["gpu"].split("; ")
    model = model.split(",")[0].removeprefix("NVIDIA ").split()[0]
    return f"{run.ranks} x {model}", re.sub(r" \(driver [\d.]+\)", "", software)


def other_library(runs):
    """Such as ("NCCL EP", "0.2.0")."""
    names = (
        data.library_name(library)
        for run in runs.values()
        for case in run.cases
        for library in case.libraries.values()
        if library["library"] != "crossdock"
    )
    return next(names, "another library").rsplit(" ", 1)


def provenance(runs):
    """Such as "2026-11-22 (ce5e053, 4ad2cbf)"."""
    by_date = {}
    for run in runs:
        commits = by_date.setdefault(run.date, [])
        if run.commit not in commits:
            commits.append(run.commit)
    return ", ".join(f"{date} ({', '.join(commits)})" for date, commits in sorted(by_date.items()))


def older_peers(runs, peer):
    """Such as "NCCL EP: 2026-11-22", or nothing if its figures are of the same runs."""
    return ", ".join(f"{peer}: {date}" for date in sorted({run.peer_date for run in runs if run.peer_date != run.date}))


def shape(run):
    hidden, topk, experts = (run.cases[0].settings[key] for key in ("hidden", "topk", "experts"))
    return f"hidden {hidden}, top-{topk} of {experts} experts"


def newest_of_each_size():
    """The runs of several GPUs: for each number of them, of the machine that was measured last."""
    newest = {}
    for machine in data.machines():
        size, runs = machine.split("x")[0], data.load(machine)
        date = max(run.date for run in runs.values())
        if machine != "cpu" and size != "1" and date >= newest.get(size, ("",))[0]:
            newest[size] = date, runs
    return [runs for _, runs in newest.values()]


def readme():
    machines = [(gpus(runs), runs) for runs in newest_of_each_size()]
    used = [run for _, name, *_ in README_ROWS for _, runs in machines if (run := runs.get(name))]
    rows = []
    for text, name, tokens, operation, metric in README_ROWS:
        cells = []
        for _, runs in machines:
            cases = runs[name].cases if name in runs else ()
            case = next((case for case in cases if case.settings["tokens"] == tokens), None)
            found = [case and case.row(operation, is_own) for is_own in (True, False)]
            cells += [us(row and row.value(metric)) for row in found]
        rows.append((text, *cells))
    peer, version = other_library(machines[0][1])
    headings = [heading for (model, _), _ in machines for heading in (f"{model}: Crossdock:", f"{peer}:")]
    software = " and ".join(dict.fromkeys(software for (_, software), _ in machines))
    text = f"""Median time in µs, lower is better. {software}, {shape(used[0])}, BF16. LL: steady state (CUDA graph
        replay). HT: latency of one call on an idle stream. {peer} is version {version}."""
    used_of = [(model, [runs[name] for _, name, *_ in README_ROWS if name in runs]) for (model, _), runs in machines]
    dates = " ".join(f"{model}: {dates_of(runs, peer)}" for model, runs in used_of)
    return wrap(text) + wrap(dates) + table(["operation", *headings], rows)


def dates_of(runs, peer):
    """When both libraries ran. Different days are different machines."""
    older = sorted({run.peer_date for run in runs if run.peer_date != run.date})
    if not older:
        return f"both libraries in the same runs of {provenance(runs)}."
    return (
        f"Crossdock in runs of {provenance(runs)}, {peer} in runs of {', '.join(older)}, so compare these two columns "
        "with care."
    )


def usual():
    """Software and shape that tables have unless they say otherwise: those of the first machine."""
    runs = data.load(data.machines()[0])
    return f"{gpus(runs)[1]}, {' '.join(other_library(runs))}; {shape(next(iter(runs.values())))}, BF16"


def heading(title, used, machine):
    """A table's title, its date and commits, and what is not usual."""
    unusual = [text for text in (machine, shape(used[0])) if text not in usual()]
    older = older_peers(used, other_library({run.name: run for run in used})[0])
    unusual += [older] if older else []
    return [f"### {title}", "", *wrap("; ".join([provenance(used), *unusual]) + ".")]


def comparison(runs, rows, metric, has_sms):
    """A row per case: for each operation both libraries and the lower bound."""
    (peer, _), used, lines = other_library(runs), [], []
    operations = ("dispatch", "combine")
    for text, name in rows:
        run = runs.get(name)
        for case in reversed(run.cases) if run else ():
            if not has_sms and case.settings["tokens"] not in LL_TOKENS:
                continue
            used.append(run)
            cells = [text, case.settings["tokens"]]
            cells += [case.settings["max_num_sms"] or run.common.get("max_num_sms") or "auto"] if has_sms else []
            if has_sms:
                cells += [us(row and row.value("time_us")) for row in (case.row("update"), case.row("update", False))]
            for operation in operations:
                own, other = case.row(operation), case.row(operation, False)
                cells += [us(own.value(metric)), us(other and other.value(metric)), us(own.bound)]
            if not has_sms:
                own, other = case.row("pair"), case.row("pair", False)
                cells += [us(own.value(metric)), us(other and other.value(metric))]
            lines.append(cells)
    headings = ["case", "tokens:"] + (["SMs:", "update:", f"{peer}:"] if has_sms else [])
    for operation in operations:
        headings += [f"{operation}:", f"{peer}:", "bound:"]
    return used, table(headings + ([] if has_sms else ["both:", f"{peer}:"]), lines)


def gpu_tables(machine):
    runs, lines = data.load(machine), []
    model, software = gpus(runs)
    software += ", " + " ".join(other_library(runs))
    for mode, title, rows, metric in (
        ("ll", "low latency", LL_ROWS, "device_us"),
        ("ht", "high throughput", HT_ROWS, "time_us"),
    ):
        used, body = comparison(runs, rows, metric, mode == "ht")
        if used:
            lines += [*heading(f"{model}, {title}", used, software), *body]
            lines += [
                part
                for file, chart in charts.sweeps().items()
                if file.startswith(f"{mode}_") and file.endswith(f"_{machine}.svg")
                for part in (f"![{chart.title}, {model}]({file})", "")
            ]
    return lines


def one_gpu_tables(machine):
    """The kernels' own time on one GPU, beside an earlier build's, if it was measured with them, and bare kernels that
    move the same rows."""
    runs, lines, used = data.load(machine), [], []
    model, software = gpus(runs)
    operations = ("dispatch", "combine", "pair")
    before = {name for run in runs.values() for case in run.cases for name in case.libraries} - {"crossdock"}
    for text, name, tokens in ONE_GPU_ROWS:
        for case in runs[name].cases if name in runs else ():
            if case.settings["tokens"] not in tokens:
                continue
            used.append(runs[name])
            cells = [text, case.settings["tokens"]]
            has_bare = runs[name].ranks == 1 and not runs[name].common["recipe"].startswith("fp8")
            for operation in operations:
                row, earlier = case.row(operation), case.row(operation, False)
                cells += [us(earlier and earlier.value("device_us"))] if before else []
                cells += [us(row.value("device_us")), us(row.bound if has_bare else None)]
            lines.append(cells)
    updates = []
    for text, name in ONE_GPU_UPDATES:
        for case in runs[name].cases if name in runs else ():
            used.append(runs[name])
            own, earlier = case.row("update"), case.row("update", False)
            then = f" (before: {us(earlier.value('device_us'))})" if earlier else ""
            updates.append(f"{us(own.value('device_us'))} with {text}{then}")
    headings = [
        heading
        for operation in ("dispatch:", "combine:", "both:")
        for heading in (*(["before:"] if before else []), operation, "bare:")
    ]
    builds = (name.removesuffix(".so") for name in sorted(before))
    earlier = "".join(f"Before: an earlier build ({name}), in the same run. " for name in builds)
    text = f"""All ranks are on one GPU, so nothing crosses a link. There is one rank, except in the rows "4 ranks".
        "As halves": split operations. The columns "dispatch", "combine" and "both" are of this build. Bare: simple
        kernels that move the same rows, counts and flags without checks. They are no lower bound.
        {earlier}HT update, steady state, 4096 tokens: {", ".join(updates)}."""
    return [
        *heading(f"{model}: the kernels' own time", used, software),
        *wrap(text),
        *table(["LL", "tokens:", *headings], lines),
    ]


def cpu_tables():
    runs, lines = data.load("cpu"), []
    for mode, title in (("ll", "low latency"), ("ht", "high throughput")):
        used, rows = [], []
        operations = data.OPERATIONS if mode == "ht" else data.OPERATIONS[1:]
        for text, name in CPU_ROWS[mode]:
            for case in runs[name].cases if name in runs else ():
                used.append(runs[name])
                timed = {operation: case.row(operation) for operation in operations}
                cells = [us(row.compared) for row in timed.values()]
                cells.extend(us(timed[operation].bound) for operation in ("dispatch", "combine"))
                rows.append((text, case.settings["tokens"], *cells))
        machine = used[0].machine
        lines += [
            *heading(f"CPU, {title}", used, f"{machine['cpu']}, {machine['cpus']} cores"),
            *table(
                [
                    "case",
                    "tokens:",
                    *(f"{'both' if operation == 'pair' else operation}:" for operation in operations),
                    "dispatch bound:",
                    "combine bound:",
                ],
                rows,
            ),
        ]
    return lines


def performance():
    lines = wrap(f"Medians in µs. LL on GPUs: steady-state time; HT and CPUs: latency. {usual()}.")
    for machine in data.machines():
        lines += (
            cpu_tables()
            if machine == "cpu"
            else one_gpu_tables(machine)
            if machine.startswith("1x")
            else gpu_tables(machine)
        )
    return lines


def main(arguments):
    if arguments[:1] == ["--take"] and len(arguments) == 2:
        data.take(arguments[1])
    elif arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    fresh = {f"docs/{name}": text for name, text in charts.files().items()}
    for name, lines, of_deep_ep in (
        ("README.md", readme(), deep_ep.readme()),
        ("docs/performance.md", performance(), deep_ep.performance()),
    ):
        text = replaced((data.ROOT / name).read_text(), "tables", lines)
        fresh[name] = replaced(text, "deep_ep", of_deep_ep)
    stale = [
        name
        for name, text in fresh.items()
        if not (data.ROOT / name).exists() or (data.ROOT / name).read_text() != text
    ]
    if arguments == ["--check"] and stale:
        sys.exit(f"{', '.join(stale)}: not as bench/results has it; ./dev tables updates it")
    for name in stale:
        (data.ROOT / name).write_text(fresh[name])
        print(f"wrote {name}")
