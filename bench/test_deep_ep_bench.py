# SPDX-License-Identifier: Apache-2.0
"""deep_ep_bench.py measures on CPU ranks, notices wrong results, ends what hangs, and refuses wrong arguments."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import deep_ep_report as report
from deep_ep_names import STANDARD, Case
from stopwatch import STATISTICS, spread_of

BENCH = Path(__file__).with_name("deep_ep_bench.py")
SMALL = ("--device", "cpu", "--hidden", "128", "--experts", "4", "--topk", "2", "--repetitions", "2")

# A library whose ElasticBuffer returns one wrong element, and whose normal mode never returns.
FAULTY = """
import time
from crossdock.deep_ep import Buffer as RightBuffer, ElasticBuffer as RightElasticBuffer

class ElasticBuffer(RightElasticBuffer):
    def combine(self, *arguments, **settings):
        made = super().combine(*arguments, **settings)
        made[0][1, 2] += 100
        return made

class Buffer(RightBuffer):
    def get_dispatch_layout(self, *arguments, **settings):
        time.sleep(3600)
"""


def run(*arguments: Any, ranks: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """With several ranks through torchrun, whose start takes seconds. One does without."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    if ranks == 1:
        alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environment = alone | environment
    command = [sys.executable, *launcher, str(BENCH), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)


class Program(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    # Two ranks measure every operation of every kind of case; a second run adds its case to the file.
    def test_two_ranks(self) -> None:
        file = self.folder / "own.json"
        cases = [
            "elastic-8",
            "elastic-3-expand-fp8",
            "elastic-9-expand-exact",
            "elastic-513-24sms",
            "ll-8",
            "ll-1-fp8",
            "normal-64-fp8",
        ]
        done = run(*cases[1:], *SMALL, "--json", file, ranks=2)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        earlier = json.loads(file.read_text())["results"]
        done = run(cases[0], *SMALL, "--json", file, ranks=2)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        document = json.loads(file.read_text())
        self.assertEqual(document["results"][: len(earlier)], earlier)
        found: dict[str, list[tuple[str, str]]] = {}
        for result in document["results"]:
            [metric] = report.METRICS.keys() & result.keys()
            found.setdefault(result["case"], []).append((result["operation"], metric))
            self.assertEqual(tuple(result[metric]), STATISTICS)
            self.assertEqual(result[metric]["count"], 2)
            self.assertGreater(result[metric]["min"], 0)
        few = [*((name, "time_us") for name in ("dispatch", "combine", "pair")), ("pair", "eager_us")]
        hooks = [("pair with hooks", metric) for metric in ("time_us", "eager_us")]
        with_hooks = [*few[:3], hooks[0], few[3], hooks[1]]
        many = [(name, "time_us") for name in ("dispatch", "cached dispatch", "combine")]
        self.assertEqual(
            found,
            dict(
                zip(
                    cases[1:],
                    (few, few, many, with_hooks, with_hooks, many),
                    strict=True,
                )
            )
            | {cases[0]: few},
        )
        self.assertEqual(document["case"]["ranks"], 2)
        self.assertEqual(document["library"]["name"], "crossdock")

        done = run("--compare", file, file)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("x1.00", done.stdout)

        done = run("elastic-8", *SMALL[:2], "--hidden", 256, *SMALL[4:], "--json", file, ranks=1)
        self.assertEqual(done.returncode, 2)
        self.assertIn("name another file", done.stderr)

    # A wrong result fails the program with the error's size and place; other cases are still measured.
    def test_wrong_result(self) -> None:
        (self.folder / "deep_ep.py").write_text(FAULTY)
        path = f"{self.folder}:{os.environ.get('PYTHONPATH', '')}"
        file = self.folder / "faulty.json"
        done = run("elastic-2", "ll-2", *SMALL, "--library", "deep_ep", "--json", file, ranks=1, PYTHONPATH=path)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(
            done.stderr,
            r"elastic-2: dispatch, combine: the result \[2, 128\] of rank 0 is wrong, token 1 by \d\S* of its norm, "
            r"allowed: at most 0\.01",
        )
        self.assertIn("failed: elastic-2\n", done.stderr)
        self.assertEqual({result["case"] for result in json.loads(file.read_text())["results"]}, {"ll-2"})

    # A case that does not end is ended, and named.
    def test_limit(self) -> None:
        (self.folder / "deep_ep.py").write_text(FAULTY)
        path = f"{self.folder}:{os.environ.get('PYTHONPATH', '')}"
        done = run("normal-2", *SMALL, "--library", "deep_ep", "--limit", 2, ranks=1, PYTHONPATH=path)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("--limit: normal-2 on rank 0 took longer than 2 s", done.stderr)

    # Errors name the argument, its value and what is allowed, before torch is loaded.
    def test_wrong_arguments(self) -> None:
        ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
        for arguments, message in (
            (["elastic-0"], "CASE is 'elastic-0', allowed: elastic-TOKENS"),
            (["ll-8-expand"], "CASE is 'll-8-expand', allowed: elastic-TOKENS"),
            (["ll-8-24sms"], "CASE is 'll-8-24sms', allowed: elastic-TOKENS"),
            (["--hidden", 100], "--hidden is 100, allowed: multiples of 128"),
            (["--experts", 7], "--experts is 7, allowed: multiples of the number of ranks (2)"),
            (["--topk", 10, "--experts", 8], "--topk is 10, allowed: at most --experts (8)"),
            (["--topk", 0], "--topk is 0, allowed: 1..64"),
            (["--repetitions", 0], "--repetitions is 0, allowed: 1.."),
            (["--limit", 0], "--limit is 0, allowed: more than 0"),
            (["--json", "/no/folder/file"], "--json is /no/folder/file, allowed: files in a folder that exists"),
            (["--library", "other"], "argument --library: invalid choice: 'other'"),
            (["--compare", "nothing"], "nothing is neither a file nor a run of deep_ep.jsonl, whose runs are: "),
            (["--compare", __file__], "cannot be read: "),
        ):
            done = run(*arguments, **ranks)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(message, done.stderr)
        done = run("ll-8", WORLD_SIZE="", RANK="")
        self.assertEqual(done.returncode, 2)
        self.assertIn(
            "WORLD_SIZE is '' in the environment, expected a number: start this program with torchrun", done.stderr
        )


class Names(unittest.TestCase):
    # What --list prints are cases, each once.
    def test_standard_cases(self) -> None:
        done = run("--list")
        self.assertEqual(done.stdout.split(), STANDARD)
        self.assertEqual(len(set(STANDARD)), len(STANDARD))
        self.assertTrue(all(Case.of(name) is not None for name in STANDARD))

    def test_parts_of_a_name(self) -> None:
        name = "elastic-4096-expand-fp8-24sms"
        self.assertEqual(Case.of(name), Case(name, "elastic", 4096, True, False, True, 24))
        self.assertEqual(Case.of("elastic-8-expand-exact")[3:], (True, True, False, 0))
        self.assertIsNone(Case.of("elastic-8-exact"))
        self.assertEqual(Case.of("ll-8"), Case("ll-8", "ll", 8, False, False, False, 0))


class Spread(unittest.TestCase):
    # As ep_bench has them (tools/common/statistics.h).
    def test_statistics(self) -> None:
        self.assertEqual(spread_of([3, 1, 2, 10]), dict(zip(STATISTICS, (2.5, 10, 1, 10, 4, 4), strict=True)))
        self.assertEqual(spread_of(range(200, 0, -1))["p99"], 198)


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: skipped")
        sys.exit(77)
    unittest.main()
