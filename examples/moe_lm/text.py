# SPDX-License-Identifier: Apache-2.0
"""Bytes of a real text: the reference manual that every Python carries for help(), about 0.7 MB."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor


class Text:
    """Batches of consecutive bytes; batch number s is the same in every run and for every number of ranks."""

    def __init__(self, length: int) -> None:
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def batch(self, step: int, num_sequences: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) [num_sequences, length], int64; a target is the byte after its input."""
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.bytes) - self.length - 1, (num_sequences,), generator=random)
        windows = torch.stack([self.bytes[start : start + self.length + 1] for start in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]
