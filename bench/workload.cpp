// SPDX-License-Identifier: Apache-2.0
#include "bench/workload.h"

#include <algorithm>

#include "bench/gpu.h"
#include "bench/ht_workload.h"
#include "bench/ll_workload.h"
#include "bench/stopwatch.h"

namespace crossdock::bench {
namespace {

// A peer that does not answer for this long is lost.
constexpr uint64_t kTimeoutNs = 30'000'000'000;

}  // namespace

Workload::Workload(const LibraryComm& comm, const tools::RankContext& context, const Options& options,
                   tools::Device& device)
    : library_(comm.library()),
      comm_(comm),
      context_(context),
      options_(options),
      device_(device),
      start_up_(comm.start_up()) {}

Workload::~Workload() {
    library_.handle_destroy(handle_);
    library_.group_destroy(group_);
}

void Workload::make_handle(ncclEpGroupConfig_t config, const ncclEpHandleConfig_t* handle_config) {
    config.version = NCCL_EP_API_VERSION;
    config.num_experts = static_cast<unsigned>(options_.num_experts);
    config.max_dispatch_tokens_per_rank = static_cast<unsigned>(options_.max_tokens());
    config.timeout_ns = kTimeoutNs;
    config.max_num_sms = static_cast<unsigned>(options_.max_num_sms);
    const auto create_group = [&] {
        if (!options_.is_high_throughput() || options_.sender_sums) {
            library_.check(library_.create_group(&group_, comm(), &config), "ncclEpCreateGroup");
            return;
        }
        if (library_.create_group_with_options == nullptr) {
            throw std::runtime_error(library_.name + ": has no invariant groups, which --sums exact times");
        }
        crossdockGroupOptions_t of_group = CROSSDOCK_GROUP_OPTIONS_INIT;
        of_group.invariant = 1;
        library_.check(library_.create_group_with_options(&group_, comm(), &config, &of_group), "crossdockCreateGroup");
    };
    if (handle_config != nullptr) {
        handle_config_ = *handle_config;
    }
    used_before_ = is_cuda(options_.backend) ? used_gpu_memory() : 0;
    start_up_.group = time_us(create_group) * 1e-3;
    start_up_.handle = time_us([this] { init_handle(); }) * 1e-3;
    note_memory();
}

void Workload::init_handle() {
    library_.check(library_.init_handle(&handle_, group_, options_.layout, handle_config_ ? &*handle_config_ : nullptr,
                                        options_.topk, nullptr),
                   "ncclEpInitHandle");
}

void Workload::start_pass() {
    kept_handle_ = handle_;
    init_handle();
    update();
    dispatch(false);
    combine(false);
}

void Workload::end_pass() {
    library_.check(library_.handle_destroy(handle_), "ncclEpHandleDestroy");
    handle_ = kept_handle_;
}

void Workload::note_memory() {
    const size_t used_now = is_cuda(options_.backend) ? used_gpu_memory() : 0;
    device_bytes_ = used_now > used_before_ ? used_now - used_before_ : 0;
}

Work Workload::work(Operation operation) {
    Work work;
    work.run = [this, operation](int count) { run(operation, count); };
    return work;
}

void Workload::run(Operation operation, int count) {
    for (int i = 0; i < count; ++i) {
        switch (operation) {
            case Operation::kUpdate:
                update();
                break;
            case Operation::kDispatch:
            case Operation::kCombine:
                run_once(operation);
                break;
            case Operation::kPair:
                run_once(Operation::kDispatch);
                run_once(Operation::kCombine);
                break;
        }
    }
}

void Workload::run_once(Operation operation) {
    if (options_.split) {
        send(operation);
        complete();
    } else if (operation == Operation::kDispatch) {
        dispatch(false);
    } else {
        combine(false);
    }
}

void Workload::send(Operation operation) {
    if (operation == Operation::kDispatch) {
        dispatch(true);
    } else {
        combine(true);
    }
}

void Workload::complete() { library_.check(library_.complete(handle_, nullptr, device_.stream()), "ncclEpComplete"); }

TensorMemory* Workload::allocate(size_t bytes, bool in_window) {
    memories_.push_back(std::make_unique<TensorMemory>(library_, comm(), options_.backend, device_,
                                                       std::max<size_t>(bytes, 1), in_window));
    return memories_.back().get();
}

std::unique_ptr<Workload> make_workload(const LibraryComm& comm, const tools::RankContext& context,
                                        const Options& options, tools::Device& device,
                                        const std::vector<int32_t>& routing, const std::vector<float>& weights) {
    if (options.is_high_throughput()) {
        return std::make_unique<HtWorkload>(comm, context, options, device, routing, weights);
    }
    return std::make_unique<LlWorkload>(comm, context, options, device, routing, weights);
}

}  // namespace crossdock::bench
