// SPDX-License-Identifier: Apache-2.0
// The data types of tensors: what each is called, and its size. Plain data on top of the public header: the library,
// Python's arrays and the benchmark's options read this table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "nccl_ep.h"

namespace crossdock {

struct DataType {
    ncclDataType_t value;
    const char* name;         // in messages
    const char* python_name;  // of NumPy's, ml_dtypes' or torch's type
    const char* option;       // of command lines; empty: no type of the benchmark's rows
    unsigned int bytes;       // of an element; of a pair of 4-bit ones
};

// By value.
inline constexpr DataType kDataTypes[] = {
    {ncclInt8, "int8", "int8", "", 1},
    {ncclUint8, "uint8", "uint8", "", 1},
    {ncclInt32, "int32", "int32", "", 4},
    {ncclUint32, "uint32", "uint32", "", 4},
    {ncclInt64, "int64", "int64", "", 8},
    {ncclUint64, "uint64", "uint64", "", 8},
    {ncclFloat16, "float16", "float16", "fp16", 2},
    {ncclFloat32, "float32", "float32", "fp32", 4},
    {ncclFloat64, "float64", "float64", "", 8},
    {ncclBfloat16, "bfloat16", "bfloat16", "bf16", 2},
    {ncclFloat8e4m3, "float8e4m3", "float8_e4m3fn", "", 1},
    {ncclFloat8e5m2, "float8e5m2", "float8_e5m2", "", 1},
    {ncclFloat4x2, "float4x2", "float4_e2m1fn_x2", "", 1},
};
static_assert(std::ranges::all_of(kDataTypes, [](const DataType& type) { return type.value == &type - kDataTypes; }));

// Null: no type has this value.
constexpr const DataType* find_data_type(ncclDataType_t value) {
    const auto at = static_cast<unsigned int>(value);
    return at < std::size(kDataTypes) ? &kDataTypes[at] : nullptr;
}

}  // namespace crossdock
