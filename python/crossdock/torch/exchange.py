# SPDX-License-Identifier: Apache-2.0
"""Exchange: a group with one handle per dispatch that a training step keeps for its backward pass."""

from __future__ import annotations

import contextlib
import numbers
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from crossdock._core import (
    Algorithm,
    CombineInputs,
    CombineOutputs,
    CombineQuantizationRecipe,
    Communicator,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuantizationRecipe,
    Group,
    Handle,
    Layout,
    PassDir,
)
from crossdock.copies import Shared
from crossdock.errors import Error, InvalidArgument, InvalidUsage, renamed
from crossdock.torch import operators, quantise
from crossdock.torch.symmetric import SymmetricMemory

# An exchange's names for what the library's errors name.
_NAMES_OF_GROUP = {
    "config.max_dispatch_tokens_per_rank": "max_tokens",
    "config.max_recv_tokens_per_rank": "max_rows",
    "config.max_token_bytes": "the bytes of a row (hidden elements of dtype)",
    "max_dispatch_tokens_per_rank": "max_tokens",
    "max_recv_tokens_per_rank": "max_rows",
    "max_token_bytes": "the bytes of a row (hidden elements of dtype)",
    "config.": "",
}
_NAMES_OF_CALLS = {
    "max_dispatch_tokens_per_rank": "max_tokens",
    "max_recv_tokens_per_rank": "max_rows",
    "max_token_bytes": "those of hidden elements of dtype",
    "outputs.tokens has": "tokens has",
    "inputs.": "",
}
_NAMES_OF_COMBINE = {"inputs.tokens": "rows"} | _NAMES_OF_CALLS
# The fields of GroupConfig that an exchange sets, and its arguments that they come from.
_ARGUMENTS_OF_FIELDS = {
    "max_dispatch_tokens_per_rank": "max_tokens",
    "max_recv_tokens_per_rank": "max_rows",
    "max_token_bytes": "hidden",
}

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of tokens
MOST_IN_FLIGHT = 1 << 16


def _check_number(name: str, value: object, least: int, most: int | None = None) -> None:
    if not isinstance(value, numbers.Integral) or value < least or (most is not None and int(value) > most):
        allowed = f"from {least} on" if most is None else f"from {least} to {most}"
        raise InvalidArgument(f"{name} is {value!r}, allowed: whole numbers {allowed}")


def _check_fields(algorithm: Algorithm, fields: Mapping[str, Any]) -> None:
    for name, argument in _ARGUMENTS_OF_FIELDS.items():
        if name in fields:
            raise InvalidArgument(f"{name} is {fields[name]!r}, an Exchange sets it: pass {argument} instead")
    if fields.get("enable_mask") and algorithm == Algorithm.HIGH_THROUGHPUT:
        raise InvalidUsage("enable_mask is for low latency, allowed in high throughput: ht_masks")
    if fields.get("invariant"):
        raise InvalidUsage(
            "invariant is True, allowed: False: the caller adds up an exchange's rows. TokenSwitch with layout "
            '"expert_major" can be invariant'
        )


def _expect_same(comm: Communicator, **values: int) -> None:
    """InvalidUsage: a rank has another value. For what the group does not compare."""
    parts = comm.all_gather(b"".join(value.to_bytes(8, "little") for value in values.values()))
    for i, (name, value) in enumerate(values.items()):
        first, *others = (type(value)(int.from_bytes(part[8 * i : 8 * i + 8], "little")) for part in parts)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise InvalidUsage(f"{name} differs between ranks: {first} on rank 0, {other} on rank {rank}")


def _check_recipes(
    algorithm: Algorithm,
    dtype: torch.dtype,
    hidden: int,
    recipe: DispatchQuantizationRecipe,
    combine_recipe: CombineQuantizationRecipe,
    zero_copy: bool,
) -> None:
    for name, value, kind in (
        ("algorithm", algorithm, Algorithm),
        ("recipe", recipe, DispatchQuantizationRecipe),
        ("combine_recipe", combine_recipe, CombineQuantizationRecipe),
    ):
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name} is {value!r}, expected one of crossdock.{kind.__name__}")
    if recipe not in (DispatchQuantizationRecipe.NONE, DispatchQuantizationRecipe.DS_FP8E3M4):
        raise InvalidArgument(f"recipe is {recipe.name}, allowed here: NONE, DS_FP8E3M4 (FWD is for Handle.dispatch)")
    if recipe != DispatchQuantizationRecipe.NONE:
        if dtype != torch.bfloat16 or hidden % quantise.BLOCK != 0:
            raise InvalidArgument(
                f"dtype is {dtype} and hidden {hidden}, allowed with recipe DS_FP8E3M4: torch.bfloat16, multiples of "
                f"{quantise.BLOCK}"
            )
        if zero_copy:
            raise InvalidUsage("zero_copy and recipe DS_FP8E3M4 exclude each other: rows that arrive are decoded")
    if combine_recipe not in (CombineQuantizationRecipe.NONE, CombineQuantizationRecipe.NVFP4):
        raise InvalidArgument(
            f"combine_recipe is {combine_recipe.name}, allowed here: NONE, NVFP4 (MXFP8 is for expert-major rows)"
        )
    if combine_recipe != CombineQuantizationRecipe.NONE:
        if algorithm != Algorithm.LOW_LATENCY or dtype != torch.bfloat16 or hidden % 32 != 0:
            raise InvalidArgument(
                f"algorithm is {algorithm.name}, dtype {dtype} and hidden {hidden}, allowed with combine_recipe NVFP4: "
                "LOW_LATENCY, torch.bfloat16, multiples of 32"
            )


class Received(NamedTuple):
    """The result of a dispatch: N rows for this rank's experts. Only rows that have an expert count.

    - rows [N, H]: unused ones are zero. With zero_copy they hold what was there before.
    - weights [N, K] fp32: the routing weights.
    - experts [N, K] int64: ids of local experts (0 .. L-1), or -1. Unused rows have -1 everywhere.
    - ticket: the dispatch's number, for the combine that belongs to it.
    - num_tokens: B, the number of this rank's own tokens.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    ticket: torch.Tensor
    num_tokens: int


class Exchange(Shared):
    """Dispatch and combine with gradients between the ranks of a communicator.

    Making it and closing it are collective. Use it as a context manager.

    - comm: a Communicator, or what Communicator.adopt takes.
    - num_experts: E, of all ranks. num_topk: K choices per token. max_tokens: M, the most tokens per rank and step.
      hidden: H elements per row.
    - algorithm: LOW_LATENCY receives N = R*M rows. HIGH_THROUGHPUT receives N = max_rows rows.
    - dtype: of the tokens, bf16, fp16 or fp32.
    - max_rows: high throughput; by default R*M, the most that can come.
    - max_in_flight: how many dispatches may wait for their backward pass: layers times micro-batches. At most 65536.
    - recipe: DS_FP8E3M4 sends rows to their experts as 8-bit floats with a scale per 128 elements. They arrive as
      dtype again. It needs bf16, and H a multiple of 128.
    - combine_recipe: NVFP4 returns rows as 4-bit floats. It needs low latency, bf16, and H a multiple of 32.
    - zero_copy: peers write rows directly into this exchange's memory. It excludes recipe. Dispatch n + max_in_flight
      overwrites the received.rows of dispatch n.
    - fields: further ones of GroupConfig, and ht_masks, for masks in high throughput.

    Gradients are never quantised.
    A token must not name an expert twice: high throughput then keeps one of the weights, and the gradients do not say
    which.
    All ranks make the same calls in the same order. In the backward pass autograd ensures this if the ranks run the
    same model.
    A CUDA graph captures the calls with their tensors. Replays read what the tensors hold at that time. A captured
    dispatch permanently occupies one of max_in_flight.
    Copies of a module share its exchange: copy.deepcopy returns the same one. So their dispatches count together, and
    closing it closes it for all. It cannot be pickled.
    """

    _remedy = (
        "save the module's state_dict(), and make the Exchange anew: Exchange(communicator_of(process_group), ...)"
    )

    def __init__(
        self,
        comm: Communicator | Any,
        *,
        num_experts: int,
        num_topk: int,
        max_tokens: int,
        hidden: int,
        algorithm: Algorithm = Algorithm.HIGH_THROUGHPUT,
        dtype: torch.dtype = torch.float32,
        max_rows: int = 0,
        max_in_flight: int = 8,
        recipe: DispatchQuantizationRecipe = DispatchQuantizationRecipe.NONE,
        combine_recipe: CombineQuantizationRecipe = CombineQuantizationRecipe.NONE,
        zero_copy: bool = False,
        **fields: Any,
    ) -> None:
        sizes = {"num_experts": num_experts, "num_topk": num_topk, "max_tokens": max_tokens, "hidden": hidden}
        for name, value in sizes.items():
            _check_number(name, value, 1)
        _check_number("max_in_flight", max_in_flight, 1, MOST_IN_FLIGHT)
        _check_number("max_rows", max_rows, 0)
        if not isinstance(zero_copy, bool):
            raise InvalidArgument(f"zero_copy is {zero_copy!r}, allowed: True, False")
        _check_fields(algorithm, fields)
        if dtype not in DTYPES:
            raise InvalidArgument(f"dtype is {dtype}, allowed: {', '.join(map(str, DTYPES))}")
        if hidden * dtype.itemsize % 16 != 0:
            least = 16 // dtype.itemsize
            raise InvalidArgument(f"hidden is {hidden}, allowed with {dtype}: multiples of {least} (rows of 16 bytes)")
        _check_recipes(algorithm, dtype, hidden, recipe, combine_recipe, zero_copy)
        comm = comm if isinstance(comm, Communicator) else Communicator.adopt(comm)
        self.algorithm = algorithm
        self.recipe, self.combine_recipe = recipe, combine_recipe
        self.dtype = dtype
        self.num_topk = num_topk
        self.max_tokens = max_tokens
        self.hidden = hidden
        # Gradients of weights travel as rows of their own in low latency, so they must fit, too.
        self._weight_columns = -(-num_topk // 4) * 4
        row_bytes = max(hidden * dtype.itemsize, self._weight_columns * 4 if self.is_low_latency else 0)
        if not self.is_low_latency:
            fields = {
                "max_recv_tokens_per_rank": max_rows or comm.num_ranks * max_tokens,
                "num_topk": num_topk,
            } | fields
        with renamed(_NAMES_OF_GROUP):
            self.group = Group(
                comm,
                algorithm=algorithm,
                num_experts=num_experts,
                max_dispatch_tokens_per_rank=max_tokens,
                max_token_bytes=-(-row_bytes // 16) * 16,
                **dict[str, Any](fields),
            )
        self.rank, self.num_ranks = self.group.rank, self.group.num_ranks
        self._device_type = "cpu" if comm.is_cpu else "cuda"
        self.num_local_experts = num_experts // self.num_ranks
        self.num_rows = self.num_ranks * max_tokens if self.is_low_latency else fields["max_recv_tokens_per_rank"]
        self._handles: list[Handle] = []
        self._memory: SymmetricMemory | None = None
        self._places: list[torch.Tensor] = []
        # The dispatch that each handle serves; a ticket holds its number.
        self._numbers = [-1] * max_in_flight
        self._num_dispatches = 0
        # The receive halves of start_dispatch that have not been called, by handle.
        self._open_halves: dict[int, weakref.ref[Callable[[], Any]]] = {}
        self._number = operators.register(self)
        self._forget = weakref.finalize(self, operators.forget, self._number)
        self.key = operators.tensor_of(self._number)
        try:
            self._fill(comm, max_in_flight, zero_copy)
        except BaseException:
            # Nobody else has the group; why it failed is what is reported, not that it could not be closed either.
            with contextlib.suppress(Error):
                self.close()
            raise

    def _fill(self, comm: Communicator, max_in_flight: int, zero_copy: bool) -> None:
        _expect_same(comm, max_in_flight=int(max_in_flight), zero_copy=zero_copy)
        for _ in range(max_in_flight):
            self._handles.append(self._make_handle())
        if zero_copy:
            shape = (*self._row_shape(), self.hidden)
            self._memory = SymmetricMemory(comm, max_in_flight * SymmetricMemory.bytes_of(shape, self.dtype))
            for _ in range(max_in_flight):
                self._places.append(self._memory.empty(*shape, dtype=self.dtype))

    def _make_handle(self) -> Handle:
        return self.group.init_handle(Layout.RANK_MAJOR if self.is_low_latency else Layout.FLAT, self.num_topk)

    @property
    def is_low_latency(self) -> bool:
        return self.algorithm == Algorithm.LOW_LATENCY

    def dispatch(self, tokens: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Received:
        """Sends tokens [B, H] to the ranks of their experts.

        topk_idx is [B, K] int32 or int64, topk_weights [B, K] fp32. Tokens and topk_weights get gradients.
        """
        operators.expect_dense(self._device_type, tokens=tokens, topk_idx=topk_idx, topk_weights=topk_weights)
        operators.refuse_forward_mode(tokens, topk_weights)
        rows, weights, experts, ticket = torch.ops.crossdock.dispatch(
            tokens, topk_idx, topk_weights, self.key, self.num_rows
        )
        return Received(rows, weights, experts, ticket, tokens.shape[0])

    def start_dispatch(
        self, tokens: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> Callable[[], Received]:
        """The send half of a dispatch. It returns the receive half as a function, which you call once.

        - On GPUs, work that you enqueue between the halves runs while rows travel.
        - Between the halves, call nothing of this exchange but the receive halves of other dispatches.
        - Two dispatches can wait for their receive halves. A dispatch whose function is dropped is given up.
        - High throughput has no halves: the first call does everything.
        - Gradients are those of dispatch. torch.compile cannot compile this call, as it does dispatch.
        """
        operators.expect_dense(self._device_type, tokens=tokens, topk_idx=topk_idx, topk_weights=topk_weights)
        operators.refuse_forward_mode(tokens, topk_weights)
        # As torch does for operators: memory is sent, which does not hold the elements if the negative bit is set.
        sent = (part.detach().resolve_neg() for part in (tokens, topk_idx, topk_weights))
        finish = self._dispatch(*sent, is_split=True)
        return lambda: Received(*operators.receive(tokens, topk_weights, finish), tokens.shape[0])

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        """Returns rows [N, H] to their source ranks, and there their sums [B, H].

        The rows have been weighted already, and are in the places of received.rows.
        """
        operators.expect_dense(self._device_type, rows=rows)
        if not isinstance(received, Received):
            raise InvalidArgument(f"received is of type {type(received).__name__}, expected what dispatch returned")
        if rows.dim() != 2 or rows.shape[0] != self.num_rows:
            raise InvalidArgument(f"rows has shape {list(rows.shape)}, expected [{self.num_rows}, H], as received.rows")
        operators.refuse_forward_mode(rows)
        result: torch.Tensor = torch.ops.crossdock.combine(rows, received.ticket, received.num_tokens, self.key)
        return result

    # What the operators do; tensors in, tensors out, no gradients. number: of the dispatch.

    def forward_dispatch(
        self, tokens: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._dispatch(tokens, topk_idx, topk_weights, is_split=False)()

    @renamed(_NAMES_OF_CALLS)
    def _dispatch(
        self, tokens: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, is_split: bool
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        self._expect_fitting(tokens, topk_idx, topk_weights)
        self._give_up_dropped_halves()
        number = self._num_dispatches
        slot = number % len(self._handles)
        if slot in self._open_halves:
            raise InvalidUsage(
                f"the function that start_dispatch returned for dispatch {self._numbers[slot]} has not been called, "
                f"and max_in_flight is {len(self._handles)}: call it, or drop it"
            )
        handle = self._handles[slot]
        # The routing stays as it is until the backward pass is done, whatever the caller does with its tensor.
        handle.update(topk_idx.clone(memory_format=torch.contiguous_format))
        shape = self._row_shape()
        weights = tokens.new_zeros((*shape, self.num_topk), dtype=torch.float32)
        experts = tokens.new_full((*shape, self.num_topk), -1, dtype=self._id_dtype())
        inputs = DispatchInputs(topk_weights=topk_weights.contiguous())
        outputs = DispatchOutputs(topk_weights=weights, topk_idx=experts)
        rows, recipe = self._bind_rows(tokens.contiguous(), slot, inputs, outputs)
        self._numbers[slot] = -1
        try:
            handle.dispatch(inputs, outputs, send_only=is_split, quant_recipe=recipe)
        except InvalidUsage as error:
            if "send_only operations of this group are pending" not in str(error):
                raise
            message = f"{error}; of an Exchange: call a function that start_dispatch returned, or drop it"
            raise InvalidUsage(message) from error
        # Counted now: a call that is refused on one rank must not move it on to another place than its peers'.
        self._num_dispatches, self._numbers[slot] = number + 1, number
        ticket = operators.tensor_of(self._number, number)

        def finish() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            if is_split:
                handle.complete()
                if self._numbers[slot] == number:
                    self._open_halves.pop(slot, None)
            own_weights = weights.masked_fill_(experts < 0, 0) if self.is_low_latency else weights
            parts = (rows(), own_weights, experts.long())
            row, weight, expert = (part.view(self.num_rows, -1) for part in parts)
            return row, weight, expert, ticket

        if is_split and self.is_low_latency:
            self._open_halves[slot] = weakref.ref(finish)
        return finish

    def _give_up_dropped_halves(self) -> None:
        """Those whose functions are gone, as those of a forward pass that failed; their handles end with them."""
        for slot in [slot for slot, half in self._open_halves.items() if half() is None]:
            del self._open_halves[slot]
            self._numbers[slot] = -1
            self._handles[slot].close()
            self._handles[slot] = self._make_handle()

    def _bind_rows(
        self, tokens: torch.Tensor, slot: int, inputs: DispatchInputs, outputs: DispatchOutputs
    ) -> tuple[Callable[[], torch.Tensor], DispatchQuantizationRecipe]:
        """Fills in the tensors that carry the rows; returns a function that gives them on arrival, and the recipe."""
        shape = (*self._row_shape(), tokens.shape[1])
        inputs.tokens = tokens
        if self.recipe != DispatchQuantizationRecipe.DS_FP8E3M4:
            if self._memory is None:
                rows = tokens.new_zeros(shape)
                outputs.tokens = rows
            else:
                self._expect_place(tokens)
                # A tensor of its own, since autograd writes into the object; over the same memory.
                rows = self._places[slot].data
                outputs.tokens = self._memory.of(rows)
            return lambda: rows, DispatchQuantizationRecipe.NONE
        num_scales, padding, recipe = shape[-1] // quantise.BLOCK, 0, DispatchQuantizationRecipe.DS_FP8E3M4
        if not self.is_low_latency:
            # High throughput does not quantise, but carries rows of scales, which are multiples of 16 bytes.
            padding, recipe = -num_scales % 4, DispatchQuantizationRecipe.FWD
            inputs.tokens, scales = quantise.to_fp8(tokens)
            inputs.scales = torch.nn.functional.pad(scales, (0, padding))
        values = tokens.new_zeros(shape, dtype=torch.float8_e4m3fn)
        scales = tokens.new_zeros((*shape[:-1], num_scales + padding), dtype=torch.float32)
        outputs.tokens, outputs.scales = values, scales
        return lambda: quantise.from_fp8(values, scales[..., :num_scales], self.dtype), recipe

    def _expect_place(self, tokens: torch.Tensor) -> None:
        if tokens.shape[1] != self.hidden or tokens.dtype != self.dtype:
            raise InvalidArgument(
                f"tokens is [B, {tokens.shape[1]}] of {tokens.dtype}, expected with zero_copy: [B, {self.hidden}] of "
                f"{self.dtype}, as this exchange was made for"
            )

    @renamed(_NAMES_OF_COMBINE)
    def forward_combine(self, rows: torch.Tensor, number: int, num_tokens: int) -> torch.Tensor:
        result = rows.new_empty((num_tokens, rows.shape[1]))
        shaped = self._shaped(rows)
        inputs = CombineInputs(tokens=shaped)
        if self._memory is not None and self._memory.holds(shaped):
            inputs.tokens = self._memory.of(shaped)
        if self.combine_recipe == CombineQuantizationRecipe.NVFP4:
            inputs.scales = quantise.nvfp4_scales(shaped)
        self._handle_of(number).combine(inputs, result, quant_recipe=self.combine_recipe)
        return result

    @renamed(_NAMES_OF_CALLS)
    def backward_combine(self, gradient: torch.Tensor, number: int) -> torch.Tensor:
        """d rows [N, H] of d result [B, H]: each row's gradient is that of the token that it was summed into."""
        handle = self._handle_of(number)
        rows = gradient.new_zeros((*self._row_shape(), gradient.shape[1]))
        if self.is_low_latency:
            shape = self._row_shape()
            weights = gradient.new_empty((*shape, self.num_topk), dtype=torch.float32)
            experts = gradient.new_empty((*shape, self.num_topk), dtype=torch.int32)
            unused = gradient.new_zeros((gradient.shape[0], self.num_topk), dtype=torch.float32)
            handle.dispatch(
                DispatchInputs(tokens=gradient.contiguous(), topk_weights=unused),
                DispatchOutputs(tokens=rows, topk_weights=weights, topk_idx=experts),
            )
        else:
            handle.dispatch(gradient.contiguous(), rows, pass_direction=PassDir.BWD)
        return rows.view(self.num_rows, -1)

    @renamed(_NAMES_OF_CALLS)
    def backward_dispatch(
        self, rows: torch.Tensor, weights: torch.Tensor, number: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(d tokens [B, H], d topk_weights [B, K]) of (d rows, d weights)."""
        handle = self._handle_of(number)
        tokens = rows.new_empty((num_tokens, rows.shape[1]))
        if not self.is_low_latency:
            weight_gradients = weights.new_empty((num_tokens, self.num_topk))
            handle.combine(
                CombineInputs(tokens=rows.contiguous(), topk_weights=weights.contiguous()),
                CombineOutputs(tokens=tokens, topk_weights=weight_gradients),
                pass_direction=PassDir.BWD,
            )
            return tokens, weight_gradients
        handle.combine(self._shaped(rows), tokens)
        padded = torch.nn.functional.pad(weights, (0, self._weight_columns - self.num_topk))
        weight_gradients = weights.new_empty((num_tokens, self._weight_columns))
        handle.combine(self._shaped(padded), weight_gradients)
        return tokens, weight_gradients[:, : self.num_topk].contiguous()

    def _row_shape(self) -> tuple[int, ...]:
        return (self.num_ranks, self.max_tokens) if self.is_low_latency else (self.num_rows,)

    def _id_dtype(self) -> torch.dtype:
        return torch.int32 if self.is_low_latency else torch.int64

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.contiguous().view(*self._row_shape(), rows.shape[1])

    def _expect_fitting(self, tokens: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
        # Before anything is touched: the handle's earlier dispatch may still be open.
        if tokens.dim() != 2:
            raise InvalidArgument(f"tokens has shape {list(tokens.shape)}, expected [B, H]")
        if self.recipe != DispatchQuantizationRecipe.NONE and (
            tokens.dtype != self.dtype or tokens.shape[1] % quantise.BLOCK != 0
        ):
            raise InvalidArgument(
                f"tokens is [B, {tokens.shape[1]}] of {tokens.dtype}, allowed with recipe {self.recipe.name}: "
                f"[B, multiples of {quantise.BLOCK}] of {self.dtype}"
            )
        for name, array, dtypes in (
            ("topk_idx", topk_idx, (torch.int32, torch.int64)),
            ("topk_weights", topk_weights, (torch.float32,)),
        ):
            if array.dtype not in dtypes:
                raise InvalidArgument(
                    f"{name} is of type {array.dtype}, allowed: {', '.join(str(dtype) for dtype in dtypes)}"
                )
            if list(array.shape) != [tokens.shape[0], self.num_topk]:
                raise InvalidArgument(
                    f"{name} has shape {list(array.shape)}, expected [{tokens.shape[0]}, {self.num_topk}]: a row for "
                    "each of the tokens, a column for each of num_topk choices"
                )

    def _handle_of(self, number: int) -> Handle:
        """That of a dispatch."""
        slot = number % len(self._handles)
        if self._numbers[slot] != number:
            raise InvalidUsage(
                f"dispatch {number} of this exchange is too long ago, {self._num_dispatches - number - 1} came since: "
                f"max_in_flight is {len(self._handles)}, which is how many can be open"
            )
        return self._handles[slot]

    def close(self) -> None:
        """Closes handles and group, collective. Repeating it is fine."""
        for handle in self._handles:
            handle.close()
        self.group.close()
        if self._memory is not None:
            self._memory.close()
        self._forget()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
