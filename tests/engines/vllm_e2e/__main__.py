# SPDX-License-Identifier: Apache-2.0
"""python tests/engines/vllm_e2e pack | run | table; `rank` is what run starts."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path

if __package__ != "vllm_e2e":  # started by the folder's name
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from vllm_e2e import execute, launch, models, report, runs
from vllm_e2e.runs import at_least

PACKAGE = Path(__file__).resolve().parent
SHARED = "shared.txt"  # in the logs of runs whose ranks share GPUs


def pack(options: argparse.Namespace) -> int:
    from vllm_e2e import packing

    return packing.pack(options)


def run(options: argparse.Namespace) -> int:
    """All lines, also after one that failed."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: it ends what it started
    chosen = [runs.parse(text, models.MODELS) for text in options.run or runs.lines_of(options.plan)]
    home = options.home.resolve()
    for folder in ("site", "nccl"):
        if not (home / folder).is_dir():
            raise ValueError(f"--home is {home}, which has no folder {folder}: unpack the parts there")
    folders = home, options.work.resolve(), options.logs.resolve()
    machine = launch.Machine(*folders, options.ranks, options.timeout_ms, options.gpus or options.ranks)
    options.work.mkdir(parents=True, exist_ok=True)
    machine.logs.mkdir(parents=True, exist_ok=True)
    shared = machine.logs / SHARED
    shared.unlink(missing_ok=True)
    if machine.is_shared:
        shared.write_text(f"{machine.ranks} ranks share {machine.gpus} GPU(s): times say nothing")
    print(f"{os.cpu_count()} cores, /dev/shm {shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB", flush=True)
    limits = execute.Limits(options.start, options.limit, begin + options.total)
    execute.run_all(chosen, options.together, machine, limits)
    return finish(machine.logs, [one.text for one in chosen])


def finish(logs: Path, texts: list[str]) -> int:
    rows = report.rows_of(logs, texts)
    found = report.table(rows)
    if (logs / SHARED).exists():
        found = (logs / SHARED).read_text() + "\n\n" + found
    (logs / "table.txt").write_text(found + "\n")
    (logs / "runs.txt").write_text("\n".join(texts) + "\n")
    print("\n" + found, flush=True)
    return 1 if any(row.failures for row in rows) else 0


def table(options: argparse.Namespace) -> int:
    """Of logs that came back from another machine."""
    logs: Path = options.logs
    if not (logs / "runs.txt").exists():
        raise ValueError(f"--logs is {logs}, which has no runs.txt: name the folder that run wrote")
    return finish(logs, (logs / "runs.txt").read_text().splitlines())


def rank(options: argparse.Namespace) -> int:
    from vllm_e2e import rank as one_rank

    return one_rank.main(options)


def arguments() -> argparse.ArgumentParser:
    plans = "; ".join(f"{name}: {len(lines)} runs" for name, lines in runs.PLANS.items())
    flags = "\n".join(f"    {name:9} {text}" for name, text in runs.FLAGS.items())
    epilog = f"A run is BACKEND MODE MODEL TOKENS [FLAG...]\n  backends: {', '.join(runs.BACKENDS)}\n  flags:\n{flags}"
    parser = argparse.ArgumentParser(
        prog="vllm_e2e", description=__doc__, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    packing = commands.add_parser("pack", help="make the parts for a machine with GPUs")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--crossdock", type=Path, metavar="PACKAGE", help="a cp312 wheel, or a folder crossdock")
    packing.add_argument("--part-mib", type=at_least(8), default=48, help="the most that a part may have (48)")
    packing.add_argument("--architecture", type=at_least(70), default=90, help="of the GPU (90)")
    packing.add_argument("--keep", type=Path, metavar="FOLDER", help="where archives are kept (FOLDER/archives)")
    packing.set_defaults(do=pack)
    running = commands.add_parser("run", help="run the lines of a plan")
    running.add_argument("--plan", default="first", help=f"names with commas between them ({plans})")
    running.add_argument("--run", action="append", metavar="LINE", help="a line instead of a plan; repeatable")
    running.add_argument("--ranks", type=at_least(2), default=4, help="of a run (4)")
    running.add_argument("--gpus", type=at_least(1), help="for each rank one; with fewer, ranks share them")
    running.add_argument("--home", type=Path, default=PACKAGE.parents[1], help="what unpack.py wrote")
    running.add_argument("--work", type=Path, default=Path("/tmp/vllm_e2e"), help="caches and models")
    running.add_argument("--logs", type=Path, default=Path("logs"))
    running.add_argument("--start", type=at_least(10), default=180, help="seconds until engines are ready (180)")
    running.add_argument("--limit", type=at_least(10), default=90, help="seconds for one run after that (90)")
    running.add_argument("--total", type=at_least(10), default=520, help="seconds for all (520)")
    together = "runs whose engines start at once (6); each has the model's weights, of deep 45 GB / ranks"
    running.add_argument("--together", type=at_least(1), default=6, help=together)
    running.add_argument("--timeout-ms", type=at_least(100), default=40000, help="NCCL_EP_TIMEOUT_MS (40000)")
    running.set_defaults(do=run)
    again = commands.add_parser("table", help="print the table of a run's logs")
    again.add_argument("--logs", type=Path, required=True)
    again.set_defaults(do=table)
    one = commands.add_parser("rank")
    one.add_argument("--line", required=True, help="the run")
    one.add_argument("--rank", type=int, default=-1, help="that of the variable RANK without it")
    for name in ("ranks", "store-port"):
        one.add_argument(f"--{name}", type=int, required=True)
    one.add_argument("--model", required=True)
    one.add_argument("--out", required=True)
    one.set_defaults(do=rank)
    return parser


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    try:
        return int(options.do(options))
    except ValueError as error:
        if options.do is rank:
            raise
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
