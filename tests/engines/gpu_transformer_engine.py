# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's EP interface (nvte_ep_*, C) on Crossdock, on GPUs, a rank per process; gpu.py starts it.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python gpu_transformer_engine.py LIBRARY [CASE...]

and so for every rank, with NCCL 2.30.4 or newer loaded first, and NCCL_EP_HOME naming a folder whose
lib/libnccl_ep.so is Crossdock's. LIBRARY: libtransformer_engine.so of the wheel. Where it finds an error, it ends the
process. --list prints the cases.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

HIDDEN, LOCAL, TOPK, MOST = 1024, 2, 3, 64
BYTE, INT32, INT64, FLOAT32, BFLOAT16 = 0, 2, 3, 4, 6  # enum NVTEDType
TYPES = {torch.uint8: BYTE, torch.int32: INT32, torch.int64: INT64, torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
SYMMETRIC_WINDOW = 1


class Shape(ctypes.Structure):
    _fields_ = [("data", c_size_t * 15), ("ndim", c_size_t)]


class Basic(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int), ("shape", Shape)]


class Window(ctypes.Structure):
    _fields_ = [("window", c_void_p), ("offset", c_uint64), ("scale_window", c_void_p), ("scale_offset", c_uint64)]


class GroupConfig(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ep_size", c_int),
        ("num_experts", c_int),
        ("max_tokens_per_rank", c_int),
        ("max_recv_tokens_per_rank", c_int),
        ("hidden_dim", c_int),
        ("num_comm_sms", c_int),
        ("max_token_dtype", c_int),
        ("zero_copy", c_int),
        ("num_topk", c_int),
        ("drop_on_overflow", c_int),
    ]


class LayerConfig(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("top_k", c_int), ("alignment", c_size_t)]


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def load_beside_old_libraries(path: str) -> ctypes.CDLL:
    """Opens the library where the system's cuBLAS is older than the one it was linked with.

    What such a cuBLAS lacks is for matrix products, which nothing here computes: a function that ends the process
    stands for it.
    """
    for _ in range(50):
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            missing = re.search(r"undefined symbol: (\w+)", str(error))
            if missing is None:
                raise
        source = Path(tempfile.mkdtemp()) / "missing.c"
        source.write_text(f"#include <stdlib.h>\nvoid {missing[1]}(void) {{ abort(); }}\n")
        stub = source.with_suffix(".so")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", stub, source], check=True)
        ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
    raise OSError(f"{path} lacks too many functions")


class Engine:
    """The functions, with their types."""

    def __init__(self, path: str) -> None:
        ctypes.CDLL("libnvrtc.so.13", mode=ctypes.RTLD_GLOBAL)  # TransformerEngine leaves that to its Python package
        self.library = load_beside_old_libraries(path)
        tensor, window, stream, layer = c_void_p, Window, c_void_p, POINTER(LayerConfig)
        self._function("nvte_create_tensor", c_void_p, c_int)
        self._function("nvte_destroy_tensor", None, tensor)
        self._function("nvte_set_tensor_param", None, POINTER(c_void_p), c_int, POINTER(Basic))
        self._function("nvte_ep_initialize", None, c_void_p, POINTER(GroupConfig))
        self._function("nvte_ep_shutdown", None)
        self._function("nvte_ep_handle_mem_size", c_size_t, layer)
        self._function("nvte_ep_prepare", None, tensor, tensor, tensor, tensor, layer, stream)
        pairs = [tensor, window]
        moved = [tensor, tensor, *pairs, *pairs, *pairs, *pairs]
        self._function("nvte_ep_dispatch", None, *moved, stream)
        self._function("nvte_ep_prepare_and_dispatch", None, *moved, tensor, tensor, layer, stream)
        self._function("nvte_ep_combine", None, tensor, *pairs, tensor, stream)
        self._function("nvte_ep_dispatch_bwd", None, tensor, *pairs, *pairs, tensor, tensor, stream)
        self._function("nvte_ep_combine_bwd", None, tensor, *pairs, *pairs, stream)
        self._kept: dict[tuple[Any, ...], Any] = {}

    def _function(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self.library, name)
        function.restype, function.argtypes = result, list(arguments)
        setattr(self, name.removeprefix("nvte_"), function)

    def __getattr__(self, name: str) -> Any:  # set by _function
        raise AttributeError(name)

    def tensor(self, of: Any) -> Any:
        """An NVTETensor over a torch tensor, which the caller keeps."""
        key = (of.data_ptr(), of.dtype, tuple(of.shape))
        if key not in self._kept:
            made = c_void_p(self.create_tensor(0))
            shape = Shape()
            shape.data[: of.dim()], shape.ndim = list(of.shape), of.dim()
            self.set_tensor_param(byref(made), 0, byref(Basic(of.data_ptr(), TYPES[of.dtype], shape)))
            self._kept[key] = made
        return self._kept[key]


class Nccl:
    """NCCL's functions that the check needs."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.library = ctypes.CDLL("libnccl.so.2", mode=ctypes.RTLD_GLOBAL)
        self.library.ncclCommInitRank.argtypes = [POINTER(c_void_p), c_int, UniqueId, c_int]
        self.library.ncclMemAlloc.argtypes = [POINTER(c_void_p), c_size_t]
        self.library.ncclCommWindowRegister.argtypes = [c_void_p, c_void_p, c_size_t, POINTER(c_void_p), c_int]
        unique, self.comm, version = UniqueId(), c_void_p(), c_int()
        self.check(self.library.ncclGetVersion(byref(version)), "ncclGetVersion")
        assert version.value >= 23004, f"NCCL {version.value} came first: 2.30.4 or newer is needed"
        if rank == 0:
            self.check(self.library.ncclGetUniqueId(byref(unique)), "ncclGetUniqueId")
            store.set("unique", bytes(unique))
        unique = UniqueId.from_buffer_copy(bytes(store.get("unique")))
        self.check(self.library.ncclCommInitRank(byref(self.comm), size, unique, rank), "ncclCommInitRank")

    @staticmethod
    def check(result: int, what: str) -> None:
        assert result == 0, f"{what} failed: {result}"


class Arena:
    """Tensors in one window of all ranks, or of torch's memory, with no window."""

    def __init__(self, nccl: Nccl | None, num_bytes: int = 64 << 20) -> None:
        self._next, self._window, self._whole = 0, c_void_p(), None
        if nccl is not None:
            memory = c_void_p()
            nccl.check(nccl.library.ncclMemAlloc(byref(memory), num_bytes), "ncclMemAlloc")
            registered = nccl.library.ncclCommWindowRegister(
                nccl.comm, memory, num_bytes, byref(self._window), SYMMETRIC_WINDOW
            )
            nccl.check(registered, "ncclCommWindowRegister")

            class Bytes:
                __cuda_array_interface__ = {
                    "version": 2,
                    "shape": (num_bytes,),
                    "typestr": "|u1",
                    "data": (memory.value, False),
                }

            self._whole = torch.as_tensor(Bytes(), device="cuda")

    def empty(self, *shape: int, dtype: Any = torch.bfloat16) -> tuple[Any, Window]:
        if self._whole is None:
            return torch.empty(*shape, dtype=dtype, device="cuda"), Window()
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        start = self._next
        self._next += -(-num_bytes // 256) * 256
        return self._whole[start : start + num_bytes].view(dtype).view(*shape), Window(self._window, start, None, 0)


class Layer:
    """One layer's tensors on a rank, and its steps. Expert e multiplies its rows by (e + 1) / E."""

    def __init__(self, engine: Engine, rank: int, size: int, rows: int, arena: Arena) -> None:
        self.engine, self.rank, self.experts = engine, rank, LOCAL * size
        self.tokens = (MOST, 17, 48, 1)[rank % 4]
        self.config = LayerConfig(ctypes.sizeof(LayerConfig), TOPK, 0)
        self.memory = self.new_memory()
        self.ids = torch.zeros(self.tokens, TOPK, dtype=torch.int64, device="cuda")
        self.counts = torch.zeros(LOCAL, dtype=torch.int64, device="cuda")
        self.total = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.result = torch.zeros(self.tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        # Of equal size on all ranks, so that what follows lies at one offset everywhere.
        x, self.x_window = arena.empty(MOST, HIDDEN)
        weights, self.weights_window = arena.empty(MOST, TOPK, dtype=torch.float32)
        gradient, self.gradient_window = arena.empty(MOST, HIDDEN)
        self.x, self.weights, self.gradient = (of[: self.tokens] for of in (x, weights, gradient))
        self.resize(rows, arena)
        self.renew(0)

    def resize(self, rows: int, arena: Arena) -> None:
        self.rows = rows
        self.received, self.received_window = arena.empty(rows, HIDDEN)
        self.row_weights, self.row_weights_window = arena.empty(rows, dtype=torch.float32)
        self.made, self.made_window = arena.empty(rows, HIDDEN)
        self.row_gradient, self.row_gradient_window = arena.empty(rows, HIDDEN)
        self.weight_gradient, self.weight_gradient_window = arena.empty(rows, dtype=torch.float32)

    def new_memory(self) -> Any:
        num_bytes = self.engine.ep_handle_mem_size(byref(self.config))
        return torch.full((int(num_bytes),), 0xAB, dtype=torch.uint8, device="cuda")

    def renew(self, step: int, keeps_routing: bool = False) -> None:
        random = torch.Generator().manual_seed(100 * step + self.rank)
        scores = torch.rand(self.tokens, self.experts, generator=random)
        if not keeps_routing:
            self.ids.copy_(scores.argsort(dim=1)[:, :TOPK])
        self.x.copy_(torch.randn(self.tokens, HIDDEN, generator=random))
        self.gradient.copy_(torch.randn(self.tokens, HIDDEN, generator=random))
        self.weights.copy_(torch.rand(self.tokens, TOPK, generator=random))

    def of(self, tensor: Any) -> Any:
        return self.engine.tensor(tensor)

    def prepare(self) -> None:
        tensors = [self.of(part) for part in (self.memory, self.ids, self.counts, self.total)]
        self.engine.ep_prepare(*tensors, byref(self.config), stream())

    def factors(self) -> Any:
        """Of every row its expert's, and 0 where there is none; nothing waits for the host."""
        ends = self.counts.cumsum(0)
        rows = torch.arange(self.rows, device="cuda")
        expert = (rows[:, None] >= ends).sum(dim=1)
        return torch.where(rows < ends[-1], (expert + 1 + self.rank * LOCAL) / self.experts, 0.0)

    def forward(self) -> None:
        of, none = self.of, torch.zeros((), device="cuda")
        self.engine.ep_dispatch(
            of(self.memory),
            of(self.ids),
            of(self.x),
            self.x_window,
            of(self.weights),
            self.weights_window,
            of(self.received),
            self.received_window,
            of(self.row_weights),
            self.row_weights_window,
            stream(),
        )
        factors = (self.factors() * self.row_weights)[:, None]
        self.made.copy_(torch.where(factors > 0, self.received.float() * factors, none))
        self.engine.ep_combine(of(self.memory), of(self.made), self.made_window, of(self.result), stream())

    def check_forward(self, what: str) -> None:
        torch.cuda.synchronize()
        factors = (self.weights * (self.ids + 1) / self.experts).sum(dim=1, keepdim=True)
        close(self.result.float(), self.x.float() * factors, f"{what}, forward")

    def backward(self, what: str) -> None:
        """As its autograd function does it: combine's backward, the experts', dispatch's backward."""
        of, none = self.of, torch.zeros((), device="cuda")
        self.engine.ep_combine_bwd(
            of(self.memory),
            of(self.gradient),
            self.gradient_window,
            of(self.row_gradient),
            self.row_gradient_window,
            stream(),
        )
        factors = self.factors()[:, None]
        is_row = factors > 0
        rows = torch.where(is_row, self.row_gradient.float(), none)
        received = torch.where(is_row, self.received.float(), none)
        self.weight_gradient.copy_((rows * received * factors).sum(dim=1))
        self.made.copy_(torch.where(is_row, rows * factors * self.row_weights[:, None], none))
        tokens = torch.empty_like(self.x)
        weights = torch.empty(self.tokens, TOPK, device="cuda")
        self.engine.ep_dispatch_bwd(
            of(self.memory),
            of(self.made),
            self.made_window,
            of(self.weight_gradient),
            self.weight_gradient_window,
            of(tokens),
            of(weights),
            stream(),
        )
        torch.cuda.synchronize()
        factors = (self.ids + 1) / self.experts
        expected = self.gradient.float() * (self.weights * factors).sum(dim=1, keepdim=True)
        close(tokens.float(), expected, f"{what}, gradient of the tokens")
        products = (self.x.float() * self.gradient.float()).sum(dim=1, keepdim=True)
        close(weights, products * factors, f"{what}, gradient of the weights", 2.0)


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def close(found: Any, expected: Any, what: str, bound: float = 0.08) -> None:
    error = float((found - expected).abs().max())
    assert error < bound, f"{what}: the largest error is {error}"


class Group:
    """nvte_ep_initialize and nvte_ep_shutdown around a case."""

    def __init__(self, engine: Engine, nccl: Nccl, rank: int, size: int) -> None:
        self.engine, self.nccl, self.rank, self.size = engine, nccl, rank, size
        self.rows = size * MOST * min(LOCAL, TOPK)

    def layer(self, zero_copy: bool = False, eager: bool = False) -> Layer:
        config = GroupConfig(
            struct_size=ctypes.sizeof(GroupConfig),
            ep_size=self.size,
            num_experts=LOCAL * self.size,
            max_tokens_per_rank=MOST,
            max_recv_tokens_per_rank=0 if eager else self.rows,
            hidden_dim=HIDDEN,
            max_token_dtype=BFLOAT16,
            zero_copy=int(zero_copy),
            num_topk=TOPK,
        )
        self.engine.ep_initialize(self.nccl.comm, byref(config))
        arena = Arena(self.nccl if zero_copy else None)
        return Layer(self.engine, self.rank, self.size, self.rows, arena)


def steps(group: Group) -> None:
    """Forward and backward, with another routing in every step."""
    layer = group.layer()
    for step in range(5):
        layer.renew(step)
        layer.prepare()
        layer.forward()
        layer.check_forward(f"step {step}")
        layer.backward(f"step {step}")


def captured(layer: Layer, body: Callable[[], None]) -> Any:
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def graph_replay(group: Group) -> None:
    """prepare, dispatch and combine in one graph; tokens, routing and weights change between replays."""
    layer = group.layer()

    def body() -> None:
        layer.prepare()
        layer.forward()

    body()
    layer.check_forward("before the capture")
    graph = captured(layer, body)
    for step in range(1, 9):
        layer.renew(step)
        graph.replay()
        layer.check_forward(f"replay {step}")


def memory_overwritten(group: Group) -> None:
    """handle_mem holds nonsense before every prepare."""
    layer = group.layer()
    for step in range(5):
        layer.renew(step)
        layer.memory.fill_(step * 50)
        layer.prepare()
        layer.forward()
        layer.check_forward(f"step {step}")


def memory_relocated(group: Group) -> None:
    """handle_mem lies elsewhere in every step, and from prepare to dispatch it is copied."""
    layer = group.layer()
    kept = []
    for step in range(5):
        layer.renew(step)
        layer.memory = layer.new_memory()
        layer.prepare()
        kept.append(layer.memory)
        layer.memory = layer.memory.clone()
        kept[-1].fill_(0xCD)
        layer.forward()
        layer.check_forward(f"step {step}")
        kept.append(layer.memory)


def relocated_in_capture(group: Group) -> None:
    """A copy of handle_mem is used first inside a capture."""
    layer = group.layer()
    layer.prepare()
    layer.forward()
    layer.check_forward("before the capture")
    kept, layer.memory = layer.memory, layer.memory.clone()
    graph = captured(layer, layer.forward)
    for step in range(1, 5):
        layer.renew(step, keeps_routing=True)
        graph.replay()
        layer.check_forward(f"replay {step}")
    del kept


def zero_copy(group: Group) -> None:
    """Tensors in NCCL's windows; forward and backward, and a graph."""
    layer = group.layer(zero_copy=True)
    for step in range(4):
        layer.renew(step)
        layer.prepare()
        layer.forward()
        layer.check_forward(f"step {step}")
        layer.backward(f"step {step}")

    def body() -> None:
        layer.prepare()
        layer.forward()

    graph = captured(layer, body)
    for step in range(4, 8):
        layer.renew(step)
        graph.replay()
        layer.check_forward(f"replay {step}")


def eager(group: Group) -> None:
    """No bound of received rows: the caller reads how many come and makes memory for them."""
    layer = group.layer(eager=True)
    for step in range(5):
        layer.renew(step)
        layer.prepare()
        torch.cuda.synchronize()
        layer.resize(int(layer.total.item()), Arena(None))
        layer.forward()
        layer.check_forward(f"step {step}")


CASES = (steps, graph_replay, memory_overwritten, memory_relocated, relocated_in_capture, zero_copy, eager)


def main() -> None:
    cases = {case.__name__: case for case in CASES}
    names = sys.argv[2:] or list(cases)
    if names == ["--list"]:
        print("\n".join(cases))
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    dist.init_process_group("gloo")
    nccl = Nccl(rank, size, c10d.PrefixStore("nccl", c10d._get_default_store()))
    group = Group(Engine(sys.argv[1]), nccl, rank, size)
    for name in names:
        if rank == 0:
            print(f"start   {name}", flush=True)
        found = ""
        try:
            cases[name](group)
            torch.cuda.synchronize()
        except BaseException:
            found = traceback.format_exc()
        every: list[Any] = [None] * size
        dist.all_gather_object(every, found)
        if rank == 0:
            print(f"{'FAILED' if any(every) else 'ok':7} {name}", flush=True)
            for other, text in enumerate(every):
                if text:
                    print(f"rank {other}: {text}", flush=True)
        if any(every):
            os._exit(1)  # what a failed case left behind would spoil the next ones
        group.engine.ep_shutdown()
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
