// SPDX-License-Identifier: Apache-2.0
//
// Allocates tensors without torch's dispatcher, as code that torch.compile generates does.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "crossdock.h"

namespace crossdock::python {

// sizes and strides are tuples, strides in elements; dtype is torch's; like: any tensor of that device, which makes the
// new one if this version of torch has no faster way or another device is current. device: -1 for the host.
nanobind::object new_tensor(nanobind::handle sizes, nanobind::handle strides, nanobind::handle dtype,
                            nanobind::handle like, int device);

// torch's types.
nanobind::handle torch_int32();
nanobind::handle torch_bool();

// Of a dense tensor.
nanobind::object dense_strides(nanobind::handle sizes);

// Whether that CUDA device is current for this thread; false if this version of torch has no fast way to ask.
bool is_current(int device);

// The current CUDA device; nullopt if this version of torch has no fast way to ask.
std::optional<int> current_device();

// What tensors that are all alike have in common. strides: None for dense ones.
struct TensorForm {
    nanobind::object dtype, like, sizes, strides;
    int device;  // -1: the host

    static TensorForm of(nanobind::handle dtype, nanobind::handle device, nanobind::handle sizes,
                         nanobind::handle strides);
    nanobind::object make() const { return new_tensor(sizes, strides, dtype, like, device); }
};

// crossdock._core.PieceMaker: makes short int32 tensors of one dimension that are all alike, out of memory for many of
// them.
//
// A view costs the host less than a way through torch's allocator. No piece is used again; the memory goes back to
// torch with its last piece. It belongs to the stream on which it was allocated, as torch's tensors do, so another
// stream gets other memory, and a capture, whose memory must be that of its graph, tensors of their own.
class PieceMaker {
  public:
    PieceMaker(nanobind::handle device, int64_t length);
    // is_captured: the current stream is being captured.
    nanobind::object make(bool is_captured);
    int visit(visitproc visit, void* arg) const;
    void clear() { whole_.reset(); }

  private:
    TensorForm piece_, all_;
    int64_t step_, num_elements_;  // from one piece to the next, and in all_
    nanobind::object whole_;
    int64_t next_ = 0;
    cudaStream_t stream_ = nullptr;
};

// crossdock._core.PairMaker: makes long tensors that are all alike, in two memories that serve in turn.
//
// A memory serves again for the second-next tensor if no tensor lies in it any more: neither the one that was made nor
// a view of it. Else, or if the current stream is another one, new memory takes its place, and the old one stays as
// long as its tensors. A capture gets tensors of its own, whose memory must be that of its graph. On a GPU this saves
// torch's allocator, on a CPU the pages of memory that is new to the process.
class PairMaker {
  public:
    explicit PairMaker(TensorForm form) : form_(std::move(form)) {}
    // Of its tensors, a tuple.
    nanobind::object sizes() const { return form_.sizes; }
    // is_captured: the current stream is being captured.
    nanobind::object make(bool is_captured);
    int visit(visitproc visit, void* arg) const;
    // Lets go of both memories; the next tensors get new ones.
    void clear();

  private:
    struct Memory {
        nanobind::object tensor, storage, address;  // address: by which torch counts the storage's users
        Py_ssize_t idle_users = 0;                  // these
        cudaStream_t stream = nullptr;
    };

    bool is_free(const Memory& memory, cudaStream_t stream) const;
    Memory new_memory(cudaStream_t stream) const;

    TensorForm form_;
    Memory memories_[2];
    int next_ = 0;
};

void bind_torch_makers(nanobind::module_& module);

}  // namespace crossdock::python
