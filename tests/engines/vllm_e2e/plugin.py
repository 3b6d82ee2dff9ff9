# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads in each of its processes (entry point vllm.general_plugins).

It registers the load format of the random weights. In a worker that has loaded them, and if the run asks for it, it
compares MoE layers with plain loops, and plants faults in DeepEP's classes.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_e2e import control, faults, models, reference, weights

MOST_ROWS = 512  # of a step that are compared: the first and the last
GRAPH_SIZES = (8, 16)  # batches whose graphs keep what a layer got and gave
MOST_CAPTURES = 64  # of a layer


open_files: list[Any] = []


def say(text: str) -> None:
    print(f"[vllm_e2e] {text}", flush=True)


def register() -> None:
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if control.LOAD_FORMAT in _LOAD_FORMAT_TO_MODEL_LOADER or control.MODEL not in os.environ:
        return
    dump_stacks_on_request()
    register_model()
    if control.SHARED_GPUS in os.environ:
        share_gpus(int(os.environ[control.SHARED_GPUS]))

    @register_model_loader(control.LOAD_FORMAT)
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        @torch.no_grad()
        def load_weights(self, model: Any, model_config: Any) -> None:
            prepare_worker(model)


def dump_stacks_on_request() -> None:
    """At SIGUSR1 this process writes where its threads are."""
    name = f"stacks-rank{os.environ.get('VLLM_DP_RANK', 'x')}-{os.getpid()}.txt"
    file = open(Path(os.environ[control.FOLDER], name), "w")  # faulthandler keeps its number
    open_files.append(file)
    faulthandler.register(signal.SIGUSR1, file=file)


def register_model() -> None:
    """Under its own name. Otherwise vLLM starts a process that imports everything once more to look at the class."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    ModelRegistry.register_model("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM)


def share_gpus(number: int) -> None:
    """Local ranks take the GPUs in turn. vLLM's option --device-ids refuses to name a GPU twice."""
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.init_device

    def init_device(worker: Any) -> None:
        config = worker.parallel_config
        ranks = max(config.data_parallel_size, config.world_size)
        config.assigned_physical_gpu_ids = [rank % number for rank in range(ranks)]
        original(worker)

    Worker.init_device = init_device


def prepare_worker(model: Any) -> None:
    from vllm.distributed import get_ep_group

    name, _, precision = os.environ[control.MODEL].partition("-")
    made = weights.Weights(models.MODELS[name], precision == "fp8")
    ep_rank = get_ep_group().rank_in_group
    num_bytes = 0
    for parameter_name, parameter in model.named_parameters():
        num_bytes += parameter.numel() * parameter.element_size()
        if parameter_name.rsplit(".", 1)[-1] in weights.EXPERT_PARTS:
            made.fill_experts(parameter_name, parameter.data, ep_rank * parameter.shape[0])
        else:
            made.fill(parameter_name, parameter.data)
    say(f"weights: {num_bytes / 2**30:.2f} GiB on EP rank {ep_rank}")
    if os.environ.get(control.V2_FIX) == "1":
        name_experts_of_other_ranks()
    if control.VARIABLE in os.environ:
        Checker(made, ep_rank).install()


def name_experts_of_other_ranks() -> None:
    """For deepep_v2 with CUDA graphs: vLLM 0.26 marks choices of other ranks by -1, for which TritonExperts writes
    nothing, but sums up what lies there. An expert of another rank, as deepep_high_throughput names, counts as zero.
    """
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_v2

    original = deepep_v2._globalize_recv_topk_idx

    def globalised(ids: torch.Tensor, ends: torch.Tensor, offset: int, num_experts: int) -> torch.Tensor:
        ids = original(ids, ends, offset, num_experts)
        return torch.where(ids < 0, num_experts - 1 if offset == 0 else 0, ids)

    deepep_v2._globalize_recv_topk_idx = globalised


class Captures:
    """What captured calls of one layer got and gave, in memory that each replay writes again.

    It keeps all of it: memory that nobody holds would belong to later graphs as well.
    """

    def __init__(self, device: torch.device) -> None:
        self.replays = torch.zeros(MOST_CAPTURES, dtype=torch.int64, device=device)  # counted by the graphs
        self.seen = [0] * MOST_CAPTURES
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def keep(self, *tensors: torch.Tensor) -> None:
        self.replays[len(self.calls)].add_(1)
        self.calls.append(tensors)

    def replayed(self) -> list[tuple[torch.Tensor, ...]]:
        """The calls that were replayed since this was asked last."""
        replays = self.replays.tolist()
        changed = [index for index in range(len(self.calls)) if replays[index] != self.seen[index]]
        self.seen = replays
        return [self.calls[index] for index in changed]


class Checker:
    """Of one rank. It says nothing to other ranks, so it cannot make them wait for each other."""

    def __init__(self, made: weights.Weights, ep_rank: int) -> None:
        self.weights, self.ep_rank = made, ep_rank
        self.control = control.Control(Path(os.environ[control.VARIABLE]))
        self.out = Path(os.environ[control.FOLDER]) / f"check-rank{ep_rank}.jsonl"
        self.limit = reference.limit_of(made.is_fp8)
        self.lock = threading.Lock()  # dual batch overlap runs a layer in two threads
        self.captures: dict[int, Captures] = {}  # by layer
        self.verified: set[int] = set()
        self.step = 0

    def install(self) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.v1.worker.gpu_worker import Worker

        RoutedExperts.forward_modular = self.wrap_layer(RoutedExperts.forward_modular)
        for name in ("execute_model", "execute_dummy_batch"):
            setattr(Worker, name, self.wrap_step(getattr(Worker, name)))
        try:
            import deep_ep
        except ImportError:
            return
        deep_ep.Buffer = faults.planted_buffer(deep_ep.Buffer, lambda: self.control.fault)
        if hasattr(deep_ep, "ElasticBuffer"):
            deep_ep.ElasticBuffer = faults.planted_elastic_buffer(deep_ep.ElasticBuffer, lambda: self.control.fault)

    # ---- steps ----

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(worker: Any, *arguments: Any, **named: Any) -> Any:
            self.control.refresh()
            self.step += 1
            result = original(worker, *arguments, **named)
            if self.control.is_checking:
                self.check_replays()
            return result

        return step

    @torch.inference_mode()
    def check_replays(self) -> None:
        torch.cuda.synchronize()
        for layer, captures in sorted(self.captures.items()):
            for tensors in captures.replayed() if captures.calls else []:
                self.check(layer, *tensors, is_graph=True)

    # ---- layers ----

    def wrap_layer(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def forward(
            layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *rest: Any, **named: Any
        ) -> torch.Tensor:
            number = weights.layer_of(layer.layer_name + ".")
            if torch.cuda.is_current_stream_capturing():
                captures = self.captures.get(number)
                keeps = captures is not None and len(x) in GRAPH_SIZES and len(captures.calls) < MOST_CAPTURES
                before = (x.clone(), topk_ids.clone(), topk_weights.clone()) if keeps else ()
                output = original(layer, x, topk_weights, topk_ids, *rest, **named)
                if captures is not None and keeps:
                    captures.keep(*before, output.clone())
                return output
            if number not in self.captures:  # outside of a capture, whose memory each replay would set to zero
                self.captures[number] = Captures(x.device)
            if not self.control.is_checking:
                output = original(layer, x, topk_weights, topk_ids, *rest, **named)
                return reference.rounded_again(output) if self.control.fault == control.ROUNDING else output
            before = x.clone()
            output = original(layer, x, topk_weights, topk_ids, *rest, **named)
            self.verify_weights(number, layer)
            self.check(number, before, topk_ids, topk_weights, output, is_graph=False)
            return output

        return forward

    def check(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
        is_graph: bool,
    ) -> None:
        tensors = (x, ids, topk_weights, output)
        if len(x) > MOST_ROWS:
            tensors = tuple(torch.cat([one[: MOST_ROWS // 2], one[-MOST_ROWS // 2 :]]) for one in tensors)
        is_number = tensors[0].isfinite().all(1)  # padding of a captured batch may be anything
        x, ids, topk_weights, output = (one[is_number] for one in tensors)

        def expert(number: int) -> weights.Expert:
            return self.weights.expert(layer, number, x.device)

        expected = reference.moe_layer(x, ids, topk_weights, expert, self.weights.is_fp8)
        found = reference.compare(output, expected, self.limit)
        self.note(
            layer=layer,
            step=self.step,
            fault=self.control.fault,
            graph=is_graph,
            tokens=found.num_tokens,
            worst=found.worst,
            token=found.worst_token,
            wrong=found.num_wrong,
            median=found.median,
            limit=self.limit,
        )

    def verify_weights(self, number: int, layer: Any) -> None:
        """That a layer still has the weights that were made for it, in the order of the plain loops."""
        if number in self.verified:
            return
        self.verified.add(number)
        local = layer.w13_weight.shape[0]
        for index in (0, local - 1):
            made = self.weights.expert(number, self.ep_rank * local + index, layer.w13_weight.device)
            for name, own in (("w13_weight", made.w13), ("w2_weight", made.w2)):
                held = getattr(layer, name)[index]
                if held.shape != own.shape or not torch.equal(held.float(), own.float()):
                    self.note(layer=number, problem=f"{name} of local expert {index} is not as it was made")

    def note(self, **values: Any) -> None:
        with self.lock, self.out.open("a") as file:
            file.write(json.dumps(values) + "\n")
