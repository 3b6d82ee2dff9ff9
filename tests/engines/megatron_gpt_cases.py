# SPDX-License-Identifier: Apache-2.0
"""The cases of gpu_megatron_gpt.py, which all ranks run: flex over DeepEP's Buffer beside the all-to-all dispatcher."""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from torch.autograd import DeviceType

import megatron_gpt as model
from megatron_compare import GRADIENT_LIMIT, gradient_errors, largest_difference, milliseconds, mismatches

# Steps whose times count for nothing: kernels are loaded, and memory is taken.
COLD_STEPS = 5
# Parts of a kernel's name, by what it does; the first that fits. The rest is elementwise work and optimizer.
KINDS = {
    "Crossdock": ("crossdock",),
    "NCCL": ("nccl",),
    "GEMM": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "permutation": ("sort", "radix", "scatter", "gather", "index", "scan", "nonzero", "cub"),
}


class Mismatch(Exception):
    """A result that is wrong, on all ranks alike: the next case can run."""


@dataclass
class Run:
    """Some steps of one training; losses: of all ranks, for each step."""

    losses: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    other_bytes: int = 0  # of the GPU, outside of torch's allocator: NCCL's and Crossdock's buffers, and kernels
    buffer_calls: int = 0


class Bench:
    """What the cases have in common."""

    def __init__(self, options: argparse.Namespace, shape: Any, folder: Path) -> None:
        self.options, self.shape, self.folder = options, shape, folder
        self.is_gpu = options.device == "cuda"
        self.rows: dict[str, dict[str, str]] = {"alltoall": {}, "flex": {}}

    def say(self, line: str) -> None:
        if dist.get_rank() == 0:
            print(f"| {line}", flush=True)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def largest(self, values: list[float]) -> list[float]:
        """Each value of the rank where it is largest."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, values)
        return [max(of) for of in zip(*every, strict=True)]

    def train(
        self,
        settings: dict[str, Any],
        steps: range,
        save_after: int | None = None,
        resume: bool = False,
    ) -> Run:
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        training = model.Training(self.shape, is_fixed=True, **settings)
        if resume:
            self.synchronize()
            begin = time.perf_counter()
            training.resume(self.folder)
            self.say(f"checkpoint read in {time.perf_counter() - begin:.1f} s")
        run, losses = Run(), []
        with mock.patch.object(fused_a2a, "get_buffer", wraps=fused_a2a.get_buffer) as buffers:
            for number in steps:
                self.synchronize()
                begin = time.perf_counter()
                losses.append(training.step(number))
                self.synchronize()
                run.seconds.append(time.perf_counter() - begin)
                if number + 1 == save_after:
                    begin = time.perf_counter()
                    training.save(self.folder)
                    size = sum(file.stat().st_size for file in self.folder.iterdir()) / 2**20
                    self.say(f"checkpoint of {size:.0f} MiB written in {time.perf_counter() - begin:.1f} s")
            run.buffer_calls = buffers.call_count
        run.losses = model.losses_of_all(losses)
        run.seconds = self.largest(run.seconds)
        if self.is_gpu:
            free, total = torch.cuda.mem_get_info()
            other = total - free - torch.cuda.memory_reserved()
            run.peak_bytes, run.other_bytes = map(int, self.largest([torch.cuda.max_memory_allocated(), other]))
        return run

    def compare(self, what: str, one: Run, other: Run) -> float:
        """The largest relative difference of the mean losses of a step."""
        means, ranks = largest_difference(one.losses, other.losses)
        same = "bitwise equal" if one.losses == other.losses else f"{means:.1e}, of one rank {ranks:.1e}"
        self.say(f"{what}: largest difference of the losses of {len(one.losses)} steps: {same}")
        every = max(1, len(one.losses) // 10)
        if means > self.options.tolerance:
            for number, (ours, theirs) in list(enumerate(zip(one.losses, other.losses, strict=True)))[::every]:
                self.say(f"    step {number}: {sum(ours) / len(ours):.6f} beside {sum(theirs) / len(theirs):.6f}")
        return means

    def expect_buffers(self, run: Run) -> None:
        """Dispatch and combine, forward and backward, went through deep_ep."""
        expected = 4 * self.shape.layers * len(run.seconds)
        if run.buffer_calls != expected:
            raise Mismatch(f"deep_ep.Buffer was asked for {run.buffer_calls} times, expected {expected}")


def losses(bench: Bench) -> None:
    """Losses agree at every step, also after a resume; times and memory of each. Routing is fixed."""
    count, half, limit = bench.options.steps, bench.options.steps // 2, bench.options.tolerance
    plain = bench.train(model.ALL_TO_ALL, range(count))
    again = bench.train(model.ALL_TO_ALL, range(count))
    flex = bench.train(model.FLEX, range(count), save_after=half)
    resumed = bench.train(model.FLEX, range(half, count), resume=True)
    del flex.seconds[half : half + 1]  # the step after the checkpoint
    for name, run in (("alltoall", plain), ("flex", flex)):
        row = bench.rows[name]
        median, row_p99 = milliseconds(run.seconds[min(COLD_STEPS, count // 2) :])
        row["step ms, median"], row["p99"] = f"{median:.1f}", f"{row_p99:.1f}"
        row["first loss"], row["last"] = (f"{sum(of) / len(of):.3f}" for of in (run.losses[0], run.losses[-1]))
        if bench.is_gpu:
            row["torch GiB, peak"], row["other GiB"] = (f"{of / 2**30:.2f}" for of in (run.peak_bytes, run.other_bytes))
    bench.say("flex ms of each step: " + " ".join(f"{1e3 * of:.0f}" for of in flex.seconds))
    bench.say("alltoall: " + " ".join(f"{1e3 * of:.0f}" for of in plain.seconds))
    found = {
        "alltoall beside itself": bench.compare("alltoall beside itself", again, plain),
        "flex beside alltoall": bench.compare("flex beside alltoall", flex, plain),
        "flex, resumed": bench.compare("flex, resumed beside uninterrupted", resumed, Run(flex.losses[half:])),
    }
    bench.rows["alltoall"]["differs by"] = f"{found['alltoall beside itself']:.1e}"
    bench.rows["flex"]["differs by"] = f"{found['flex beside alltoall']:.1e}"
    bench.rows["flex"]["resumed"] = f"{found['flex, resumed']:.1e}"
    wrong = mismatches(found, limit)
    if wrong:
        raise Mismatch(wrong)
    bench.expect_buffers(Run(seconds=flex.seconds + [0.0], buffer_calls=flex.buffer_calls))
    first, last = (sum(of) for of in (flex.losses[0], flex.losses[-1]))
    if not last < 0.95 * first:
        raise Mismatch(f"nothing was learnt: the sum of losses went from {first} to {last}")


def repeated(bench: Bench) -> None:
    """With torch's deterministic algorithms, a resumed run is bitwise the uninterrupted one."""
    count = min(10, bench.options.steps)
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    try:
        plain = bench.train(model.ALL_TO_ALL, range(count))
        again = bench.train(model.ALL_TO_ALL, range(count))
        flex = bench.train(model.FLEX, range(count), save_after=count // 2)
        resumed = bench.train(model.FLEX, range(count // 2, count), resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    noise = bench.compare("deterministic: alltoall beside itself", again, plain)
    bench.compare("deterministic: flex beside alltoall", flex, plain)
    uninterrupted = Run(flex.losses[count // 2 :])
    difference = bench.compare("deterministic: flex, resumed beside uninterrupted", resumed, uninterrupted)
    if noise == 0 and difference > 0:
        raise Mismatch(f"alltoall repeats itself bitwise, but flex after a resume differs by {difference:.1e}")


def speed(bench: Bench) -> None:
    """Steps per second of each, without waiting between steps; the dispatchers take turns."""
    settings = {"alltoall": model.ALL_TO_ALL, "flex": model.FLEX}
    trainings = {name: model.Training(bench.shape, **of) for name, of in settings.items()}
    block = max(2, bench.options.steps // 5)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in range(5):
        for name, training in trainings.items():
            bench.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            for number in range(turn * block, (turn + 1) * block):
                training.step(number)
            bench.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    tokens = dist.get_world_size() * bench.shape.batch * bench.shape.length
    for name, blocks in seconds.items():
        warm = sorted(bench.largest(blocks)[1:])
        rate = block / (sum(warm) / len(warm))
        per_block = " ".join(f"{of:.3f}" for of in warm)
        bench.say(f"{name}: {rate:.2f} steps/s, {rate * tokens:.0f} tokens/s (s per {block} steps: {per_block})")
        row = bench.rows[name]
        row["steps/s"], row["tokens/s"] = f"{rate:.2f}", f"{rate * tokens:.0f}"


def gradients(bench: Bench) -> None:
    """The first step's gradients agree, parameter by parameter, and would not after a wrong row, expert or weight."""
    real = token_dispatcher.fused_dispatch

    def of(settings: dict[str, Any], fault: str = "") -> dict[str, torch.Tensor]:
        def dispatch(*arguments: Any, **options: Any) -> Any:
            """Rank 1 receives something wrong: the next token's rows, rows of the next expert, or twice the weights."""
            rows, experts, weights, counts, handle = real(*arguments, **options)
            if fault == "row":
                rows = rows.roll(1, dims=0)
            if fault == "expert":
                experts = torch.where(experts < 0, experts, (experts + 1) % len(counts))
                counts = counts.roll(1)
            if fault == "weight":
                weights = 2 * weights
            return rows, experts, weights, counts, handle

        training = model.Training(bench.shape, is_fixed=True, **settings)
        with mock.patch.object(token_dispatcher, "fused_dispatch", dispatch if dist.get_rank() == 1 else real):
            training.step(0)
        return {name: part.main_grad.clone() for name, part in training.model.module.named_parameters()}

    def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
        """The largest error of a parameter's gradient, of all ranks."""
        errors = gradient_errors(found, expected)
        name = max(errors, key=lambda name: errors[name])
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (errors[name], name))
        return max(every)

    expected, problems = of(model.ALL_TO_ALL), []
    noise, name = difference(of(model.ALL_TO_ALL), expected)
    bench.say(f"gradients: alltoall beside itself, largest error of {len(expected)} parameters: {noise:.1e} ({name})")
    error, name = difference(of(model.FLEX), expected)
    bench.say(f"gradients: flex beside alltoall: {error:.1e} ({name}), limit {GRADIENT_LIMIT}")
    bench.rows["flex"]["gradients differ by"] = f"{error:.1e}"
    if not error <= GRADIENT_LIMIT:
        problems.append(f"the gradient of {name} differs by {error:.1e}, above {GRADIENT_LIMIT}")
    for fault in ("row", "expert", "weight"):
        error, name = difference(of(model.FLEX, fault), expected)
        bench.say(f"gradients: after a planted wrong {fault} on rank 1: {error:.1e} ({name})")
        if not error > GRADIENT_LIMIT:
            problems.append(f"a wrong {fault} is not seen: {error:.1e} is within {GRADIENT_LIMIT}")
    if problems:
        raise Mismatch("; ".join(problems))


def trace(bench: Bench) -> None:
    """What rank 0's GPU does in a step."""
    count = 3
    for name, settings in (("alltoall", model.ALL_TO_ALL), ("flex", model.FLEX)):
        training = model.Training(bench.shape, **settings)
        for number in range(COLD_STEPS):
            training.step(number)
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        bench.synchronize()
        with profile if dist.get_rank() == 0 else contextlib.nullcontext():
            begin = time.perf_counter()
            for number in range(COLD_STEPS, COLD_STEPS + count):
                training.step(number)
            bench.synchronize()
            took = 1e3 * (time.perf_counter() - begin) / count
        if dist.get_rank() != 0:
            continue
        by_kind, by_kernel = dict.fromkeys([*KINDS, "rest"], 0.0), dict[str, float]()
        launches = 0
        for event in profile.events() or []:
            if event.device_type != DeviceType.CUDA:
                continue
            kernel, spent = event.name, 1e-3 * event.time_range.elapsed_us() / count
            fitting = (kind for kind, parts in KINDS.items() if any(part in kernel.lower() for part in parts))
            by_kind[next(fitting, "rest")] += spent
            by_kernel[kernel] = by_kernel.get(kernel, 0.0) + spent
            launches += 1
        parts = ", ".join(f"{kind} {spent:.2f}" for kind, spent in by_kind.items())
        busy = sum(by_kind.values())
        bench.say(
            f"{name}: {took:.1f} ms per step in the profiler; {launches // count} kernels, {busy:.1f} ms: {parts}"
        )
        for kernel, spent in sorted(by_kernel.items(), key=lambda of: -of[1])[:7]:
            bench.say(f"    {spent:6.2f} ms  {kernel[:90]}")
        row = bench.rows[name]
        row["GPU ms"], row["of which exchange"] = f"{busy:.1f}", f"{by_kind['Crossdock'] + by_kind['NCCL']:.2f}"


LEGEND = {
    "step ms, median": "step ms: fixed routing, the host waits for the GPU after each step",
    "differs by": "differs by: largest relative difference of a step's loss from the first run with alltoall",
    "resumed": "resumed: after the checkpoint, from the run without a break",
    "gradients differ by": "gradients differ by: of the first step, relative to the largest of a layer's experts",
    "steps/s": "steps/s, tokens/s: Megatron's routing, the host does not wait between steps",
    "GPU ms": "GPU ms: sum of the kernels' times of rank 0 per step; the rest of a step, the GPU waits for the host",
    "of which exchange": "exchange: kernels of NCCL and Crossdock, which include waiting for the other ranks",
    "other GiB": "other GiB: on the GPU outside of torch's allocator, with the buffers of NCCL and Crossdock",
}


def legend(rows: dict[str, dict[str, str]]) -> list[str]:
    """What the columns of the table mean that are there."""
    present = {name for row in rows.values() for name in row}
    return [text for name, text in LEGEND.items() if name in present]
