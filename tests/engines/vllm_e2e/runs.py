# SPDX-License-Identifier: Apache-2.0
"""What a run is: a line of words, "BACKEND MODE MODEL TOKENS [FLAG...]", as in `ll graph small 256 check perf`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

BACKENDS = {
    "agrs": "allgather_reducescatter",
    "ll": "deepep_low_latency",
    "ht": "deepep_high_throughput",
    "v2": "deepep_v2",
}
MODES = ("eager", "graph")
TOKENS = (16, 16384)  # max_num_batched_tokens
FLAGS = {
    "check": "compare MoE layers' outputs of a few steps with plain loops",
    "score": "log-probabilities of a fixed text, and greedy tokens",
    "perf": "decode with 1, 32 and 128 sequences per rank",
    "prefill": "prompts of as many tokens as a step takes",
    "faults": "plant each fault in turn; the check must find it",
    "idle": "rank 0 has one short request, and then joins the others' steps with dummy batches",
    "fp8": "FP8 weights with a scale per 128x128 block",
    "deepgemm": "DeepGEMM's experts (with fp8) instead of Triton's",
    "dbo": "dual batch overlap: two operations open at once",
    "v2fix": "deepep_v2: name an expert of another rank instead of -1",
    "serve": "`vllm serve` and clients over HTTP, instead of LLM",
    "kill": "with serve: end one engine without a word while all decode",
    "torchrun": "LLM with the external launcher, under torchrun",
    "profile": "a torch profiler trace of some decode steps, or with prefill of some prompts",
    "fork": "start engines by fork instead of spawn",
    "inproc": "the engine in the rank's own process",
}
FAULTS = {
    "rank": "the first choice of a rank's first token goes to an expert of another rank",
    "expert": "it goes to another expert of the same rank",
    "weight": "the token's first and last weights change places",
}
PLANS = {
    "smoke": ["agrs eager tiny 256 check score", "ll eager tiny 256 check score"],
    "first": [
        "agrs eager small 256 check score perf",
        "agrs graph small 256 check score perf profile",
        "ll eager small 256 check score perf faults",
        "ll graph small 256 check score perf profile",
        "ht eager small 256 check score perf faults profile",
        "v2 eager small 256 check score perf faults profile",
    ],
    "fp8": [
        "agrs eager small 256 fp8 check score",
        "ll eager small 256 fp8 check score faults",
        "ht eager small 256 fp8 check score faults",
        "v2 eager small 256 fp8 check score faults",
    ],
    "variants": [
        "ll graph small 256 dbo check",
        "ht eager small 256 dbo check",
        "ll graph small 1024 idle check perf",
        "v2 graph small 256 v2fix check perf",
    ],
    "serve": [
        "agrs graph small 256 serve",
        "ll graph small 256 serve",
        "ll graph small 256 torchrun check score idle",
    ],
    "kill": [f"{backend} eager small 256 serve kill" for backend in ("ll", "ht", "v2", "agrs")],
    "prefill": [
        "agrs eager small 4096 prefill",
        "ht eager small 4096 prefill check",
        "v2 eager small 4096 prefill check",
    ],
    "deep": [
        "agrs graph deep 256 fp8 deepgemm check perf",
        "ll graph deep 256 fp8 deepgemm check perf profile",
        "ht eager deep 4096 fp8 deepgemm prefill check",
        "v2 eager deep 4096 fp8 deepgemm prefill check",
        "agrs eager deep 4096 fp8 deepgemm prefill",
    ],
}


ALONE = {"serve", "torchrun"}  # flags of runs that start by themselves


@dataclass(frozen=True)
class Run:
    text: str
    backend: str
    mode: str
    model: str
    tokens: int
    flags: frozenset[str]

    @property
    def name(self) -> str:
        return "-".join(self.text.split())

    @property
    def needs_control(self) -> bool:
        return bool(self.flags & {"check", "faults"})

    @property
    def kin(self) -> tuple[str, bool]:
        """Runs of one kin compute the same: the model and how its weights are stored."""
        return self.model, "fp8" in self.flags


def groups(chosen: list[Run], most: int) -> list[list[Run]]:
    """Runs whose engines start at once, in order."""
    found: list[list[Run]] = []
    is_last_alone = False
    for run in chosen:
        is_alone = bool(run.flags & ALONE)
        if found and not is_alone and len(found[-1]) < most and not is_last_alone:
            found[-1].append(run)
        else:
            found.append([run])
        is_last_alone = is_alone
    return found


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option of argparse: whole numbers of at least that."""

    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"is {text!r}, allowed: whole numbers of at least {least}")
        return int(text)

    return parse


def one_of(what: str, value: str, allowed: object) -> None:
    names = list(allowed)  # type: ignore[call-overload]
    if value not in names:
        raise ValueError(f"{what} is {value!r}, allowed: {', '.join(map(str, names))}")


def parse(text: str, models: object) -> Run:
    """The run of a line. ValueError: the message names the word, its value and what is allowed."""
    words = text.split()
    if len(words) < 4:
        raise ValueError(f"--run is {text!r}, expected: BACKEND MODE MODEL TOKENS [FLAG...]")
    backend, mode, model, tokens, *flags = words
    one_of(f"--run {text!r}: BACKEND", backend, BACKENDS)
    one_of(f"--run {text!r}: MODE", mode, MODES)
    one_of(f"--run {text!r}: MODEL", model, models)
    low, high = TOKENS
    if not tokens.isdigit() or not low <= int(tokens) <= high:
        raise ValueError(f"--run {text!r}: TOKENS is {tokens!r}, allowed: {low}..{high}")
    for flag in flags:
        one_of(f"--run {text!r}: FLAG", flag, FLAGS)
    chosen = frozenset(flags)
    refusals = {
        "the flag faults needs a backend of DeepEP: ll, ht or v2": "faults" in chosen and backend == "agrs",
        "the flag faults needs MODE eager": "faults" in chosen and mode == "graph",
        "MODE graph needs the backend agrs, ll or v2": mode == "graph" and backend == "ht",
        "the flag dbo needs the backend ll or ht": "dbo" in chosen and backend not in ("ll", "ht"),
        "the flag deepgemm needs the flag fp8": "deepgemm" in chosen and "fp8" not in chosen,
        "the flag kill needs the flag serve": "kill" in chosen and "serve" not in chosen,
        "the flag serve goes with dbo, fp8, deepgemm, v2fix and kill alone": "serve" in chosen
        and bool(chosen - {"serve", "kill", "dbo", "fp8", "deepgemm", "v2fix"}),
        "the flags torchrun and inproc exclude each other": {"torchrun", "inproc"} <= chosen,
        "the flag v2fix needs the backend v2": "v2fix" in chosen and backend != "v2",
    }
    for message, is_wrong in refusals.items():
        if is_wrong:
            raise ValueError(f"--run {text!r}: {message}")
    return Run(text, backend, mode, model, int(tokens), chosen)


def lines_of(plan: str) -> list[str]:
    """The lines of plans, whose names commas separate."""
    lines = []
    for name in plan.split(","):
        one_of("--plan", name, PLANS)
        lines += PLANS[name]
    return lines
