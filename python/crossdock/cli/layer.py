# SPDX-License-Identifier: Apache-2.0
"""Shared by demo and bench: the low-latency layer of one rank, with its arrays."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

import crossdock as ep

Array = np.ndarray[Any, Any]
RUNNERS: dict[str, Callable[..., list[Any]]] = {"threads": ep.run_threads, "processes": ep.run_processes}


def at_least(least: int) -> Callable[[str], int]:
    """An argument's type: a whole number that is not smaller."""

    def parse(text: str) -> int:
        if not text.strip().removeprefix("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of {least} or more")
        return int(text)

    return parse


def add_backend_arguments(parser: argparse.ArgumentParser, ranks: int, hidden: int, experts: int, topk: int) -> None:
    parser.add_argument("--ranks", type=int, default=ranks, help=f"ranks ({ranks})")
    parser.add_argument("--backend", choices=RUNNERS, default="threads", help="how ranks run (threads)")
    parser.add_argument("--hidden", type=int, default=hidden, help=f"elements of a row, fp32 ({hidden})")
    parser.add_argument("--experts", type=int, default=experts, help=f"experts, a multiple of the ranks ({experts})")
    parser.add_argument("--topk", type=int, default=topk, help=f"experts per token ({topk})")
    parser.add_argument("--seed", type=at_least(0), default=1, help="seed of tokens and routing (1)")
    parser.add_argument("--json", default="", help="file for the results; - is the terminal")


def run_ranks(options: argparse.Namespace, program: Any, *arguments: Any) -> list[Any]:
    """program(communicator, options, *arguments) once per rank."""
    return RUNNERS[options.backend](options.ranks, program, options, *arguments)


class Layer:
    """Dispatch and combine of one rank, low latency, expert-major, uniformly routed."""

    def __init__(self, comm: ep.Communicator, options: argparse.Namespace, max_tokens: int) -> None:
        self.group = ep.Group(
            comm,
            num_experts=options.experts,
            max_dispatch_tokens_per_rank=max_tokens,
            max_token_bytes=options.hidden * 4,
        )
        self.options, self.rank, self.num_ranks = options, comm.rank, comm.num_ranks
        self.num_local = options.experts // comm.num_ranks
        self.received = np.zeros((self.num_local, comm.num_ranks * max_tokens, options.hidden), np.float32)
        self.counts = np.zeros(self.num_local, np.int32)
        self.handle = self.group.init_handle(ep.Layout.EXPERT_MAJOR, options.topk)

    def route(self, step: int, num_tokens: int) -> None:
        """New tokens, choices and weights of any rank."""
        self.tokens, self.topk_idx, self.weights = self.problem(self.rank, step, num_tokens)
        self.result = np.zeros_like(self.tokens)
        self.handle.update(self.topk_idx)
        self._inputs = ep.DispatchInputs(tokens=ep.Tensor(self.tokens))
        self._outputs = ep.DispatchOutputs(tokens=ep.Tensor(self.received))
        self._info = ep.LayoutInfo(expert_counters=ep.Tensor(self.counts))
        self._rows = ep.CombineInputs(tokens=ep.Tensor(self.received))
        self._home = ep.CombineOutputs(tokens=ep.Tensor(self.result), topk_weights=ep.Tensor(self.weights))

    def problem(self, rank: int, step: int, num_tokens: int) -> tuple[Array, Array, Array]:
        options = self.options
        random = np.random.default_rng([options.seed, step, rank])
        tokens = random.standard_normal((num_tokens, options.hidden), np.float32)
        scores = random.random((num_tokens, options.experts))
        topk_idx = np.argsort(-scores, axis=1)[:, : options.topk].astype(np.int64)
        return tokens, topk_idx, random.random((num_tokens, options.topk), np.float32)

    def dispatch(self) -> None:
        self.handle.dispatch(self._inputs, self._outputs, layout_info=self._info)

    def combine(self) -> None:
        self.handle.combine(self._rows, self._home)

    def close(self) -> None:
        self.handle.close()
        self.group.close()
