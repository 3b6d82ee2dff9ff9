// SPDX-License-Identifier: Apache-2.0
//
// Tensors of torch of any strides, for the functions that take such.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "crossdock.h"

namespace crossdock::python {

struct Strided {
    static constexpr int32_t kMostDimensions = 2;

    void* data = nullptr;
    std::optional<ncclDataType_t> type;  // none: the library has no number for it
    int64_t item_bytes = 0;
    int device = -1;  // a GPU's number; -1: the host
    int32_t num_dimensions = 0;
    int64_t shape[kMostDimensions] = {};
    int64_t strides[kMostDimensions] = {};  // in elements

    bool are_ids() const { return num_dimensions == 2 && (type == ncclInt32 || type == ncclInt64); }
    bool is_dense() const;
    int64_t size() const;
};

// "[2, 3] of torch.float32 on cpu", with its strides unless it is contiguous; "of type list". For messages.
std::string shown_tensor(nanobind::handle object);

// Returns false unless it is a tensor of one or two dimensions in host or CUDA memory.
bool strided_from(nanobind::handle tensor, Strided& strided);

}  // namespace crossdock::python
