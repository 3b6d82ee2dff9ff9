// SPDX-License-Identifier: Apache-2.0
#include "fuzz/session.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace crossdock::fuzz {
namespace {

// Larger tensors than this have no memory, which is an error that the library must see.
constexpr size_t kMaxTensorBytes = 1 << 17;

[[noreturn]] void report(const char* call, const char* what) {
    std::fprintf(stderr, "FAILED after %s: %s\n", call, what);
    std::abort();
}

size_t element_bytes(ncclDataType_t dtype) {
    switch (static_cast<int>(dtype)) {
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64:
            return 8;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32:
            return 4;
        case ncclFloat16:
        case ncclBfloat16:
            return 2;
        default:
            return 1;
    }
}

// Saturates far above kMaxTensorBytes.
size_t bytes_of(const ncclEpTensor_t& tensor) {
    size_t bytes = element_bytes(tensor.datatype);
    for (unsigned int i = 0; i < tensor.ndim; ++i) {
        if (tensor.sizes[i] != 0 && bytes > (size_t{1} << 40) / tensor.sizes[i]) {
            bytes = size_t{1} << 40;
        } else {
            bytes *= tensor.sizes[i];
        }
    }
    return bytes;
}

}  // namespace

Session::Session(ncclComm_t comm, Input input, const SessionKind& kind, bool is_odd, std::vector<void*>& keep)
    : comm_(comm),
      input_(input),
      kind_(kind),
      is_odd_(is_odd),
      a2sgd_(comm, input_, [this](ncclResult_t result, const char* call) { expect(result, call); }) {
    expect(crossdockCommCount(comm, &num_ranks_), "crossdockCommCount");
    if (input_.byte() % 2 == 1) {
        expect(crossdockMemAlloc(&window_memory_, kWindowBytes), "crossdockMemAlloc");
        keep.push_back(window_memory_);
        expect(crossdockCommWindowRegister(comm, window_memory_, kWindowBytes, &window_, 0),
               "crossdockCommWindowRegister");
    }
}

Session::~Session() {
    a2sgd_.destroy_all();
    for (const Handle& handle : handles_) {
        ncclEpHandleDestroy(handle.handle);
    }
    for (const Group& group : groups_) {
        ncclEpGroupDestroy(group.group);
    }
    if (window_ != nullptr) {
        crossdockCommWindowDeregister(comm_, window_);
    }
}

void Session::run() {
    // Most programs begin with something to work on.
    const uint8_t kind = input_.byte();
    is_about_a2sgd_ = kind >= 240;
    if (is_about_a2sgd_) {
        a2sgd_.create();
    } else if (kind < 224) {
        create_group();
        init_handle();
        update_handle();
    }
    for (int steps = 0; steps < kMaxSteps && !input_.is_empty(); ++steps) {
        if (kind_.is_stoppable && input_.rarely() && is_odd_) {
            return;
        }
        if (kind_.may_disagree && input_.rarely()) {
            disagree();
            return;
        }
        step();
    }
}

void Session::expect(ncclResult_t result, const char* call) {
    if (result != ncclSuccess) {
        if (result < ncclSuccess || result > ncclTimeout) {
            report(call, "the result is none of NCCL's codes");
        }
        if (std::strlen(crossdockGetLastError()) < 10) {
            report(call, "no message says what failed");
        }
    }
    if (!is_last_call_ && (result == ncclInvalidArgument || result == ncclInvalidUsage) && !note_failure(result)) {
        for (const FuzzTensor* made : tensors_of_call_) {
            if (made->memory != made->before) {
                report(call, "a refused call has written to a tensor");
            }
        }
    }
    for (FuzzTensor* made : tensors_of_call_) {
        made->before.clear();
    }
    tensors_of_call_.clear();
    window_is_used_ = false;
}

bool Session::note_failure(ncclResult_t result) {
    const std::string message = crossdockGetLastError();
    return result == ncclInvalidUsage && message.starts_with("the group has failed") &&
           failures_.insert(message).second;
}

FuzzTensor& Session::make_tensor(ncclDataType_t dtype, std::initializer_list<size_t> extents) {
    FuzzTensor& made = tensors_.emplace_back();
    ncclEpTensor_t& descriptor = made.descriptor;
    descriptor.size = NCCL_EP_TENSOR_SIZE;
    descriptor.magic = NCCL_EP_TENSOR_MAGIC;
    descriptor.ndim = static_cast<unsigned int>(extents.size());
    descriptor.datatype = dtype;
    descriptor.sizes = made.extents;
    size_t dimension = 0;
    for (size_t extent : extents) {
        made.extents[dimension++] = extent;
    }
    if (input_.rarely()) {
        const size_t first_extent = rows_are_fixed_ ? 1 : 0;
        switch (input_.below(6)) {
            case 0:
                descriptor.ndim = input_.below(5);
                break;
            case 1:
                descriptor.datatype = static_cast<ncclDataType_t>(input_.below(16));
                break;
            case 2:
                made.extents[std::max<size_t>(first_extent, input_.below(4))] = input_.or_edge(input_.byte());
                break;
            case 3:
                descriptor.magic ^= 1u << input_.below(32);
                break;
            case 4:
                descriptor.size = input_.byte();
                break;
            default:
                made.extents[std::max<size_t>(first_extent, input_.below(4))] = size_t{1} << (input_.below(64));
        }
    }
    set_memory(made);
    if (input_.rarely()) {
        descriptor.sizes = input_.below(2) == 0 ? nullptr : descriptor.sizes;
        descriptor.data = nullptr;
    }
    tensors_of_call_.push_back(&made);
    return made;
}

void Session::set_memory(FuzzTensor& made) {
    const size_t bytes = bytes_of(made.descriptor);
    if (window_ != nullptr && !window_is_used_ && input_.byte() < 64) {
        window_is_used_ = true;
        made.descriptor.win_hdl = window_;
        made.descriptor.win_offset = input_.rarely() ? input_.or_edge(input_.byte() * 64u) : 0;
        return;
    }
    if (bytes <= kMaxTensorBytes) {
        made.memory.assign(bytes, 0);
        for (size_t i = 0; i < bytes; ++i) {
            made.memory[i] = static_cast<uint8_t>(i * 37 + 11);
        }
        made.before = made.memory;
        made.descriptor.data = bytes > 0 ? made.memory.data() : nullptr;
    }
}

ncclEpTensor_t* Session::tensor(ncclDataType_t dtype, std::initializer_list<size_t> extents) {
    return tensor_if(true, dtype, extents);
}

ncclEpTensor_t* Session::tensor_if(bool belongs, ncclDataType_t dtype, std::initializer_list<size_t> extents) {
    return belongs != input_.rarely() ? &make_tensor(dtype, extents).descriptor : nullptr;
}

ncclEpTensor_t* Session::make_routing(const Handle& handle, uint32_t num_tokens) {
    const bool is_wide = input_.below(2) == 1;
    // Routing is read when operations run, so it may not lie where another tensor of theirs may.
    const bool window_was_used = std::exchange(window_is_used_, true);
    FuzzTensor& routing = make_tensor(is_wide ? ncclInt64 : ncclInt32, {num_tokens, handle.topk});
    window_is_used_ = window_was_used;
    const size_t width = element_bytes(routing.descriptor.datatype);
    for (size_t offset = 0; offset + width <= routing.memory.size(); offset += width) {
        const uint8_t choice = input_.byte();
        const int64_t expert = choice >= 250   ? static_cast<int32_t>(input_.or_edge(0xfffffffe))
                               : choice >= 235 ? -1
                                               : choice % handle.group.num_experts;
        std::memcpy(&routing.memory[offset], &expert, width);
    }
    routing.before = routing.memory;
    return input_.rarely() ? nullptr : &routing.descriptor;
}

ncclEpLayout_t Session::choose_layout(const Group& group) {
    const uint8_t choice = input_.byte();
    if (choice < 140) return NCCL_EP_LAYOUT_EXPERT_MAJOR;
    if (choice >= 240) return static_cast<ncclEpLayout_t>(choice - 240);
    const auto is_another = [&](const Layout& layout) {
        return (group.is_ht ? layout.in_ht : layout.in_ll) && layout.value != NCCL_EP_LAYOUT_EXPERT_MAJOR;
    };
    return fitting_row(kLayouts, choice, is_another).value;
}

Session::Group Session::choose_group() {
    const uint32_t choice = input_.below(static_cast<uint32_t>(groups_.size()) + 1);
    if (groups_.empty() || (choice == groups_.size() && input_.rarely())) {
        return {};
    }
    return groups_[choice % groups_.size()];
}

Session::Handle* Session::choose_handle() {
    const uint32_t choice = input_.below(static_cast<uint32_t>(handles_.size()) + 1);
    static thread_local Handle none;
    none = {};
    if (handles_.empty() || (choice == handles_.size() && input_.rarely())) {
        return &none;
    }
    return &handles_[choice % handles_.size()];
}

}  // namespace crossdock::fuzz
