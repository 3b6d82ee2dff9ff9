# SPDX-License-Identifier: Apache-2.0
"""What tools/results takes from ep_bench's documents, and what it draws."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest
from unittest import mock

from tools.results import compare, data, deep_ep, slim, timeline
from tools.results.markdown import replaced
from tools.results.svg import Chart, Curve, Panel

SPREAD = dict(zip(data.STATISTICS, (26.5, 30.0, 25.0, 31.0, 26.75, 100), strict=True))
TIMING = {"time_us": SPREAD, "graph_operations": 20, "overlap": {"send_us": SPREAD, "loss": 0.034}}
DOCUMENT = {
    "command": "build/cuda/bench/ep_bench --ranks 2 --json /home/user/ll-example-2xgpu.json",
    "machine": {"system": "Linux 6.1 #1", "host": "secret", "cpu": "a CPU", "cpus": 4, "gpu": "GPU; CUDA 13.0"},
    "case": {"mode": "ll", "ranks": 2, "graph_operations": 20},
    "results": [
        {
            "tokens": tokens,
            "hidden": 64,
            "experts": 8,
            "topk": 2,
            "max_num_sms": 0,
            "bytes_per_rank": {"dispatch": {"wire": 1024.0}},
            "bound": {"dispatch": {"time_us": SPREAD}},
            "libraries": [{"name": "crossdock", "version": 300, "symmetric_bytes": 5, "dispatch": TIMING}],
        }
        for tokens in (1, 8)
    ],
}
OF_DEEP_EP = {
    "benchmark": "deep_ep",
    "library": {"name": "crossdock", "version": "0.3.0"},
    "date": "2026-11-28",
    "commit": "def456",
    "command": "torchrun /home/user/deep_ep_bench.py",
    "machine": {"system": "Linux", "cpu": "a CPU", "cpus": 4, "gpu": "NVIDIA GPU, 4 here"},
    "case": {"ranks": 2, "hidden": 256, "experts": 8, "topk": 2},
    "results": [
        {"case": "elastic-128", "operation": "pair", "device_us": SPREAD},
        {"case": "elastic-128", "operation": "pair", "eager_us": {**SPREAD, "median": 70.25}},
    ],
}


class Folders(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in ("in", "out"):
            (self.folder / name).mkdir()
        for name, value in (("FOLDER", self.folder / "out"), ("ROOT", self.folder)):
            patch = mock.patch.object(data, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def take(self, document, name="ll-example-2xgpu"):
        (self.folder / "in" / f"{name}.json").write_text(json.dumps(document))
        with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(data, "head", return_value="abc123"):
            data.take(self.folder / "in")


class Take(Folders):
    # A run is read back with the settings, figures and lower bounds of each case.
    def test_figures_are_kept(self):
        self.take(DOCUMENT)
        (run,) = data.load("2xgpu").values()
        self.assertEqual((run.name, run.commit, run.ranks), ("ll-example", "abc123", 2))
        self.assertEqual([case.settings["tokens"] for case in run.cases], [1, 8])
        row = run.cases[1].row("dispatch")
        self.assertEqual([row.value("time_us", name) for name in data.STATISTICS], list(SPREAD.values()))
        self.assertEqual((row.bound, row.steady_state, row.library["version"]), (26.5, None, 300))
        self.assertEqual(row.timing["overlap"], {"send_us": list(SPREAD.values()), "loss": 0.034})
        self.assertIsNone(run.cases[0].row("combine"))

    # What is the same in all cases of a run is written once.
    def test_common_settings_are_written_once(self):
        self.take(DOCUMENT)
        head, *lines = data.lines_of(self.folder / "out" / "2xgpu.jsonl")
        self.assertEqual(head["case"], {**DOCUMENT["case"], "hidden": 64, "experts": 8, "topk": 2, "max_num_sms": 0})
        for line in lines:
            self.assertIn("tokens", line)
            self.assertFalse({*head["case"]} & {*line})
        (run,) = data.load("2xgpu").values()
        self.assertEqual(run.cases[1].settings, {key: DOCUMENT["results"][1][key] for key in data.SETTINGS[:5]})

    # Names of hosts and folders stay where they are.
    def test_no_names_are_taken(self):
        self.take(DOCUMENT)
        text = (self.folder / "out" / "2xgpu.jsonl").read_text()
        for name in ("secret", "/home", "build/", "6.1"):
            self.assertNotIn(name, text)

    # A run of the same name replaces the earlier one, and leaves others alone.
    def test_newer_run_replaces(self):
        self.take(DOCUMENT)
        self.take({**DOCUMENT, "results": DOCUMENT["results"][:1]})
        self.take(DOCUMENT, "ll-other-2xgpu")
        runs = data.load("2xgpu")
        self.assertEqual({name: len(run.cases) for name, run in runs.items()}, {"ll-example": 1, "ll-other": 2})

    # Libraries with DeepEP's classes stand side by side, those of one machine in one table.
    def test_deep_ep(self):
        self.take(OF_DEEP_EP, "crossdock-2xgpu")
        other = {"library": {"name": "deep_ep", "version": "2.1.0"}, "commit": "", "results": OF_DEEP_EP["results"][:1]}
        self.take({**OF_DEEP_EP, **other}, "deep_ep-2xgpu")
        self.take(OF_DEEP_EP, "crossdock-2xgpu")
        self.assertEqual(len(data.lines_of(self.folder / "out" / "deep_ep.jsonl")), 5)
        text = "\n".join(deep_ep.performance())
        self.assertIn("Crossdock: 2026-11-28 (def456); DeepEP 2.1.0: 2026-11-28.", text)
        self.assertIn("| `ElasticBuffer`, compact | 128 | - | - | - | - | 26.5 | 26.5 |", text)
        self.assertIn("| `ElasticBuffer`, compact | 128 | - | - | 70.2 | - |", text)
        self.assertNotIn("4096", text)
        self.assertIn("| `ElasticBuffer` dispatch + combine, 128 tokens | 26.5 | 26.5 |", deep_ep.readme())
        self.assertNotIn("/home", (self.folder / "out" / "deep_ep.jsonl").read_text())

    # What is wrong with a file is one line with its name.
    def test_other_files_are_named(self):
        folder = self.folder / "other"
        folder.mkdir()
        for name, content, message in (
            ("ll-2xgpu", "{", "ll-2xgpu.json: no JSON: "),
            ("ll-2xgpu", "[1]", "ll-2xgpu.json: no document of ep_bench or deep_ep_bench.py"),
            ("ll-2xgpu", '{"command": ""}', "ll-2xgpu.json: no document of ep_bench"),
            ("ll", json.dumps(DOCUMENT), "ll.json: the name has no machine, expected: NAME-MACHINE.json"),
        ):
            for path in folder.iterdir():
                path.unlink()
            for read in (data.take, compare.fresh_runs):
                with self.assertRaisesRegex(SystemExit, r"other: has no \*.json"):
                    read(folder)
            (folder / f"{name}.json").write_text(content)
            for read in (data.take, compare.fresh_runs):
                with self.assertRaisesRegex(SystemExit, message):
                    read(folder)
        (folder / "ll.json").rename(folder / "crossdock-2xgpu.json")
        (folder / "crossdock-2xgpu.json").write_text(json.dumps(OF_DEEP_EP))
        with self.assertRaisesRegex(SystemExit, "crossdock-2xgpu.json: of deep_ep_bench.py, expected: of ep_bench"):
            compare.fresh_runs(folder)

    def test_another_timeline_is_named(self):
        file = self.folder / "log.jsonl"
        with self.assertRaisesRegex(SystemExit, "log.jsonl: No such file"):
            timeline.load(file, [], [])
        for line in ("hello", "[]", '{"rank": 0}'):
            file.write_text(line + "\n")
            with self.assertRaisesRegex(SystemExit, "log.jsonl: no timeline: a line is "):
                timeline.load(file, [], [])


# New runs beside the committed ones.
class Compare(Folders):
    def compare(self, median, name="ll-example-2xgpu", results=2):
        self.take(DOCUMENT)
        now = json.loads(json.dumps(DOCUMENT))
        now["results"] = now["results"][:results]
        now["results"][0]["libraries"][0]["dispatch"]["time_us"]["median"] = median
        (self.folder / "now").mkdir()
        (self.folder / "now" / f"{name}.json").write_text(json.dumps(now))
        with contextlib.redirect_stdout(io.StringIO()) as output:
            compare.main([str(self.folder / "now")])
        return output.getvalue()

    def test_as_fast_is_well(self):
        self.assertIn("compared 2 cases", self.compare(26.5 * 1.09))

    def test_slower_is_named(self):
        with self.assertRaisesRegex(SystemExit, "ll-example, 1 tokens, dispatch: 29.68 us, 26.50 at abc123"):
            self.compare(26.5 * 1.12)

    def test_missing_is_named(self):
        with self.assertRaisesRegex(SystemExit, "ll-example, 8 tokens, dispatch: not measured"):
            self.compare(26.5, results=1)

    def test_other_machine_is_named(self):
        with self.assertRaisesRegex(SystemExit, "no figures of 2xother"):
            self.compare(26.5, "ll-example-2xother")


class Committed(unittest.TestCase):
    # docs/performance.md: each run of bench/results has its command, machine, date and commit.
    def test_every_run_says_where_it_is_from(self):
        for machine in data.machines():
            lines = data.lines_of(data.FOLDER / f"{machine}.jsonl")
            heads = {line["run"]: line for line in lines if "command" in line}
            self.assertEqual({line["run"] for line in lines}, set(heads))
            for name, head in heads.items():
                for key in ("command", "machine", "date", "commit"):
                    self.assertTrue(head.get(key), f"{machine}, {name}: no {key}")


class Marks(unittest.TestCase):
    # A document without its marks is an error, not one that is up to date.
    def test_marks_must_be_there(self):
        text = "a\n<!-- tables begin -->\nold\n<!-- tables end -->\nb\n"
        self.assertEqual(replaced(text, "tables", ["new"]), "a\n<!-- tables begin -->\n\nnew\n<!-- tables end -->\nb\n")
        for wrong in ("a\n", text + text):
            with self.assertRaises(ValueError):
                replaced(wrong, "tables", ["new"])


class Pictures(unittest.TestCase):
    # A chart is well-formed XML with a polyline per curve, whatever its labels hold.
    def test_chart(self):
        curves = [Curve("a & b", [(1, 2.0), (8, 16.0)], 0), Curve("c", [(1, 1.0), (8, 2.0)], 1, "dashed")]
        root = slim.tree.fromstring(Chart("x < y", [[Panel("panel", "x", "y", curves)]]).text())
        self.assertEqual(len(root.findall(f".//{slim.SVG}polyline")), 2)

    # Points on a straight line go, corners stay.
    def test_slim_keeps_the_shape(self):
        self.assertEqual(slim.simplified([(0, 0), (1, 0.1), (2, 0), (3, 5), (4, 10)]), [(0, 0), (2, 0), (4, 10)])

    # A text drawn as shapes becomes text.
    def test_slim_writes_text(self):
        picture = (
            '<svg xmlns="http://www.w3.org/2000/svg" width="10pt" height="10pt"><g id="text_1"><!-- us -->'
            '<g transform="translate(1.25 2) scale(0.1 -0.1)"><use/></g></g></svg>'
        )
        self.assertIn('<text font-size="10" transform="translate(1.2 2)">us</text>', slim.slim(picture))


if __name__ == "__main__":
    unittest.main()
