// SPDX-License-Identifier: Apache-2.0
//
// Asynchronous calls of crossdock.deep_ep: their work is on a stream of the package, behind what the caller's stream
// has, and an event tells its end. All through the driver, since torch makes objects of streams and events.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>

#include "crossdock.h"

namespace crossdock::python {

// crossdock._core.SideStream: the stream of a buffer's asynchronous calls.
struct SideStream {
    int device;  // -1: the host, where calls are over when they return
    cudaStream_t address;
    nanobind::object stream;  // torch's
    nanobind::object number;  // the address as Python's

    int visit(visitproc visit, void* arg) const;
    void clear();
};

// crossdock._core.StreamEvent: what a stream had at a time. Used under the GIL.
class StreamEvent {
  public:
    StreamEvent() = default;
    ~StreamEvent();
    StreamEvent(const StreamEvent&) = delete;
    StreamEvent& operator=(const StreamEvent&) = delete;

    // Once, on a device's stream. Returns false if it cannot: use torch.
    bool record(int device, cudaStream_t stream);
    // The same where that device is current and has_events.
    bool record_here(int device, cudaStream_t stream);
    bool is_recorded() const { return event_ != nullptr; }
    // Makes the stream wait, if anything was recorded. Returns false if this thread has no CUDA context yet.
    bool wait(cudaStream_t stream) const;
    // Makes the current stream wait: its address. None: nothing was recorded, or it must be done in another way.
    nanobind::object wait_current() const;

  private:
    void* event_ = nullptr;
    int device_ = 0;
};

// crossdock._core.Kept: tensors of torch that another stream than their own uses, until the stream of their call has
// waited for that one. If it has not, record_stream makes torch wait for the other stream before it reuses the memory.
class Kept {
  public:
    // tensors: a tuple; current: the stream of their call; other: torch's object.
    Kept(nanobind::object tensors, cudaStream_t current, nanobind::object other);
    ~Kept() { clear(); }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

    // A stream has waited for the other one.
    void note_wait(cudaStream_t stream) { has_waited_ = has_waited_ || stream == current_; }
    int visit(visitproc visit, void* arg) const;
    void clear();

  private:
    nanobind::object tensors_, other_;
    cudaStream_t current_;
    bool has_waited_ = false;
};

// An EventOverlap of a call with nothing to wait for, as its class's own values have it.
nanobind::object no_event();

// The streams and the event of one call.
class Turn {
  public:
    // stream: a SideStream for asynchronous calls; else what a crossdock.Handle takes, and there is nothing to order.
    explicit Turn(nanobind::handle stream);

    // Whether it is asynchronous on a GPU.
    bool has_streams() const { return side_ != nullptr && side_->device >= 0; }
    // Makes the side stream wait for the work of the current one. Returns false if it cannot: use torch.
    bool begin();
    // What a crossdock.Handle takes.
    nanobind::handle stream() const { return stream_; }
    // The EventOverlap of work that has been enqueued. tensors: all that it uses, or None; is_captured: the current
    // stream is being captured.
    nanobind::object end(std::initializer_list<nanobind::handle> tensors, bool is_captured) const;

  private:
    const SideStream* side_ = nullptr;
    nanobind::handle stream_;
    cudaStream_t current_ = nullptr;
};

void bind_turns(nanobind::module_& module);

}  // namespace crossdock::python
