# SPDX-License-Identifier: Apache-2.0
"""Which arrays are understood, without a copy, and what is said of those that are not."""

from __future__ import annotations

import array
import gc
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import crossdock as ep

TYPES = [
    ("float32", np.float32),
    ("float16", np.float16),
    ("bfloat16", ml_dtypes.bfloat16),
    ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
    ("float8_e5m2", ml_dtypes.float8_e5m2),
    ("int32", np.int32),
    ("int64", np.int64),
    ("uint8", np.uint8),
]


@pytest.mark.parametrize(("name", "dtype"), TYPES)
def test_numpy_types(name: str, dtype: Any) -> None:
    source = np.zeros((2, 3), dtype)
    tensor = ep.Tensor(source)
    assert (tensor.datatype, tensor.sizes, tensor.ndim) == (name, (2, 3), 2)
    assert tensor.data == source.__array_interface__["data"][0]
    assert tensor.buffer is source


class DlpackOnly:
    """An array that has nothing but DLPack."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.source.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.source.__dlpack_device__()


def test_other_protocols() -> None:
    source = np.zeros((4, 5), np.float32)
    address = source.__array_interface__["data"][0]
    assert ep.Tensor(DlpackOnly(source)).data == address
    assert ep.Tensor(source.data).data == address
    assert ep.Tensor(array.array("f", [1, 2, 3])).sizes == (3,)
    assert ep.Tensor(bytearray(8)).datatype == "uint8"


def read_only(source: Any) -> Any:
    source.setflags(write=False)
    return source


def test_read_only_dlpack() -> None:
    """It is read, as any other read-only array, and not written."""
    source = read_only(np.ones((2, 4), np.float32))
    assert ep.Tensor(DlpackOnly(source)).data == source.__array_interface__["data"][0]
    comm, group = one_rank_group()
    with comm, group, group.create_handle(ep.Layout.EXPERT_MAJOR, np.zeros((2, 1), np.int64)) as handle:
        received, info = np.zeros((2, 4, 4), np.float32), ep.LayoutInfo(expert_counters=np.zeros(2, np.int32))
        handle.dispatch(DlpackOnly(source), received, layout_info=info)
        np.testing.assert_array_equal(received[0, :2], source)
        with pytest.raises(ep.InvalidArgument, match="outputs.tokens is read-only"):
            handle.dispatch(source, DlpackOnly(read_only(received)), layout_info=info)


def test_an_exporter_that_refuses_is_quoted() -> None:
    class Refusing:
        def __dlpack__(self, **arguments: Any) -> Any:
            raise BufferError("lies on the moon")

    with pytest.raises(ep.InvalidArgument, match="memory cannot be reached: BufferError: lies on the moon"):
        ep.Tensor(Refusing())


def test_another_type_and_shape_of_the_same_bytes() -> None:
    source = np.zeros((4, 8), np.uint8)
    assert ep.Tensor(source, dtype="float4_e2m1fn_x2").datatype == "float4_e2m1fn_x2"
    assert ep.Tensor(source, dtype=np.float32, shape=(8,)).sizes == (8,)
    assert ep.Tensor(source, dtype=ml_dtypes.bfloat16, shape=(2, 8)).datatype == "bfloat16"
    with pytest.raises(ep.InvalidArgument, match="takes 36 bytes; buffer has 32"):
        ep.Tensor(source, dtype="float32", shape=(9,))
    with pytest.raises(ep.InvalidArgument, match="more bytes than can be addressed"):
        ep.Tensor(source, shape=(2**62, 2**62))
    with pytest.raises(ep.InvalidArgument, match="give the shape, too"):
        ep.Tensor(source, dtype="float32")
    with pytest.raises(ep.InvalidArgument, match="dtype is complex64"):
        ep.Tensor(source, dtype="complex64")
    wrong: Any
    for wrong, message in ((7, "shape is 7, allowed"), ("48", "shape is 48"), ((4, "x"), "extent of shape is x")):
        with pytest.raises(ep.InvalidArgument, match=message):
            ep.Tensor(source, shape=wrong)
    assert ep.Tensor(source, shape=[2, 16]).sizes == (2, 16)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 8), np.float32)[:, ::2], "not contiguous: dimension 1 has a stride of 8 bytes, expected 4"),
        (np.zeros((4, 8), np.float32).T, "not contiguous"),
        (np.zeros(3, np.complex64), "which the library does not have"),
        (np.zeros(3, np.int16), "which the library does not have"),
        (np.zeros(3, ">f4"), "which the library does not have"),
        (np.zeros(3, object), "which the library does not have"),
        (np.float32(1), "0 dimensions, allowed: 1..8"),
        (np.zeros((1,) * 9, np.float32), "9 dimensions, allowed: 1..8"),
        ([1, 2], "of type list, allowed: arrays of NumPy and torch"),
        ("text", "of type str"),
        (None, "None"),
    ],
)
def test_what_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ep.InvalidArgument, match=message):
        ep.Tensor(source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": None}, "shape is None, allowed: a sequence of numbers"),
        ({"shape": (2, -4)}, "extent is -4, allowed: 0 and more"),
        ({"strides": (16,)}, "strides for other dimensions"),
        ({"strides": ("a", 4)}, "stride is a, allowed: numbers of bytes"),
        ({"data": 4096}, "data is 4096, allowed: a sequence"),
        ({"data": (4096,)}, "expected \\(address, is read-only\\)"),
        ({"data": ("x", False)}, "address is x"),
        ({"typestr": 4}, "'4' \\(its typestr\\), which the library does not have"),
    ],
)
def test_malformed_interfaces(changes: dict[str, Any], message: str) -> None:
    class Broken:
        __cuda_array_interface__ = {"shape": (2, 4), "typestr": "<f4", "data": (4096, False), "version": 3} | changes

    with pytest.raises(ep.InvalidArgument, match=message):
        ep.Tensor(Broken())
    del Broken.__cuda_array_interface__["data"]
    with pytest.raises(ep.InvalidArgument, match="has an array interface without data"):
        ep.Tensor(Broken())


def test_empty_arrays_have_any_strides() -> None:
    assert ep.Tensor(np.zeros((0, 8), np.float32)).sizes == (0, 8)
    assert ep.Tensor(np.zeros((4, 0), np.float32)[:, ::2]).sizes == (4, 0)


def test_an_array_lives_as_long_as_its_tensor() -> None:
    source = np.zeros(4, np.float32)
    before = sys.getrefcount(source)
    tensor = ep.Tensor(source)
    assert sys.getrefcount(source) > before
    del tensor
    gc.collect()
    assert sys.getrefcount(source) == before


def test_a_described_bytearray_cannot_be_resized() -> None:
    source = bytearray(16)
    tensor = ep.Tensor(source)
    with pytest.raises(BufferError):
        source.extend(b"more")
    del tensor
    source.extend(b"more")


def one_rank_group(**fields: Any) -> tuple[ep.Communicator, ep.Group]:
    [comm] = ep.Communicator.create_threads(1)
    settings: dict[str, Any] = {"num_experts": 2, "max_dispatch_tokens_per_rank": 4, "max_token_bytes": 64} | fields
    return comm, ep.Group(comm, **settings)


def test_read_only_arrays_are_read_and_not_written() -> None:
    comm, group = one_rank_group()
    with comm, group:
        tokens = np.ones((2, 4), np.float32)
        weights = np.ones((2, 1), np.float32)
        for source in (tokens, weights):
            source.setflags(write=False)
        received, counts = np.zeros((2, 4, 4), np.float32), np.zeros(2, np.int32)
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, np.zeros((2, 1), np.int64))
        handle.dispatch(tokens, received, layout_info=ep.LayoutInfo(expert_counters=counts))
        result = np.zeros((2, 4), np.float32)
        handle.combine(received, ep.CombineOutputs(tokens=result, topk_weights=weights))
        np.testing.assert_array_equal(result, tokens)
        with pytest.raises(ep.InvalidArgument, match="outputs.tokens is read-only"):
            handle.combine(received, ep.CombineOutputs(tokens=tokens, topk_weights=weights))
        with pytest.raises(ep.InvalidArgument, match="outputs.tokens is read-only"):
            handle.combine(received, ep.CombineOutputs(tokens=ep.Tensor(tokens), topk_weights=weights))


def test_arrays_of_a_gpu_are_refused_by_groups_of_cpus() -> None:
    class Elsewhere:
        __cuda_array_interface__ = {"shape": (2, 4), "typestr": "<f4", "data": (4096, False), "version": 3}

    comm, group = one_rank_group()
    with comm, group, group.create_handle(ep.Layout.EXPERT_MAJOR, np.zeros((2, 1), np.int64)) as handle:
        assert ep.Tensor(Elsewhere()).data == 4096
        # The interface does not say on which GPU.
        with pytest.raises(ep.InvalidArgument, match="inputs.tokens is on a GPU, expected host memory"):
            handle.dispatch(Elsewhere(), np.zeros((2, 4, 4), np.float32))


def test_a_tensor_that_lies_on_its_array_is_collected() -> None:
    class Described(np.ndarray):
        described: ep.Tensor

    array = np.zeros(4, np.float32).view(Described)
    array.described = ep.Tensor(array)
    gone = weakref.ref(array)
    del array
    gc.collect()
    assert gone() is None
