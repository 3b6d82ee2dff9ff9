// SPDX-License-Identifier: Apache-2.0
#include "bench/floor.h"

#include <algorithm>
#include <cstring>

#include "bench/gpu.h"
#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

class CopyFloor : public Floor {
  public:
    explicit CopyFloor(const OperationBytes& largest)
        : source_(buffer_bytes(largest), 1), target_(buffer_bytes(largest), 2) {}

    Work work(Operation, int, const OperationBytes& bytes) override {
        Work work;
        work.run = [this, size = static_cast<size_t>(bytes.delivered)](int count) {
            for (int i = 0; i < count; ++i) {
                for (size_t done = 0; done < size; done += source_.size()) {
                    std::memcpy(target_.data(), source_.data(), std::min(size - done, source_.size()));
                }
            }
        };
        return work;
    }

  private:
    // More than caches hold: going round in it is like going on.
    static constexpr size_t kMaxBufferBytes = size_t{256} << 20;

    static size_t buffer_bytes(const OperationBytes& largest) {
        return std::clamp<size_t>(static_cast<size_t>(largest.delivered), 1, kMaxBufferBytes);
    }

    std::vector<char> source_;
    std::vector<char> target_;
};

class WireFloor : public Floor {
  public:
    explicit WireFloor(std::unique_ptr<GpuFloor> gpu) : gpu_(std::move(gpu)) {}

    Work work(Operation, int, const OperationBytes& bytes) override {
        Work work;
        work.run = [this, &bytes](int count) { gpu_->enqueue(bytes.wire_to, count); };
        return work;
    }

  private:
    std::unique_ptr<GpuFloor> gpu_;
};

class BareFloor : public Floor {
  public:
    explicit BareFloor(std::unique_ptr<BareLl> bare) : bare_(std::move(bare)) {}

    Work work(Operation operation, int num_tokens, const OperationBytes&) override {
        Work work;
        work.run = [this, operation, num_tokens](int count) { bare_->enqueue(operation, num_tokens, count); };
        return work;
    }

  private:
    std::unique_ptr<BareLl> bare_;
};

}  // namespace

bool has_bare_floor(const Options& options) {
    return is_cuda(options.backend) && options.num_ranks == 1 && !options.is_high_throughput() &&
           options.routing.find(".npy") == std::string::npos && options.recipe == NCCL_EP_DISP_QUANT_NONE &&
           options.dtype == ncclBfloat16 && !options.sender_sums;
}

std::unique_ptr<Floor> make_floor(const tools::RankContext& context, const Options& options, ncclComm_t comm,
                                  tools::Device& device, const OperationBytes& largest,
                                  const std::vector<int32_t>& routing) {
    if (!is_cuda(options.backend)) {
        return std::make_unique<CopyFloor>(largest);
    }
    if (has_bare_floor(options)) {
        return std::make_unique<BareFloor>(make_bare_ll(
            device,
            {options.max_tokens(), options.topk, options.num_experts, options.is_expert_major() ? options.topk : 1,
             static_cast<uint32_t>(options.hidden) * 2, routing}));
    }
    uint64_t own_largest = 16;
    for (uint64_t bytes : largest.wire_to) {
        own_largest = std::max(own_largest, bytes);
    }
    // Windows have the same size on every rank.
    std::vector<uint64_t> all(static_cast<size_t>(context.num_ranks));
    check(crossdockCommAllGather(context.host, &own_largest, all.data(), sizeof own_largest));
    return std::make_unique<WireFloor>(
        make_gpu_floor(context, comm, device, *std::max_element(all.begin(), all.end())));
}

}  // namespace crossdock::bench
