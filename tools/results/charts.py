# SPDX-License-Identifier: Apache-2.0
"""The pictures that the documents show of the committed measurements, as the text of SVG files."""

import statistics

from tools.results import data
from tools.results.svg import Bars, Chart, Curve, Panel

# Mode, file, title, x axis, setting, runs with their panels' titles.
SWEEPS = [
    (
        "ll",
        "tokens",
        "Low latency: steady-state time against tokens",
        "tokens per rank",
        "tokens",
        {"ll-tokens": "rank-major, windows", "ll-expert-major-tokens": "expert-major"},
    ),
    (
        "ll",
        "sms",
        "Low latency: steady-state time against SMs",
        "max_num_sms",
        "max_num_sms",
        {"ll-sms": "rank-major, windows, 128 tokens", "ll-expert-major-sms": "expert-major, 128 tokens"},
    ),
    (
        "ht",
        "tokens",
        "High throughput: latency against tokens",
        "tokens per rank",
        "tokens",
        {"ht-tokens": "flat, windows", "ht-expert-major-tokens": "expert-major, windows"},
    ),
    (
        "ht",
        "sms",
        "High throughput: latency against SMs",
        "max_num_sms",
        "max_num_sms",
        {"ht-sms": "flat, windows, 4096 tokens", "ht-expert-major-sms": "expert-major, windows, 4096 tokens"},
    ),
]


def sweep_panel(run, mode, title, x_label, setting):
    curves = []
    for colour, operation in enumerate(("dispatch", "combine")):
        rows = [(case.settings[setting], case.row(operation)) for case in run.cases]
        times = [(x, row.steady_state if mode == "ll" else row.value("time_us")) for x, row in rows]
        curves.append(Curve(operation, times, colour))
        curves.append(Curve(f"{operation}: lower bound", [(x, row.bound) for x, row in rows], colour, "dashed"))
    return Panel(
        title,
        x_label,
        "steady state, us" if mode == "ll" else "latency, us",
        curves,
        x_ticks=sorted({case.settings[setting] for case in run.cases}),
        y_from=1 if mode == "ll" else None,
    )


def sweeps():
    """By file name, in the documents' order: the machine, and the chart."""
    found = {}
    for machine in data.machines():
        runs = data.load(machine)
        for mode, kind, title, x_label, setting, names in SWEEPS:
            panels = [
                sweep_panel(runs[name], mode, text, x_label, setting) for name, text in names.items() if name in runs
            ]
            if panels:
                found[f"{mode}_{kind}_{machine}.svg"] = Chart(title, [panels])
    return found


def gin():
    """Puts of the network layer over TCP between two processes, beside UCX and a socket. Those in shared memory are
    faster today than in these runs (docs/history/network.md)."""
    rows = [
        line
        for line in data.lines_of(data.FOLDER / "gin.jsonl")
        if line["run"] == "cpu" and line.get("transport") == "tcp"
    ]
    labels = {"crossdock": "plugin", "hosts": "hosts", "ucx_perftest": "ucx_perftest", "tcp socket": "socket"}

    def panel(transport, metric, y_label):
        curves = []
        for colour, (way, label) in enumerate(labels.items()):
            points = [
                (row["bytes"], statistics.median(row[metric]))
                for row in rows
                if (row["transport"], row["way"]) == (transport, way)
            ]
            curves += [Curve(label, points, colour)] if points else []
        return Panel(transport, "bytes per put", y_label, curves)

    metrics = (("half_round_trip_us", "half a round trip, us"), ("gigabytes_per_s", "stream, GB/s"))
    return Chart(
        "Puts between two processes",
        [
            [panel(transport, *metric) for metric in metrics]
            for transport in dict.fromkeys(row["transport"] for row in rows)
        ],
        share_y=False,
    )


def vllm_layers():
    """Of traces that tests/engines/vllm_e2e takes: a MoE layer's time on the GPU in a decode step."""
    rows = [(line["backend"], line["us"]) for line in data.lines_of(data.FOLDER / "vllm_layers.jsonl")]
    return Bars("A MoE layer in vLLM, by part", "µs per layer, waiting for the other rank included", rows)


def files():
    """Every picture by its name in docs."""
    charts = {**sweeps(), "gin_cpu.svg": gin(), "vllm_layers.svg": vllm_layers()}
    return {name: chart.text() for name, chart in charts.items()}
