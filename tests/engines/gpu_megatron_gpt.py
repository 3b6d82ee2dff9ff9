# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core trains a small MoE GPT: its flex dispatcher over DeepEP's Buffer beside its all-to-all dispatcher.

    torchrun --nproc-per-node 4 -m crossdock run --as-deep-ep gpu_megatron_gpt.py [OPTION...] [CASE...]

gpu.py starts it on GPUs, check_megatron_gpt.py on CPUs (--device cpu, with smaller shapes). Megatron-Core is on
PYTHONPATH, and unchanged. Rank 0 prints a line when a case starts and when it ends, figures behind "|", and a table.
--list prints the cases.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from megatron_compare import table

CASES = ("gradients", "losses", "speed", "trace", "repeated")
CASE_LIMIT_S = 100


def say_table(bench: Any, cases: Any) -> None:
    for line in [*table(bench.rows), *cases.legend(bench.rows)]:
        bench.say(line)


def run_rank(options: argparse.Namespace) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    is_gpu = options.device == "cuda"
    if is_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    dist.init_process_group("nccl" if is_gpu else "gloo", timeout=timedelta(seconds=CASE_LIMIT_S))
    # What Megatron calls its JIT fuser is torch.compile, which takes as long as all cases.
    torch._dynamo.config.disable = not options.compile
    if not is_gpu:
        import megatron_cpu

        megatron_cpu.stand_in_for_cuda()
    import megatron_gpt_cases as cases

    assert cases.fused_a2a.HAVE_DEEP_EP, "Megatron-Core finds no deep_ep: start with crossdock run --as-deep-ep"
    cases.model.join()
    shape = cases.model.Shape(**{name: getattr(options, name) for name in cases.model.Shape.__dataclass_fields__})
    # Ranks of one host share the folder.
    folders: list[Any] = [tempfile.mkdtemp(prefix="megatron-") if rank == 0 else None]
    dist.broadcast_object_list(folders)
    bench = cases.Bench(options, shape, Path(folders[0], "checkpoint"))
    where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if is_gpu else "CPUs"
    bench.say(f"{size} ranks, {where}, torch {torch.__version__}, {shape}")
    bench.say(f"deep_ep is {sys.modules['deep_ep'].__file__}")
    jit = "on" if options.compile else "off"
    bench.say(f"permute fusion is off, which needs TransformerEngine; Megatron's JIT fuser is {jit}")
    failed = []
    for name in options.cases or [name for name in CASES if is_gpu or name != "trace"]:
        if rank == 0:
            print(f"start   {name}", flush=True)
            shutil.rmtree(bench.folder, ignore_errors=True)
        begin = time.perf_counter()
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
        try:
            getattr(cases, name)(bench)
        except cases.Mismatch as problem:
            failed.append(name)
            bench.say(f"{problem}")
        except BaseException:
            # At once: other ranks may hang, and torchrun ends them.
            print(f"rank {rank}: {traceback.format_exc()}", flush=True)
            if rank == 0:
                say_table(bench, cases)
                shutil.rmtree(folders[0], ignore_errors=True)
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        bench.say(f"{name} took {time.perf_counter() - begin:.1f} s")
        if rank == 0:
            print(f"{'FAILED' if name in failed else 'ok':7} {name}", flush=True)
    if rank == 0:
        shutil.rmtree(folders[0], ignore_errors=True)
        say_table(bench, cases)
        if not failed:
            differs = bench.rows.get("flex", {}).get("differs by", "not compared")
            print(f"Megatron-Core: flex over deep_ep beside alltoall on {size} ranks, losses: {differs}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if failed else 0


def problem(options: argparse.Namespace, num_ranks: int) -> str:
    """What is wrong with the options, or ""."""
    for name in ("layers", "hidden", "heads", "ffn", "experts", "topk", "batch", "length", "vocabulary"):
        if getattr(options, name) < 1:
            return f"--{name} is {getattr(options, name)}: it must be at least 1"
    for name in ("learning_rate", "tolerance"):
        if not getattr(options, name) > 0:
            return f"--{name.replace('_', '-')} is {getattr(options, name)}: it must be above 0"
    if options.steps < 4:
        return f"--steps is {options.steps}: at least 4 are needed for a resume in the middle"
    if num_ranks < 2:
        return f"there is {num_ranks} rank: flex over deep_ep needs at least 2"
    if options.hidden % (2 * options.heads):
        return f"--hidden is {options.hidden}: it must be a multiple of 2 * --heads, which is {2 * options.heads}"
    if options.hidden % 8:
        return f"--hidden is {options.hidden}: rows of bf16 must be multiples of 16 bytes, so of 8 elements"
    if options.experts % num_ranks:
        return f"--experts is {options.experts}: it must be a multiple of the number of ranks, which is {num_ranks}"
    if options.topk > options.experts:
        return f"--topk is {options.topk}: it must be at most --experts, which is {options.experts}"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "--device is cuda, and torch finds no GPU: pass --device cpu"
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        return f"CASE is {unknown[0]}: it must be one of {', '.join(CASES)}"
    if "trace" in options.cases and options.device == "cpu":
        return "CASE is trace, which needs --device cuda"
    return ""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    result.add_argument("--list", action="store_true", help="print the cases")
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    result.add_argument("--steps", type=int, default=50, help="the checkpoint is written after half of them (50)")
    result.add_argument("--tolerance", type=float, default=1e-3, help="for the relative difference of losses (1e-3)")
    result.add_argument("--compile", action="store_true", help="with torch.compile where Megatron uses it (off)")
    result.add_argument("--layers", type=int, default=4)
    result.add_argument("--hidden", type=int, default=1024)
    result.add_argument("--heads", type=int, default=16)
    result.add_argument("--ffn", type=int, default=512, help="of each expert (512)")
    result.add_argument("--experts", type=int, default=32)
    result.add_argument("--topk", type=int, default=4)
    result.add_argument("--batch", type=int, default=2, help="sequences per rank (2)")
    result.add_argument("--length", type=int, default=1024, help="tokens per sequence (1024)")
    result.add_argument("--vocabulary", type=int, default=8192)
    result.add_argument("--learning-rate", type=float, default=5e-5)
    return result


def main() -> int:
    options = parser().parse_args()
    if options.list:
        print("\n".join(CASES))
        return 0
    wrong = problem(options, int(os.environ.get("WORLD_SIZE", "1")))
    if wrong:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"gpu_megatron_gpt.py: {wrong}", file=sys.stderr)
        return 2
    return run_rank(options)


if __name__ == "__main__":
    sys.exit(main())
