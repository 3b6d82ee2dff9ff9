# SPDX-License-Identifier: Apache-2.0
"""Scales of rows as 8-bit floats, in the two forms that DeepEP's callers know."""

from __future__ import annotations

import torch

TRANSPOSED = "fp32, tokens side by side"  # [L, P, S] with strides (P*S, 1, P)
PACKED = "exponents, four in an int32, tokens side by side"  # [L, P, S / 4] with strides (P*S/4, 1, P)


class Scales:
    """Of one dispatch: the library delivers rows of fp32 scales, which finish() brings into the form of tensor."""

    __slots__ = ("_form", "rows", "tensor")

    def __init__(self, form: str, local: int, slots: int, num_scales: int, device: torch.device) -> None:
        self._form = form
        self.rows = torch.empty(local, slots, num_scales, dtype=torch.float32, device=device)
        packed = form == PACKED
        columns, dtype = (num_scales // 4, torch.int32) if packed else (num_scales, torch.float32)
        strides = (slots * columns, 1, slots)
        self.tensor = torch.empty_strided((local, slots, columns), strides, dtype=dtype, device=device)

    def finish(self) -> None:
        if self._form == PACKED:
            exponents = (self.rows.view(torch.int32) >> 23).to(torch.uint8)  # of powers of two
            self.tensor.copy_(exponents.view(torch.int32))
        else:
            self.tensor.copy_(self.rows)
