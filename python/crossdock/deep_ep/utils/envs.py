# SPDX-License-Identifier: Apache-2.0
"""How tests start their ranks."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["dist_print", "init_dist", "init_seed"]


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """(rank, number of ranks, group), on WORLD_SIZE nodes, of which this is number RANK.

    They meet at MASTER_ADDR, MASTER_PORT; over NCCL where there are GPUs, a rank each, else over gloo.
    """
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '8361')}"
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    num_ranks, rank = nodes * num_local_ranks, node * num_local_ranks + local_rank
    dist.init_process_group("nccl" if has_gpus else "gloo", init_method=address, world_size=num_ranks, rank=rank)
    init_seed(seed + rank)
    return rank, num_ranks, dist.new_group(list(range(num_ranks)))


def init_seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def dist_print(text: str = "", once_in_node: bool = False) -> None:
    """Prints, by all ranks or the first alone, and waits for all."""
    if not once_in_node or dist.get_rank() == 0:
        print(text, flush=True)
    dist.barrier()
