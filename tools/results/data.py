# SPDX-License-Identifier: Apache-2.0
"""The committed measurements, bench/results/*.jsonl.

A file holds the runs of one machine or benchmark; a line is a JSON object. The first line of a run tells its date, the
commit whose tree first held it, command, machine and common settings. Each further line is one measurement, with the
run's name and the settings that are not common. In ep_bench's files a measurement is an operation of a library
("bound": the lower bound) in one case; a distribution is [median, p99, min, max, mean, count]. graph_operations is the
run's where a line with device_us has none. Lines of another library that are older than their run have their own date.
In deep_ep.jsonl runs with "benchmark" are of bench/deep_ep_bench.py (tools/results/deep_ep.py).
"""

import datetime
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "bench" / "results"
STATISTICS = ("median", "p99", "min", "max", "mean", "count")
SETTINGS = ("tokens", "hidden", "experts", "topk", "max_num_sms", "max_recv_tokens")
OPERATIONS = ("update", "dispatch", "combine", "pair")


class Row:
    """One operation of one library in one case, beside its lower bound. Times are medians in us, or None."""

    def __init__(self, library, operation, timing, bound_timing):
        self.library, self.operation, self.timing, self.bound_timing = library, operation, timing, bound_timing

    def value(self, metric, statistic="median"):
        spread = self.timing.get(metric)
        return spread[STATISTICS.index(statistic)] if spread else None

    @property
    def steady_state(self):
        """The time of one operation among many in a CUDA graph."""
        return self.value("device_us")

    @property
    def compared(self):
        """What is compared with the lower bound: the device's time where there is one."""
        return self.steady_state if self.steady_state is not None else self.value("time_us")

    @property
    def bound(self):
        return (self.bound_timing.get("device_us") or self.bound_timing["time_us"])[0]


class Case:
    """What one run measured with one set of settings: the libraries, and by library and operation their timings."""

    def __init__(self, settings):
        self.settings = settings
        self.libraries, self.timings = {}, {}

    def row(self, operation, is_own=True):
        """Crossdock's row, or the other library's; None where there is none."""
        for name, library in self.libraries.items():
            if (name == "crossdock") == is_own and (name, operation) in self.timings:
                return Row(library, operation, self.timings[name, operation], self.timings["bound", operation])
        return None


class Run:
    """One execution of ep_bench."""

    def __init__(self, head):
        self.name, self.date, self.commit, self.machine = (head[key] for key in ("run", "date", "commit", "machine"))
        self.common = head["case"]
        self.ranks = self.common["ranks"]
        self.cases = []
        self.peer_date = self.date  # of the other library's figures

    def add(self, line):
        settings = {key: line.get(key, self.common.get(key)) for key in SETTINGS if key in line or key in self.common}
        case = next((case for case in self.cases if case.settings == settings), None)
        if case is None:
            case = Case(settings)
            self.cases.append(case)
        name, operation = line["library"], line["operation"]
        self.peer_date = line.get("date", self.peer_date)
        if operation == "start":
            case.libraries[name] = line
        else:
            case.timings[name, operation] = line


def library_name(library):
    if library["library"] == "crossdock":
        return "Crossdock"
    version = library["version"]
    digits = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return f"NCCL EP {digits}" if library["library"].startswith("libnccl_ep") else f"{library['library']} {digits}"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def machines():
    """The machines that ep_bench measured, GPUs first, the most of them first."""
    names = [path.stem for path in FOLDER.glob("*.jsonl") if re.fullmatch(r"\d+x\w+|cpu", path.stem)]
    return sorted(names, key=lambda name: -int(name.split("x")[0]) if name != "cpu" else 1)


def load(machine):
    """A machine's runs by name."""
    runs = {}
    for line in lines_of(FOLDER / f"{machine}.jsonl"):
        if "command" in line:
            runs[line["run"]] = Run(line)
        else:
            runs[line["run"]].add(line)
    return runs


def packed(spread):
    """A distribution as a list; what is none stays as it is."""
    is_one = isinstance(spread, dict) and set(spread) == set(STATISTICS)
    return [spread[key] for key in STATISTICS] if is_one else spread


def packed_timing(timing):
    return {
        key: {inner: packed(value) for inner, value in each.items()} if key == "overlap" else packed(each)
        for key, each in timing.items()
    }


def run_lines(name, document, date, commit):
    """The lines of one JSON document of ep_bench."""
    first, *others = document["results"]
    common = {key: first[key] for key in SETTINGS if key in first and all(case[key] == first[key] for case in others)}
    common = document["case"] | common

    def timing_of(timing):
        same = timing.get("graph_operations") == common.get("graph_operations")
        return packed_timing({key: value for key, value in timing.items() if key != "graph_operations" or not same})

    yield {
        "run": name,
        "date": date,
        "commit": commit,
        "command": document["command"],
        "machine": document["machine"],
        "case": common,
    }
    for case in document["results"]:
        head = {"run": name, **{key: case[key] for key in SETTINGS if key in case and case[key] != common.get(key)}}
        for operation, timing in case["bound"].items():
            yield {
                **head,
                "library": "bound",
                "operation": operation,
                "bytes": case["bytes_per_rank"][operation],
                **timing_of(timing),
            }
        for library in case["libraries"]:
            start = {key: value for key, value in library.items() if key not in (*OPERATIONS, "name")}
            yield {**head, "library": library["name"], "operation": "start", **start}
            for operation in OPERATIONS:
                if operation in library:
                    yield {**head, "library": library["name"], "operation": operation, **timing_of(library[operation])}


def is_peers(line):
    return "library" in line and line["library"] not in ("bound", "crossdock")


def peers_lines(old, new):
    """The other library's lines of a run's old ones, with their date, if the new ones have none of it."""
    if not old or any(map(is_peers, new)):
        return []
    common = old[0]["case"]
    settings = {key: common[key] for key in SETTINGS if key in common and common[key] != new[0]["case"].get(key)}
    return [{"run": line["run"], "date": old[0]["date"], **settings, **line} for line in old if is_peers(line)]


def write(path, lines):
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def head():
    """The commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def deep_ep_lines(name, document):
    """The lines of one JSON document of deep_ep_bench.py."""
    yield {"run": name, **{key: value for key, value in document.items() if key != "results"}}
    for result in document["results"]:
        yield {"run": name, **packed_timing(result)}


def documents(folder):
    """A folder's documents of ep_bench and deep_ep_bench.py by path, in order; ends the program if one is another."""
    paths = sorted(pathlib.Path(folder).glob("*.json"))
    if not paths:
        sys.exit(f"{folder}: has no *.json")
    for path in paths:
        try:
            document = json.loads(path.read_text(), parse_float=lambda text: round(float(text), 3))
        except ValueError as error:
            sys.exit(f"{path}: no JSON: {error}")
        if not isinstance(document, dict) or not {"command", "machine", "results"} <= document.keys():
            sys.exit(f"{path}: no document of ep_bench or deep_ep_bench.py")
        is_deep_ep = document.get("benchmark") == "deep_ep"
        if not is_deep_ep and "-" not in path.stem:
            sys.exit(f"{path}: the name has no machine, expected: NAME-MACHINE.json or cpu-NAME.json")
        yield path, document, is_deep_ep


def take(folder):
    """Takes over documents without the names of host and folders: of ep_bench, NAME-MACHINE.json or cpu-NAME.json, and
    of deep_ep_bench.py, crossdock-MACHINE.json, before-MACHINE.json or deep_ep-MACHINE.json."""
    found = list(documents(folder))  # nothing is taken if one of them is another file
    now, commit = datetime.date.today().isoformat(), head()
    for path, document, is_deep_ep in found:
        document["machine"].pop("host", None)
        document["machine"]["system"] = document["machine"]["system"].split()[0]
        document["command"] = re.sub(r"[^ ]*/([^ /]+)", r"\1", document["command"])
        if is_deep_ep:
            name, machine = path.stem, "deep_ep"
        else:
            name, machine = (path.stem[4:], "cpu") if path.stem.startswith("cpu-") else path.stem.rsplit("-", 1)
        file = FOLDER / f"{machine}.jsonl"
        lines = lines_of(file) if file.exists() else []
        if is_deep_ep:
            new = list(deep_ep_lines(name, document))
        else:
            new = list(run_lines(name, document, now, commit))
            new += peers_lines([line for line in lines if line["run"] == name], new)
        write(file, [*(line for line in lines if line["run"] != name), *new])
        print(f"took {path.name} into {file.relative_to(ROOT)}")
