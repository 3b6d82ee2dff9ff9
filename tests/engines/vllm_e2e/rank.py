# SPDX-License-Identifier: Apache-2.0
"""One rank of a run: a vLLM engine of its own, data parallel and expert parallel with the other ranks' engines."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_e2e import control, models, runs

SEQUENCES = 128  # at once, per rank
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128]
BATCHES = (1, 32, 128)
STEPS = {"eager": 24, "graph": 64}
CHECKED_SEQUENCES, CHECKED_STEPS = 16, 3
# vLLM's data-parallel ranks go on with dummy batches up to the next multiple of 32 steps.
IDLE_SECONDS = 2
TURN_LIMIT_S = 900  # a rank whose turn never comes ends by itself


def engine_arguments(run: runs.Run, ranks: int, model: str, traces: Path) -> dict[str, Any]:
    most_tokens = 8192 if run.tokens > 2048 else 2048
    arguments: dict[str, Any] = {
        "model": model,
        "tokenizer": model,
        "skip_tokenizer_init": True,
        "load_format": control.LOAD_FORMAT,
        "dtype": "bfloat16",
        "seed": 0,
        "tensor_parallel_size": 1,
        "enable_expert_parallel": True,
        "all2all_backend": runs.BACKENDS[run.backend],
        "max_model_len": most_tokens,
        "max_num_seqs": min(SEQUENCES, run.tokens),
        "max_num_batched_tokens": run.tokens,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.1,  # at the start so much has to be free, which other runs' engines share
        "disable_log_stats": True,
        "disable_custom_all_reduce": True,
        "enforce_eager": run.mode == "eager",
        "distributed_executor_backend": "uni",
    }
    if "torchrun" in run.flags:
        arguments |= {"distributed_executor_backend": "external_launcher", "data_parallel_size": ranks}
    if run.mode == "graph":  # whole decode steps, without torch.compile
        sizes = [size for size in CAPTURED if size <= run.tokens]
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        arguments["compilation_config"] = graphs
    if "profile" in run.flags:
        arguments["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
        }
    if "dbo" in run.flags:
        arguments |= {"enable_dbo": True, "dbo_decode_token_threshold": 8, "dbo_prefill_token_threshold": 32}
        # vLLM 0.26 pads the second half of a prefill to other ranks' tokens. FlashAttention 3 refuses that
        # ("batch_size must be equal to batch_size_k").
        arguments["attention_backend"] = "TRITON_ATTN"
    return arguments


def prompts_of(rank: int, number: int, length: int, what: str) -> list[list[int]]:
    """Token ids that differ from prompt to prompt and rank to rank, the same in each run."""
    source = random.Random(f"{what}/{rank}/{number}/{length}")
    return [[source.randrange(2, models.VOCABULARY) for _ in range(length)] for _ in range(number)]


@dataclass
class Timing:
    """When tokens came, in seconds since the requests were made."""

    times: list[list[float]] = field(default_factory=list)
    total_s: float = 0.0

    def first(self) -> list[float]:
        return [times[0] for times in self.times if times]

    def gaps(self) -> list[float]:
        """Between tokens of a sequence, without its first two."""
        return [after - before for times in self.times for before, after in zip(times[1:], times[2:], strict=False)]

    def rate(self) -> float:
        """Tokens per second, from the time when the last sequence had its first token until the first one ended."""
        begin, end = max(self.first()), min(times[-1] for times in self.times)
        inside = sum(begin < moment <= end for times in self.times for moment in times)
        return inside / (end - begin) if end > begin else 0.0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Session:
    def __init__(self, options: argparse.Namespace) -> None:
        self.begin = time.monotonic()
        self.run = runs.parse(options.line, models.MODELS)
        self.rank, self.ranks = options.rank if options.rank >= 0 else int(os.environ["RANK"]), options.ranks
        self.out = Path(options.out)
        self.result: dict[str, Any] = {"run": self.run.text, "rank": self.rank}
        self.options = options
        self.meetings = 0

    def say(self, text: str) -> None:
        print(f"[rank {self.rank}, {time.monotonic() - self.begin:5.1f} s] {text}", flush=True)

    def save(self) -> None:
        control.write(self.out / f"rank{self.rank}.json", json.dumps(self.result))

    def start(self) -> None:
        import torch.distributed as dist
        from vllm import LLM

        self.store = dist.TCPStore("127.0.0.1", self.options.store_port, self.ranks, self.rank == 0)
        self.say("imported")
        self.llm = LLM(**engine_arguments(self.run, self.ranks, self.options.model, self.out / "traces"))
        self.result["ready_s"] = time.monotonic() - self.begin
        self.say("the engine is ready")
        self.save()

    def wait_for_turn(self) -> None:
        """The engines of several runs start at once, and then work one run after the other."""
        deadline = time.monotonic() + TURN_LIMIT_S
        while not (self.out / control.TURN).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no turn within {TURN_LIMIT_S} s")
            time.sleep(0.05)
        self.say("its turn")

    def meet(self) -> None:
        """All ranks come here before one goes on. The store is this program's own."""
        key = f"meeting{self.meetings}"
        self.meetings += 1
        self.store.add(key, 1)
        deadline = time.monotonic() + 300
        while int(self.store.add(key, 0)) < self.ranks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all {self.ranks} ranks came to meeting {key} within 300 s")
            time.sleep(0.0005)

    def order(self, words: str) -> None:
        """What all engines do from now on."""
        if not self.run.needs_control:
            return
        self.meet()
        if self.rank == 0:
            control.write(Path(os.environ[control.VARIABLE]), words)
        self.meet()

    # ---- requests ----

    def generate(self, prompts: list[list[int]], **arguments: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **arguments)
        self.meet()
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def timed(self, prompts: list[list[int]], max_tokens: int) -> Timing:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=max_tokens,
            output_kind=RequestOutputKind.DELTA,
        )
        engine, found = self.llm.llm_engine, Timing()
        numbers: dict[str, int] = {}
        self.meet()
        begin = time.monotonic()
        for number, ids in enumerate(prompts):
            name = f"timed-{self.meetings}-{number}"
            numbers[name] = number
            found.times.append([])
            engine.add_request(name, tokens_input(ids), params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.monotonic() - begin
            for output in outputs:
                number = numbers[output.request_id]
                found.times[number] += [now] * len(output.outputs[0].token_ids)
        found.total_s = time.monotonic() - begin
        return found

    # ---- parts of a run ----

    def check(self) -> None:
        """A prefill and a few decode steps, compared layer by layer. In a run with faults once more with each."""
        prompts = prompts_of(self.rank, CHECKED_SEQUENCES, 12, "check")
        if "idle" in self.run.flags and self.rank == 0:
            prompts = prompts[:1]
        self.generate(prompts, max_tokens=CHECKED_STEPS + 1)  # compiles kernels
        for fault in ("", *(runs.FAULTS if "faults" in self.run.flags else ())):
            self.order(f"check fault={fault}")
            steps = 1 if len(prompts) == 1 else CHECKED_STEPS + 1
            self.generate(prompts, max_tokens=steps)
            self.order("")
        self.say("checked")

    def scores(self) -> list[float]:
        """Log-probabilities of the tokens of a fixed text."""
        prompts = prompts_of(self.rank, 8, 96, "score")
        made = self.generate(prompts, max_tokens=1, prompt_logprobs=1)
        scores = []
        for ids, one in zip(prompts, made, strict=True):
            entries = one.prompt_logprobs
            scores += [float(entries[position][ids[position]].logprob) for position in range(1, len(ids))]
        return scores

    def score(self) -> None:
        """Where engines can be told, also with one rounding more in each MoE layer and with each fault."""
        self.result["scores"] = scores = self.scores()
        faults = [control.ROUNDING, *(runs.FAULTS if "faults" in self.run.flags else ())]
        for fault in faults if self.run.needs_control else ():
            self.order(f"fault={fault}")
            self.result.setdefault("scores_with", {})[fault] = self.scores()
            self.order("")
        made = self.generate(prompts_of(self.rank, CHECKED_SEQUENCES, 24, "tokens"), max_tokens=32, logprobs=1)
        tokens = [list(one.outputs[0].token_ids) for one in made]
        chances = [
            [float(entry[token].logprob) for token, entry in zip(ids, one.outputs[0].logprobs, strict=True)]
            for ids, one in zip(tokens, made, strict=True)
        ]
        self.result |= {"tokens": tokens, "token_scores": chances}
        self.say(f"scored {len(scores)} positions, generated {sum(map(len, tokens))} tokens")
        self.save()

    def decode(self) -> None:
        figures = self.result.setdefault("decode", {})
        for batch in (batch for batch in BATCHES if batch <= self.run.tokens):
            prompts = prompts_of(self.rank, batch, 16, "decode")
            if "idle" in self.run.flags and self.rank == 0:
                self.generate(prompts[:1], max_tokens=1)  # compiles kernels, with the others
                self.timed(prompts[:1], 1)
                continue
            self.generate(prompts, max_tokens=4)
            timing = self.timed(prompts, STEPS[self.run.mode])
            figures[str(batch)] = {
                "tokens_per_s": timing.rate(),
                "gap_p50_ms": 1e3 * statistics.median(timing.gaps()),
                "gap_p99_ms": 1e3 * percentile(timing.gaps(), 0.99),
                "first_p50_ms": 1e3 * statistics.median(timing.first()),
                "first_p99_ms": 1e3 * percentile(timing.first(), 0.99),
            }
            self.say(f"decode, {batch} sequences: {timing.rate():.0f} tokens/s, all steps {timing.total_s:.2f} s")
            self.save()

    def prefill(self) -> None:
        """Prompts of at most a step; the time is that until the last one's token, without the dummy batches behind."""
        length = min(self.run.tokens, 4096)
        prompts = prompts_of(self.rank, 4, length, "prefill")
        self.generate(prompts[:1], max_tokens=1)
        timings = []
        for _ in range(2):
            time.sleep(IDLE_SECONDS)
            timings.append(self.timed(prompts, 1))
        best = min(max(timing.first()) for timing in timings)
        self.result["prefill"] = {
            "tokens_per_s": len(prompts) * length / best,
            "first_p50_ms": 1e3 * statistics.median(timings[-1].first()),
        }
        self.say(f"prefill, {len(prompts)} x {length} tokens: {1e3 * best:.0f} ms")
        self.save()

    def profile(self) -> None:
        of_prefill = "prefill" in self.run.flags
        if of_prefill:
            prompts = prompts_of(self.rank, 4, min(self.run.tokens, 4096), "prefill")
        else:
            prompts = prompts_of(self.rank, 32, 16, "decode")
        self.generate(prompts, max_tokens=1 if of_prefill else 4)
        self.meet()
        self.llm.start_profile()
        self.generate(prompts, max_tokens=1 if of_prefill else 8)
        self.llm.stop_profile()
        self.say("profiled")

    def stop(self) -> None:
        self.result["done"] = True
        self.save()
        self.meet()
        begin = time.monotonic()
        del self.llm
        gc.collect()
        self.result["stop_s"] = time.monotonic() - begin
        self.save()
        self.say(f"shut down in {self.result['stop_s']:.1f} s")


def libraries() -> list[str]:
    """The NCCLs and the Crossdock of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "nccl" in line and ".so" in line})


def main(options: argparse.Namespace) -> int:
    session = Session(options)
    session.start()
    session.wait_for_turn()
    parts = {
        "check": session.check,
        "score": session.score,
        "perf": session.decode,
        "prefill": session.prefill,
        "profile": session.profile,
    }
    for flag, part in parts.items():
        if flag in session.run.flags or (flag == "check" and "faults" in session.run.flags):
            part()
    if session.rank == 0:
        session.say("libraries: " + " ".join(libraries()))
    session.stop()
    return 0
