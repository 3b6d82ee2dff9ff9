#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level Mixture-of-Experts language model over several processes, and compares with one process.

    python examples/moe_lm/train.py --compare --plot curves.svg

Every rank hosts some of the experts and a share of each batch. The losses of both are the same within rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import crossdock
from training import Run, Settings, train_alone, train_rank

ALLOWED_DIFFERENCE = 1e-5


def plot(parallel: Run, alone: Run | None, num_ranks: int, file: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "moe_lm"
    from matplotlib import pyplot

    figure, (curves, differences) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1])
    curves.plot(parallel.losses, label=f"{num_ranks} processes, Crossdock", linewidth=3, color="#8fbce6")
    if alone is not None:
        curves.plot(alone.losses, label="one process, without Crossdock", linewidth=0.9, color="#b03030")
        differences.semilogy(
            [max(abs(a - b), 1e-9) for a, b in zip(parallel.losses, alone.losses, strict=True)], "k.", ms=2
        )
        differences.axhline(ALLOWED_DIFFERENCE, color="#b03030", linewidth=0.8)
        differences.set_ylabel("difference")
    curves.set_ylabel("loss, nats a byte")
    curves.legend(frameon=False)
    differences.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes (4)")
    parser.add_argument("--steps", type=int, default=200, help="steps of the optimiser (200)")
    parser.add_argument("--mode", choices=["ht", "ll"], default="ht", help="high throughput or low latency (ht)")
    devices = ["cpu", "cuda"]
    parser.add_argument("--device", choices=devices, default="cpu", help="cpu or cuda (cpu); ranks may share a GPU")
    parser.add_argument("--compare", action="store_true", help="train in one process, too, and compare the losses")
    parser.add_argument(
        "--checkpoint", default="", help="files of this name: gone on from if there, written at the end"
    )
    parser.add_argument("--plot", default="", help="file for the curves")
    parser.add_argument("--json", default="", help="file for the losses and times")
    options = parser.parse_args()

    if min(options.ranks, options.steps) < 1:
        parser.error(f"--ranks is {options.ranks}, --steps is {options.steps}, allowed for both: 1 and more")
    settings = Settings(steps=options.steps, mode=options.mode, device=options.device, checkpoint=options.checkpoint)
    parallel = crossdock.run_processes(options.ranks, train_rank, settings)[0]
    print(
        f"{options.ranks} processes: loss {parallel.losses[0]:.4f} -> {parallel.losses[-1]:.4f}, "
        f"{parallel.seconds:.1f} s"
    )
    alone = train_alone(dataclasses.replace(settings, checkpoint="")) if options.compare else None
    difference = 0.0
    if alone is not None:
        difference = max(abs(a - b) for a, b in zip(parallel.losses, alone.losses, strict=True))
        print(f"1 process:   loss {alone.losses[0]:.4f} -> {alone.losses[-1]:.4f}, {alone.seconds:.1f} s")
        print(f"largest difference of the losses: {difference:.1e}, allowed: {ALLOWED_DIFFERENCE:.0e}")
    if options.plot:
        plot(parallel, alone, options.ranks, options.plot)
    if options.json:
        runs = {"parallel": vars(parallel), "alone": vars(alone) if alone else None, "difference": difference}
        Path(options.json).write_text(json.dumps(runs))
    failed = difference > ALLOWED_DIFFERENCE or parallel.losses[-1] >= parallel.losses[0]
    print("FAIL" if failed else "PASS")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
