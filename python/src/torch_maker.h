// SPDX-License-Identifier: Apache-2.0
//
// Allocates tensors without torch's dispatcher, as code that torch.compile generates does.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "crossdock.h"

namespace crossdock::python {

// sizes and strides are tuples, strides in elements; dtype is torch's; like: any tensor of that type and device, which
// makes the new one if this version of torch has no faster way or another device is current. device: -1 for the host.
nanobind::object new_tensor(nanobind::handle sizes, nanobind::handle strides, nanobind::handle dtype,
                            nanobind::handle like, int device);

// Whether that CUDA device is current for this thread; false if this version of torch has no fast way to ask.
bool is_current(int device);

// The current CUDA device; nullopt if this version of torch has no fast way to ask.
std::optional<int> current_device();

// crossdock._core.TensorMaker: makes tensors that are all alike.
class TensorMaker {
  public:
    // like: a tensor of torch of the same type, on the same device.
    TensorMaker(nanobind::object like, nanobind::object sizes, nanobind::object strides);
    nanobind::object make() const { return new_tensor(sizes_, strides_, dtype_, like_, device_); }
    bool is_on_host() const { return device_ < 0; }

  private:
    nanobind::object like_, dtype_, sizes_, strides_;
    int device_;
};

// crossdock._core.PieceMaker: makes short tensors of one dimension that are all alike, out of memory for many of them.
//
// A view costs the host less than a way through torch's allocator. No piece is used again; the memory goes back to
// torch with its last piece. It belongs to the stream on which it was allocated, as torch's tensors do, so another
// stream gets other memory, and a capture, whose memory must be that of its graph, tensors of their own.
class PieceMaker {
  public:
    // like: a tensor of torch of the same type, on the same device, of 4 bytes an element.
    PieceMaker(nanobind::object like, int64_t length);
    virtual ~PieceMaker() = default;
    // is_captured: the current stream is being captured.
    nanobind::object make(bool is_captured);
    int visit(visitproc visit, void* arg) const;
    void clear() { whole_.reset(); }

  protected:
    // sizes, strides: tuples, of a piece; step: elements from one to the next; num_pieces: of one memory, 0: none, all
    // tensors are made alone.
    PieceMaker(nanobind::object like, nanobind::object sizes, nanobind::object strides, int64_t step,
               int64_t num_pieces);
    virtual nanobind::object make_alone() const { return new_tensor(sizes_, strides_, dtype_, like_, device_); }
    // What new memory holds before its first piece is given away. false: it can't be written.
    virtual bool fill(nanobind::handle /*whole*/, cudaStream_t /*current*/) const { return true; }

    nanobind::object like_;
    int device_;
    int64_t step_, num_pieces_;

  private:
    nanobind::object dtype_, sizes_, strides_, whole_sizes_, whole_strides_, whole_;
    int64_t next_ = 0;  // elements
    cudaStream_t stream_ = nullptr;
};

// crossdock._core.CopyMaker: copies one tensor. Short copies are made in batches of at most 1 MiB, freed with the maker
// and the last copy: 1.4 to 2.4 instead of 6 µs per copy (one H100).
class CopyMaker final : public PieceMaker {
  public:
    explicit CopyMaker(nanobind::object tensor);
    nanobind::object make_copy();

  private:
    struct Form;
    CopyMaker(nanobind::object tensor, const Form& form);
    nanobind::object make_alone() const override { return like_.attr("clone")(); }
    bool fill(nanobind::handle whole, cudaStream_t current) const override;
};

// crossdock._core.PairMaker: makes long tensors that are all alike, in two memories that serve in turn.
//
// A memory serves again for the second-next tensor if no tensor lies in it any more: neither the one that was made nor
// a view of it. Else, or if the current stream is another one, new memory takes its place, and the old one stays as
// long as its tensors. A capture gets tensors of its own, whose memory must be that of its graph. On a GPU this saves
// torch's allocator, on a CPU the pages of memory that is new to the process.
class PairMaker {
  public:
    // like: a tensor of torch of the same type, on the same device; sizes, strides: tuples.
    PairMaker(nanobind::object like, nanobind::object sizes, nanobind::object strides);
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

    nanobind::object like_, dtype_, sizes_, strides_;
    int device_;
    Memory memories_[2];
    int next_ = 0;
};

void bind_torch_makers(nanobind::module_& module);

}  // namespace crossdock::python
