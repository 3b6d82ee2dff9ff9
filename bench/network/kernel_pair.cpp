// SPDX-License-Identifier: Apache-2.0
// What kernels written against NCCL's Device API cost on CPUs: over threads, over processes, and over processes that
// play two hosts; posted by the calling thread or by the proxy.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <thread>
#include <vector>

#include "bench/network/kernels.h"
#include "bench/network/measure.h"
#include "crossdock.h"

namespace crossdock::network_bench {
namespace {

// clock64() counts nanoseconds on CPUs.
constexpr double kTicksPerUs = 1e3;

void check(ncclResult_t result) {
    if (result != ncclSuccess) throw std::runtime_error(crossdockGetLastError());
}

class Rank {
  public:
    Rank(ncclComm_t comm, size_t bytes, int num_contexts) : comm_(comm), half_(num_contexts * stride_of(bytes)) {
        check(ncclMemAlloc(&memory_, 2 * half_));
        std::memset(memory_, 1, 2 * half_);
        check(ncclCommWindowRegister(comm_, memory_, 2 * half_, &window_, NCCL_WIN_DEFAULT));
        ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
        reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
        reqs.ginContextCount = num_contexts;
        reqs.ginSignalCount = kNumSignals;
        check(ncclDevCommCreate(comm_, &reqs, &dev_comm_));
    }
    void close() {
        check(ncclDevCommDestroy(comm_, &dev_comm_));
        check(ncclCommWindowDeregister(comm_, window_));
        check(ncclMemFree(memory_));
        check(ncclCommDestroy(comm_));
    }

    double round_trips(size_t bytes, uint64_t turns) {
        long long ticks = 0;
        check(crossdockLaunch(comm_, 1, 1, 0, nullptr, ping_pong, dev_comm_, window_, bytes, half_, turns_, turns,
                              &ticks));
        turns_ += turns;
        return static_cast<double>(ticks) / kTicksPerUs;
    }
    // One launch per context, each from a thread of its own: a CPU's launch runs in the thread that calls. The slowest.
    double batches(size_t bytes, int num_contexts, uint64_t batches) {
        std::vector<long long> ticks(static_cast<size_t>(num_contexts));
        std::vector<ncclResult_t> results(ticks.size());
        const auto launch = [&](int context) {
            const auto i = static_cast<size_t>(context);
            results[i] = crossdockLaunch(comm_, 1, 1, 0, nullptr, stream, dev_comm_, window_, bytes, half_, context,
                                         batches_, batches, &ticks[i]);
        };
        std::vector<std::thread> threads;
        for (int context = 1; context < num_contexts; ++context) threads.emplace_back(launch, context);
        launch(0);
        for (std::thread& thread : threads) thread.join();
        for (const ncclResult_t result : results) check(result);
        batches_ += batches;
        return static_cast<double>(*std::max_element(ticks.begin(), ticks.end())) / kTicksPerUs;
    }

  private:
    ncclComm_t comm_;
    size_t half_;
    void* memory_ = nullptr;
    ncclWindow_t window_ = nullptr;
    ncclDevComm dev_comm_;
    uint64_t turns_ = 0, batches_ = 0;
};

uint64_t batches_of(const Amount& amount) { return (amount.messages + kPutsPerBatch - 1) / kPutsPerBatch; }

Result measure(ncclComm_t comm, const Amount& amount, int num_contexts) {
    Rank self(comm, amount.bytes, num_contexts);
    Result result;
    if (amount.round_trips > 0) {
        self.round_trips(amount.bytes, amount.round_trips / 10 + 1);  // warms up
        result.half_round_trip_us = self.round_trips(amount.bytes, amount.round_trips) / 2 / amount.round_trips;
    }
    const uint64_t batches = batches_of(amount);
    self.batches(amount.bytes, num_contexts, batches);
    const double us = self.batches(amount.bytes, num_contexts, batches);
    const double messages = static_cast<double>(batches) * kPutsPerBatch * num_contexts;
    result.gigabytes_per_s = messages * static_cast<double>(amount.bytes) / us / 1e3;
    result.messages_per_us = messages / us;
    self.close();
    return result;
}

Result measure_threads(const Amount& amount, int num_contexts, int cores_per_rank) {
    ncclComm_t comms[2];
    check(crossdockCommInitAll(comms, 2));
    Result results[2];
    std::exception_ptr failures[2];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                stay_on_cores(rank, cores_per_rank);
                results[rank] = measure(comms[rank], amount, num_contexts);
            } catch (...) {
                failures[rank] = std::current_exception();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures) {
        if (failure != nullptr) std::rethrow_exception(failure);
    }
    return results[0];
}

}  // namespace

Result measure_kernels(Backend backend, bool by_proxy, const Amount& amount, int num_contexts) {
    setenv("NCCL_GIN_TYPE", by_proxy ? "2" : "4", 1);
    // A proxy, and each launch, has a core of its own where there are enough.
    const int cores_per_rank = num_contexts + (by_proxy ? 1 : 0);
    if (backend == Backend::kThreads) return measure_threads(amount, num_contexts, cores_per_rank);
    if (backend == Backend::kProcesses) {
        ncclUniqueId id;
        check(crossdockGetUniqueId(&id));
        return run_pair(
            "",
            [&](Meeting&, int rank) {
                ncclComm_t comm = nullptr;
                check(crossdockCommInitRank(&comm, 2, id, rank));
                return measure(comm, amount, num_contexts);
            },
            cores_per_rank);
    }
    if (backend != Backend::kHosts) throw std::runtime_error("no such backend");
    const std::string address = next_address();
    return run_pair(
        "tcp",
        [&](Meeting&, int rank) {
            ncclComm_t comm = nullptr;
            check(crossdockCommInitHosts(&comm, 2, rank, address.c_str()));
            return measure(comm, amount, num_contexts);
        },
        cores_per_rank);
}

Result measure_memcpy(const Amount& amount) {
    std::vector<char> source(amount.bytes, 1), target(amount.bytes, 2);
    const auto copies = std::max<uint32_t>(amount.messages, 1);
    uint64_t begin = 0;
    for (uint32_t pass = 0; pass < 2; ++pass) {  // the first one warms up
        begin = now_ns();
        for (uint32_t i = 0; i < copies; ++i) {
            std::memcpy(target.data(), source.data(), amount.bytes);
            std::atomic_signal_fence(std::memory_order_seq_cst);
        }
    }
    const double us = static_cast<double>(now_ns() - begin) / 1e3;
    Result result;
    result.half_round_trip_us = us / copies;
    result.gigabytes_per_s = static_cast<double>(amount.bytes) * copies / us / 1e3;
    return result;
}

}  // namespace crossdock::network_bench
