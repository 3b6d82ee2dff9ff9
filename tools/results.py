# SPDX-License-Identifier: Apache-2.0
"""The committed results of ep_bench, bench/results/*.json, as tables and plots read them."""
import hashlib
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "bench" / "results"


class Row:
    """One operation of one library in one case, beside its floor. Times are medians in us, None if not measured."""

    def __init__(self, run, case, library, operation):
        self.run, self.case, self.library, self.operation = run, case, library, operation
        self.timing = library[operation]
        self.floor_timing = case["floor"][operation]

    def value(self, metric, statistic="median"):
        spread = self.timing.get(metric)
        return spread[statistic] if spread else None

    @property
    def period(self):
        return self.value("device_us")

    @property
    def compared(self):
        """What is compared with the floor: the device's time where there is one."""
        return self.period if self.period is not None else self.value("time_us")

    @property
    def floor(self):
        return (self.floor_timing.get("device_us") or self.floor_timing["time_us"])["median"]

    @property
    def bound(self):
        """What an operation may take anywhere: 1.35 floors and 6 us."""
        return 1.35 * self.floor + 6


class Run:
    """One file: ep_bench's settings and results."""

    def __init__(self, name, document):
        self.name, self.document = name, document
        self.common = document["case"]
        self.ranks = self.common["ranks"]
        self.machine = document["machine"]
        self.is_high_throughput = self.common["mode"] == "ht"

    def cases(self):
        return self.document["results"]

    def setting(self, case, key):
        """A case's own value, or the one that all cases share; max_num_sms 0: the library chooses."""
        return case.get(key, self.common.get(key, 0))

    def rows(self, operations=("dispatch", "combine", "pair"), own_only=False, **settings):
        for case in self.document["results"]:
            if any(self.setting(case, key) != value for key, value in settings.items()):
                continue
            for operation in operations:
                for library in case["libraries"][: 1 if own_only else None]:
                    yield Row(self, case, library, operation)

    def row(self, operation, is_own, **settings):
        """The only such row, or None."""
        for row in self.rows((operation,), **settings):
            if (row.library["name"] == "crossdock") == is_own:
                return row
        return None


def library_name(library):
    if library["name"] == "crossdock":
        return "Crossdock"
    version = library["version"]
    digits = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return f"NCCL EP {digits}" if library["name"].startswith("libnccl_ep") else f"{library['name']} {digits}"


def load():
    """All runs by name."""
    return {path.stem: Run(path.stem, json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))}


def machines(runs):
    """The GPU machines that were measured, as the ends of the runs' names: 4xh200, ..."""
    return sorted({name.rsplit("-", 1)[1] for name in runs if name.startswith(("ll-", "ht-"))})


class Plot:
    """Times of Crossdock against one setting: a panel a run, a curve an operation."""

    def __init__(self, mode, file, machine, title, x_label, has_bound, panels):
        self.mode, self.file, self.machine, self.title, self.x_label = mode, file, machine, title, x_label
        self.y_label = "period, us" if mode == "ll" else "launch to end, us"
        self.has_bound = has_bound  # whether 1.35 floors + 6 us belong into it
        self.panels = panels  # (title, {operation: [(x, time, floor, bound), ...]})

    def digest(self):
        """What a picture is marked with, so that one of other results can be told."""
        return hashlib.sha256(json.dumps(self.panels).encode()).hexdigest()


# Mode, kind, title, x axis, setting, whether the bound belongs into it, runs with their panels' titles.
PLOTS = [("ll", "tokens", "Time against tokens a rank", "tokens a rank", "tokens", True,
          {"ll-tokens": "rank-major in windows", "ll-expert-major-tokens": "expert-major"}),
         ("ll", "sms", "Time against SMs", "SMs at most", "max_num_sms", False,
          {"ll-sms": "rank-major in windows, 128 tokens", "ll-expert-major-sms": "expert-major, 128 tokens"}),
         ("ht", "tokens", "High throughput: time against tokens a rank", "tokens a rank", "tokens", False,
          {"ht-tokens": "flat in windows", "ht-expert-major-tokens": "expert-major in windows"}),
         ("ht", "sms", "High throughput: time against SMs", "SMs at most", "max_num_sms", False,
          {"ht-sms": "flat in windows, 4096 tokens", "ht-expert-major-sms": "expert-major in windows, 4096 tokens"})]


def plots(runs):
    """All plots that there are results for."""
    found = []
    for mode, kind, title, x_label, key, has_bound, names in PLOTS:
        for machine in machines(runs):
            present = [(text, runs[f"{name}-{machine}"]) for name, text in names.items() if f"{name}-{machine}" in runs]
            panels = [(text, {operation: [(run.setting(row.case, key),
                                           row.period if mode == "ll" else row.value("time_us"),
                                           row.floor, round(row.bound, 3))
                                          for row in run.rows((operation,), own_only=True)]
                              for operation in ("dispatch", "combine")})
                      for text, run in present]
            if panels:
                found.append(Plot(mode, f"{mode}_{kind}_{machine}.svg", machine, title, x_label, has_bound, panels))
    return found
