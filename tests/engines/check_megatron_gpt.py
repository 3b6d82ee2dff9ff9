# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core trains a small MoE GPT on CPUs, a rank per process: the flex dispatcher over DeepEP beside the
all-to-all one.

    python tests/engines/check_megatron_gpt.py [OPTION...] [CASE...]

Losses and gradients agree, also where the run with flex goes on from a checkpoint, and the comparison of gradients sees
planted faults. These are the cases that gpu_megatron_gpt.py has for GPUs, whose options hold; megatron_cpu.py stands in
for CUDA.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ranks
import wheels

SHAPE = (
    "--layers 2 --hidden 64 --heads 4 --ffn 64 --experts 8 --topk 4 --batch 2 --length 64 --vocabulary 64 "
    "--learning-rate 3e-3 --steps 12"
)


def check() -> int:
    sys.argv[1:] = ["--device", "cpu", *SHAPE.split(), *(sys.argv[1:] or ["gradients", "losses"])]
    program = Path(__file__).with_name("gpu_megatron_gpt.py")
    return ranks.run_ranks(str(program), [wheels.folder(wheels.MEGATRON)], timeout_s=900)


if __name__ == "__main__":
    ranks.main("megatron_gpt", check)
