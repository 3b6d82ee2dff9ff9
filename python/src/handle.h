// SPDX-License-Identifier: Apache-2.0
//
// crossdock.Handle.
#pragma once

#include "arguments.h"
#include "group.h"

namespace crossdock::python {

class Handle {
  public:
    Handle(std::shared_ptr<GroupState> group, ncclEpHandle_t handle) : group_(std::move(group)), handle_(handle) {}
    ~Handle();
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    void update(nanobind::handle topk_idx, nanobind::handle layout_info, nanobind::handle stream);
    void dispatch(nanobind::handle inputs, nanobind::handle outputs, nanobind::handle layout_info,
                  nanobind::handle config, nanobind::handle stream, const nanobind::kwargs& fields);
    void combine(nanobind::handle inputs, nanobind::handle outputs, nanobind::handle config, nanobind::handle stream,
                 const nanobind::kwargs& fields);
    void complete(nanobind::handle stream);
    void complete_on(cudaStream_t stream);
    void set_sums(crossdockSums_t sums);
    void set_tag(unsigned int tag);
    void set_alignment(unsigned int alignment);
    void set_sms(unsigned int num_sms);
    size_t overlap_words(unsigned int block_rows) const;
    void set_overlap(nanobind::handle memory, unsigned int block_rows, nanobind::handle done, unsigned int done_value);
    nanobind::tuple sms() const;
    void rebind(nanobind::handle topk_idx);
    void dropped_tokens(nanobind::handle count, nanobind::handle stream);
    void routing(nanobind::handle topk_idx, nanobind::handle stream);
    void sources(nanobind::handle tokens, nanobind::handle ranges, nanobind::handle stream);
    void close();

    // For crossdock.deep_ep, which describes its arrays itself: run(the ncclEpHandle_t) without the GIL; the arrays
    // stay as long as the library may use them.
    template <class Run>
    void run_dispatch(CallArrays& arrays, bool is_split, cudaStream_t stream, Run run) {
        group_->call([&] { run(handle_); });
        keep(dispatched_, arrays, is_split, stream);
    }
    template <class Run>
    void run_combine(CallArrays& arrays, bool is_split, cudaStream_t stream, Run run) {
        group_->call([&] { run(handle_); });
        keep(combined_, arrays, is_split, stream);
    }
    // Lets go of the arrays of finished calls, but for those of a pending operation.
    void forget_arrays();

    // What the library reads or writes after the calls that named it; replaced by the next call of its kind.
    void keep_routing(std::vector<Array> arrays) { routing_ = std::move(arrays); }
    void keep_memory(std::vector<Array> arrays) { memory_ = std::move(arrays); }
    // Former ones stay until the next operation: earlier ones may still use them.
    void keep_overlap(std::vector<Array> arrays);

    void expect_open() const;
    // False once the handle or its group is closed.
    bool is_usable() const { return handle_ != nullptr && !group_->is_closed(); }
    bool is_of_cpus() const { return group_->communicator().is_cpu(); }
    // Of the latest operation.
    cudaStream_t latest_stream() const { return stream_; }

    size_t address() const { return reinterpret_cast<size_t>(handle_); }

  private:
    std::vector<Array> take_arrays();
    void keep(std::vector<Array>& where, CallArrays& arrays, bool is_split, cudaStream_t stream);

    std::shared_ptr<GroupState> group_;
    ncclEpHandle_t handle_;
    std::vector<Array> memory_, routing_, overlap_, former_overlaps_, dispatched_, combined_;
    bool is_pending_ = false;
    unsigned int tag_ = 0;
    unsigned int alignment_ = ~0u;  // not set yet
    unsigned int sms_ = 0;
    int device_ = -1;  // of the arrays of the latest operation, for the stream that completes it
    cudaStream_t stream_ = nullptr;
};

Handle* create_handle(Group& group, ncclEpLayout_t layout, nanobind::handle topk_idx, nanobind::handle layout_info,
                      nanobind::handle config, nanobind::handle stream, const nanobind::kwargs& fields);
int topk_of(nanobind::handle value);  // InvalidArgument: it is none
Handle* init_handle(Group& group, ncclEpLayout_t layout, nanobind::handle topk, nanobind::handle config,
                    nanobind::handle handle_mem, const nanobind::kwargs& fields);

void bind_handle(nanobind::module_& module);

}  // namespace crossdock::python
