// SPDX-License-Identifier: Apache-2.0
//
// Crossdock's C++ layer, part 3: tensor descriptors as values. C++11, header only.
#ifndef CROSSDOCK_TENSOR_HPP_
#define CROSSDOCK_TENSOR_HPP_

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "crossdock/error.hpp"

namespace crossdock {
inline namespace cxx {

// A struct of the C API as its INIT macro makes it: size and magic set, the rest zero.
template <class Struct>
Struct make_struct(unsigned int magic = NCCL_EP_MAGIC) {
    Struct fresh = Struct();
    fresh.size = static_cast<unsigned int>(sizeof(Struct));
    fresh.magic = magic;
    return fresh;
}

// Names memory that it does not own: a dense row-major tensor of one to three dimensions.
class Tensor {
  public:
    // Error (ncclInvalidArgument): not one to three extents.
    Tensor(void* data, ncclDataType_t type, std::initializer_list<std::size_t> extents) : Tensor(type, extents) {
        descriptor_.data = data;
    }

    // The memory at byte `offset` of a registered window.
    Tensor(ncclWindow_t window, std::uint64_t offset, ncclDataType_t type, std::initializer_list<std::size_t> extents)
        : Tensor(type, extents) {
        descriptor_.win_hdl = window;
        descriptor_.win_offset = offset;
    }

    // For the C API; valid as long as this object lives and stays where it is.
    ncclEpTensor_t* get() {
        descriptor_.sizes = extents_;
        return &descriptor_;
    }

    std::size_t extent(std::size_t dimension) const { return extents_[dimension]; }

  private:
    Tensor(ncclDataType_t type, std::initializer_list<std::size_t> extents)
        : descriptor_(make_struct<ncclEpTensor_t>(NCCL_EP_TENSOR_MAGIC)), extents_() {
        if (extents.size() < 1 || extents.size() > 3) {
            throw Error(ncclInvalidArgument, "a Tensor has 1 to 3 extents, not " + std::to_string(extents.size()));
        }
        descriptor_.ndim = static_cast<unsigned int>(extents.size());
        descriptor_.datatype = type;
        std::size_t dimension = 0;
        for (std::size_t extent : extents) {
            extents_[dimension++] = extent;
        }
    }

    ncclEpTensor_t descriptor_;
    std::size_t extents_[3];
};

}  // namespace cxx
}  // namespace crossdock

#endif  // CROSSDOCK_TENSOR_HPP_
