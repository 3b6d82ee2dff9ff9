# SPDX-License-Identifier: Apache-2.0
"""What all servers are asked over HTTP, with tokens instead of text."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sglang_e2e.configurations import CLIENTS
from vllm_e2e.models import VOCABULARY

HOST = "127.0.0.1"
LENGTHS = (4, 7, 12, 16, 23, 32, 48, 64, 96, 128, 160, 200) * 2  # of prompts
ALONE = 4  # of these also one after the other
ANSWER, LONG_ANSWER = 64, 128  # tokens
PASSES = 3  # over the requests that are timed
TEXTS, TEXT = 8, 96  # fixed texts, whose tokens' log-probabilities are compared
FIRST_TOKEN = 2  # 0 and 1 begin and end texts
Prompt = list[int]
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def random_prompts(lengths: tuple[int, ...], seed: int) -> list[Prompt]:
    source = random.Random(seed)
    return [[source.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)] for length in lengths]


def texts() -> list[Prompt]:
    return random_prompts((TEXT,) * TEXTS, seed=2)


def ask(port: int, method: str, path: str, body: object = None, timeout_s: float = 5) -> Any:
    """RuntimeError: the server answers with an error. Also OSError, HTTPException."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {content[:300].decode(errors='replace')}")
        return json.loads(content) if content else None
    finally:
        connection.close()


def is_ready(port: int) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError, ValueError):
        ask(port, "GET", "/health")
        return True
    return False


def at_once(call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """Calls that an error or Ctrl-C leaves behind end with the server."""
    pool = ThreadPoolExecutor(len(items))
    try:
        return list(pool.map(call, items))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Client:
    """Asks until a deadline, of time.monotonic()."""

    def __init__(self, port: int, deadline: float) -> None:
        self.port, self.deadline = port, deadline

    def generate(self, prompt: Prompt, count: int, **more: object) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, **more}
        answer: dict[str, Any] = ask(self.port, "POST", "/generate", body, max(0.1, self.deadline - time.monotonic()))
        if len(answer["output_ids"]) != count:
            raise RuntimeError(f"an answer has {len(answer['output_ids'])} tokens instead of {count}")
        return answer

    def answer(self, prompt: Prompt, count: int) -> list[int]:
        found: list[int] = self.generate(prompt, count)["output_ids"]
        return found

    def answers(self, prompts: list[Prompt], count: int) -> list[list[int]]:
        return at_once(lambda prompt: self.answer(prompt, count), prompts)

    def score(self, text: Prompt) -> list[float | None]:
        """Log-probabilities of all tokens of a text but the first. None: it is not a number."""
        answer = self.generate(text, 1, return_logprob=True, logprob_start_len=0)
        pairs = answer["meta_info"]["input_token_logprobs"]
        if [pair[1] for pair in pairs] != text:
            raise RuntimeError(f"log-probabilities are of {len(pairs)} other tokens than the {len(text)} of the text")
        return [pair[0] for pair in pairs[1:]]

    def scores(self) -> list[list[float | None]]:
        return at_once(self.score, texts())

    def tokens_per_s(self, count: int) -> float:
        """The best of some passes: a server may still compile a kernel, for a batch of a size it has not had."""
        prompts, passes = random_prompts((16,) * count, seed=3), []
        for _ in range(PASSES):
            begin = time.monotonic()
            self.answers(prompts, LONG_ANSWER)
            passes.append(time.monotonic() - begin)
        return count * LONG_ANSWER / min(passes)


def warm_up(client: Client) -> None:
    """As many and as long requests as those that count: they compile all kernels."""
    client.answer([FIRST_TOKEN] * 8, 4)
    client.scores()
    client.answers(random_prompts(LENGTHS, seed=1), 8)
    client.answers(random_prompts((16,) * CLIENTS, seed=3), 8)


def measure(client: Client) -> dict[str, Any]:
    prompts = random_prompts(LENGTHS, seed=1)
    return {
        "tokens": [client.answer(prompt, ANSWER) for prompt in prompts[:ALONE]] + client.answers(prompts, ANSWER),
        "scores": client.scores(),
        "tokens_per_s": {str(count): client.tokens_per_s(count) for count in (1, CLIENTS)},
    }
