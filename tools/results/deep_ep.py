# SPDX-License-Identifier: Apache-2.0
"""Crossdock's DeepEP classes beside DeepEP: the tables of README.md and docs/performance.md, from bench/results.

A run of deep_ep.jsonl is LIBRARY-MACHINE, such as crossdock-4xh200: crossdock, before (an earlier commit of it) or
deep_ep. Its lines are operations of cases (bench/deep_ep_names.py). Figures of DeepEP that were measured in another way
have metrics of their own: span_us, from the first kernel's start to the last one's end, and kernel_us.
"""

from tools.results import data
from tools.results.markdown import table, us, wrap

LIBRARIES = {"before": "before", "crossdock": "Crossdock", "deep_ep": "DeepEP"}

# Text, the case's name without tokens or SMs.
FEW = [
    (f"`ElasticBuffer`, {text}", f"elastic-{{}}{form}")
    for text, form in (
        ("compact", ""),
        ("expanded", "-expand"),
        ("expanded, not reduced on the way", "-expand-exact"),
        ("compact, FP8", "-fp8"),
        ("expanded, FP8", "-expand-fp8"),
    )
]
FEW += [("`Buffer`, low latency", "ll-{}"), ("`Buffer`, low latency, FP8", "ll-{}-fp8")]
FEW_TOKENS = (128, 64, 8, 1)
MANY = [
    (f"`ElasticBuffer`, {text}", f"elastic-4096{form}-{{}}sms")
    for text, form in (
        ("compact", ""),
        ("expanded", "-expand"),
        ("expanded, not reduced on the way", "-expand-exact"),
        ("compact, FP8", "-fp8"),
        ("expanded, FP8", "-expand-fp8"),
    )
]
MANY += [("`Buffer`, normal mode", "normal-4096-{}sms"), ("`Buffer`, normal mode, FP8", "normal-4096-fp8-{}sms")]
MANY_SMS = (24, 64)

# README's rows: text, case, operation.
README_ROWS = [
    ("`ElasticBuffer` dispatch + combine, 128 tokens", "elastic-128", "pair"),
    ("`ElasticBuffer` dispatch + combine, 1 token", "elastic-1", "pair"),
    ("`ElasticBuffer` dispatch, 4096 tokens, 24 SMs", "elastic-4096-24sms", "dispatch"),
    ("`ElasticBuffer` combine, 4096 tokens, 24 SMs", "elastic-4096-24sms", "combine"),
    ("`Buffer` low-latency dispatch + combine, 128 tokens, FP8", "ll-128-fp8", "pair"),
]


class Run:
    """One library on one machine."""

    def __init__(self, head):
        self.head, self.times = head, {}

    def add(self, line):
        for metric, value in line.items():
            if metric.endswith("_us"):
                key = line["case"], line["operation"], metric == "eager_us"
                self.times[key] = value[0] if isinstance(value, list) else value

    def time(self, case, operation, is_eager=False):
        return self.times.get((case, operation, is_eager))

    def provenance(self):
        """Such as "2026-11-22 (ce5e053)"."""
        commit = self.head.get("commit")
        return self.head["date"] + (f" ({commit})" if commit else "")


def load():
    """By machine, the most GPUs first, the runs by library."""
    machines = {}
    for line in data.lines_of(data.FOLDER / "deep_ep.jsonl"):
        library, _, machine = line["run"].partition("-")
        if line.get("benchmark") == "deep_ep":
            machines.setdefault(machine, {})[library] = Run(line)
        elif library in machines.get(machine, {}) and "operation" in line:
            machines[machine][library].add(line)
    order = sorted(machines, key=lambda name: -int(name.split("x")[0]))
    return {
        name: {library: machines[name][library] for library in LIBRARIES if library in machines[name]} for name in order
    }


def title(runs):
    """Such as "4 x H200"."""
    head = next(iter(runs.values())).head
    model = head["machine"]["gpu"].split(",")[0].removeprefix("NVIDIA ").split()[0]
    return f"{head['case']['ranks']} x {model}"


def shape(runs):
    case = next(iter(runs.values())).head["case"]
    return f"hidden {case['hidden']}, top-{case['topk']} of {case['experts']} experts, BF16"


def dates(runs):
    """When each library ran, and the notes of its run."""
    texts = []
    for library, run in runs.items():
        version = f" {run.head['library']['version']}" if library == "deep_ep" else ""
        note = run.head.get("note")
        texts.append(f"{LIBRARIES[library]}{version}: {run.provenance()}" + (f", {note}" if note else ""))
    return "; ".join(texts)


def columns(runs):
    """Crossdock's has a column also before it was measured."""
    return [library for library in LIBRARIES if library == "crossdock" or library in runs]


def cells(runs, case, operation, is_eager=False):
    return [us(runs[library].time(case, operation, is_eager)) if library in runs else "-" for library in columns(runs)]


def headings(runs, operation):
    first, *others = columns(runs)
    names = [LIBRARIES[library] for library in (first, *others)]
    return [f"{operation}: {names[0]}:", *(f"{name}:" for name in names[1:])]


def measured(runs, form, numbers):
    """The cases of this form that a library has run, with their number of tokens or SMs."""
    known = {case for run in runs.values() for case, _, _ in run.times}
    return [(number, form.format(number)) for number in numbers if form.format(number) in known]


def operation_table(runs, forms, numbers, unit, operations):
    """A row per case. operations: heading, operation, whether it is eager. No lines if nothing was measured."""
    rows = [
        (text, number, *(cell for _, name, is_eager in operations for cell in cells(runs, case, name, is_eager)))
        for text, form in forms
        for number, case in measured(runs, form, numbers)
    ]
    rows = [row for row in rows if any(cell != "-" for cell in row[2:])]
    names = [heading for text, _, _ in operations for heading in headings(runs, text)]
    return table(["case", f"{unit}:", *names], rows) if rows else []


def machine_tables(runs):
    lines = [f"### {title(runs)}, DeepEP's classes", "", *wrap(f"{dates(runs)}. {shape(runs)}.")]
    parts = [
        (
            "Up to 128 tokens, steady state (CUDA graph replay):",
            FEW,
            FEW_TOKENS,
            "tokens",
            [("dispatch", "dispatch", False), ("combine", "combine", False), ("both", "pair", False)],
        ),
        (
            "A dispatch followed by a combine. With hooks: steady state. Eager: calls from Python, back to back, which "
            "shows the host's cost:",
            FEW,
            FEW_TOKENS,
            "tokens",
            [("with hooks", "pair with hooks", False), ("eager", "pair", True)],
        ),
        (
            "4096 tokens. The host's time is not included, except in a fresh dispatch of `Buffer`:",
            MANY,
            MANY_SMS,
            "SMs",
            [
                ("fresh dispatch", "dispatch", False),
                ("cached dispatch", "cached dispatch", False),
                ("combine", "combine", False),
            ],
        ),
    ]
    for text, *part in parts:
        made = operation_table(runs, *part)
        lines += [*wrap(text), *made] if made else []
    return lines


def performance():
    return [line for runs in load().values() for line in machine_tables(runs)]


def readme():
    """Of the machines on which Crossdock was measured."""
    lines = []
    for runs in load().values():
        if "crossdock" not in runs:
            continue
        shown = {library: run for library, run in runs.items() if library != "before"}
        rows = [(text, *cells(shown, case, operation)) for text, case, operation in README_ROWS]
        names = [LIBRARIES[library] for library in columns(shown)]
        lines += wrap(f"DeepEP's classes on {title(shown)}, µs. {dates(shown)}. {shape(shown)}.")
        lines += table(["operation", *(f"{name}:" for name in names)], rows)
    return lines
