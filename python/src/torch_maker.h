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

void bind_torch_makers(nanobind::module_& module);

}  // namespace crossdock::python
