# SPDX-License-Identifier: Apache-2.0
"""python tests/engines/sglang_e2e: starts SGLang's servers over Crossdock and compares their answers."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __package__ != "sglang_e2e":  # started by the folder's name
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import sglang_e2e
from sglang_e2e import client, configurations, report, servers
from sglang_e2e.configurations import BASES, DEFAULT, FLAGS
from vllm_e2e import models
from vllm_e2e.runs import at_least

PACKAGE = Path(__file__).resolve().parent


def arguments() -> argparse.ArgumentParser:
    names = [f"    {name:8} {text}" for part in (BASES, FLAGS) for name, text in part.items()]
    bases, flags = "\n".join(names[: len(BASES)]), "\n".join(names[len(BASES) :])
    parser = argparse.ArgumentParser(
        prog="sglang_e2e",
        description=sglang_e2e.__doc__,
        epilog=f"A CONFIGURATION is BASE[+FLAG...]\n  bases:\n{bases}\n  flags:\n{flags}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = f"without it {' '.join(DEFAULT)}"
    parser.add_argument("configurations", nargs="*", metavar="CONFIGURATION", help=what)
    parser.add_argument("--ranks", type=at_least(2), default=2, help="and GPUs, of a server (2)")
    parser.add_argument("--model", choices=models.MODELS, default="small", help="its shape (small)")
    parser.add_argument("--layers", type=at_least(1), default=4, help="of the model (4)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/sglang_e2e"), help="where the model is written")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="a folder per configuration, table.txt (logs)")
    parser.add_argument("--start", type=at_least(10), default=600, help="seconds until a server is warm (600)")
    parser.add_argument("--limit", type=at_least(10), default=120, help="seconds for its requests after that (120)")
    parser.add_argument(
        "--total", type=at_least(10), default=3600, help="no server starts after so many seconds (3600)"
    )
    together = "servers that start at once (1); each takes up to 0.3 of the GPUs' memory"
    parser.add_argument("--together", type=at_least(1), default=1, help=together)
    parser.add_argument("--device", default="", help="where the model is made (cuda, or cpu where there is no GPU)")
    parser.add_argument("--only-model", action="store_true", help="write the model and the limits, start no server")
    parser.add_argument("--dry-run", action="store_true", help="print the variables and commands, do nothing")
    return parser


def shape_of(options: argparse.Namespace) -> models.Shape:
    shape = dataclasses.replace(models.MODELS[options.model], layers=options.layers)
    if shape.heads % options.ranks or shape.experts % options.ranks:
        counts = f"{shape.heads} heads and {shape.experts} experts"
        raise ValueError(f"--ranks is {options.ranks}, allowed with --model {options.model}: divisors of its {counts}")
    return shape


def folder_of(options: argparse.Namespace) -> Path:
    return Path(options.work.resolve(), f"model-{options.model}-{options.layers}")


def calibration_file(options: argparse.Namespace) -> Path:
    return folder_of(options) / f"calibration-{options.ranks}.json"


def make_model(options: argparse.Namespace) -> int:
    """Model and calibration, unless they are there."""
    import torch

    from sglang_e2e import model, plain

    shape, folder, begin = shape_of(options), folder_of(options), time.monotonic()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not model.is_there(folder, shape):
        size = model.write(folder, shape, device)
        print(f"model: {size / 2**30:.1f} GiB in {folder}, {time.monotonic() - begin:.0f} s", flush=True)
    if not calibration_file(options).exists():
        found = plain.calibration(shape, options.ranks, device, client.texts())
        calibration_file(options).write_text(json.dumps(found))
        print(f"plain torch: {time.monotonic() - begin:.0f} s", flush=True)
    return 0


def earlier_reference(logs: Path, model: Path) -> dict[str, Any] | None:
    """That of an earlier call with the same logs and model."""
    file = logs / "ref" / "result.json"
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    return found if found["word"] == "ok" and found["model"] == str(model) else None


def run(options: argparse.Namespace, words: list[str]) -> int:
    """All configurations, also after one that failed."""
    begin, model, logs = time.monotonic(), folder_of(options), options.logs.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: it ends what it started
    chosen = [configurations.parse(text) for text in options.configurations or DEFAULT]
    shape_of(options)
    if options.together > 1 and len(set(chosen)) < len(chosen):
        raise ValueError(f"--together is {options.together}, allowed where a CONFIGURATION is there twice: 1")
    if options.dry_run:
        for one in chosen:
            made = configurations.environment(one, logs).items()
            own = [f"{name}={value}" for name, value in made if os.environ.get(name) != value and name != "PATH"]
            print(shlex.join([*own, *configurations.command(one, model, options.ranks, range(30000, 30002))]))
        return 0
    if importlib.util.find_spec("sglang") is None:
        raise ValueError(f"SGLang is not installed for {sys.executable}: pip install sglang==0.5.23")
    # In a process of its own, whose memory on the GPU ends with it.
    if subprocess.run([sys.executable, str(PACKAGE), *words, "--only-model"]).returncode != 0:
        return 1
    calibration = json.loads(calibration_file(options).read_text())
    reference = None if any(one.is_reference for one in chosen) else earlier_reference(logs, model)
    limits, results = servers.Limits(options.start, options.limit), list[dict[str, Any]]()
    for first in range(0, len(chosen), options.together):
        group = chosen[first : first + options.together]
        if time.monotonic() - begin > options.total:
            found = [{"run": one.text, "word": f"not run: {options.total} s are over"} for one in group]
        else:
            found = servers.run_group(group, model, options.ranks, logs, limits)
        for one, result in zip(group, found, strict=True):
            print(f"{one.text}: {'has answered' if result['word'] == 'ok' else result['word']}", flush=True)
            if reference is None and one.is_reference and result["word"] == "ok":
                reference = result
        results += found
    rows = report.rows_of(results, reference, calibration)
    table = report.table(rows, calibration)
    (logs / "table.txt").write_text(table + "\n")
    content = [row.result | {"failures": row.failures} for row in rows]
    (logs / "results.json").write_text(json.dumps({"calibration": calibration, "runs": content}))
    print("\n" + table, flush=True)
    return 1 if any(row.failures for row in rows) else 0


def main(words: list[str]) -> int:
    parser = arguments()
    options = parser.parse_args(words)
    try:
        return make_model(options) if options.only_model else run(options, words)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
