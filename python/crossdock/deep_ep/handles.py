# SPDX-License-Identifier: Apache-2.0
"""What dispatches of normal mode and of ElasticBuffer return for their combines and repetitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from crossdock.copies import Uncopied
from crossdock.deep_ep.agreement import Agreement


class LazyTuple(Uncopied, tuple[Any, ...]):
    """A handle with items that are hardly ever read: they are made on access, where a placeholder lies."""

    __slots__ = ()

    _remedy = "dispatch again, which returns another one"
    _placeholder: ClassVar[type] = type(...)

    def _made(self, place: int) -> Any:
        """The item."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        found = super().__getitem__(index)
        return self._made(index % len(self)) if isinstance(found, self._placeholder) else found


class DispatchHandle(LazyTuple):
    """What a fresh dispatch in normal mode returns as its handle: a tuple of 6, or of 10 on several nodes.

    Items: one node: 0 [R, R] int32, column r has the rows of rank r from sources 0 .. s; 3 [N] int32, tokens of the
    sources; 4 [T, R] bool. Several nodes: 0 [T, R] bool; -4 [R] int32, rows of this rank from sources 0 .. s.
    """

    agreed: Agreement | None  # None: the device alone knows the counts
    _prefix: torch.Tensor | None = None

    def _made(self, place: int) -> torch.Tensor | None:
        if self._prefix is None and self.agreed is not None:
            sums = np.cumsum(self.agreed.rank_counts(), axis=0, dtype=np.int32)
            self._prefix = torch.tensor(sums, dtype=torch.int32, device=self[3].device)
        return self._prefix


@dataclass
class EPHandle(Uncopied):
    """The handle of a dispatch, for combines and cached dispatches; plain values and tensors."""

    _remedy = "dispatch again, which returns another one"

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    token_metadata_at_forward: torch.Tensor | None = None
    channel_linked_list: torch.Tensor | None = None
    _lease: Any = field(default=None, repr=False)  # the library's own state, independent of the handle's tensors

    def __copy__(self) -> EPHandle:
        return replace(self)

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """Opaque: the routing, which decides the slots."""
        return self.topk_idx
