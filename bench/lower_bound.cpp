// SPDX-License-Identifier: Apache-2.0
#include "bench/lower_bound.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "bench/gpu.h"
#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

class CopyBound : public LowerBound {
  public:
    explicit CopyBound(const OperationBytes& largest)
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
    std::string describe() const override {
        return "memcpy of the delivered bytes by the same threads or processes, all at once";
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

class WireBound : public LowerBound {
  public:
    WireBound(int num_ranks, std::unique_ptr<GpuLowerBound> gpu) : num_ranks_(num_ranks), gpu_(std::move(gpu)) {}

    Work work(Operation, int, const OperationBytes& bytes) override {
        Work work;
        work.run = [this, &bytes](int count) { gpu_->enqueue(bytes.wire_to, count); };
        return work;
    }
    std::string describe() const override {
        const int team = gpu_->lsa_team_size();
        return fmt::format("bulk writes of the bytes that must leave each rank{}, all ranks at once, without launches",
                           team < num_ranks_ ? fmt::format(" for others of its LSA team of {}", team) : "");
    }

  private:
    int num_ranks_;
    std::unique_ptr<GpuLowerBound> gpu_;
};

class BareBound : public LowerBound {
  public:
    explicit BareBound(std::unique_ptr<BareLl> bare) : bare_(std::move(bare)) {}

    Work work(Operation operation, int num_tokens, const OperationBytes&) override {
        Work work;
        work.run = [this, operation, num_tokens](int count) { bare_->enqueue(operation, num_tokens, count); };
        return work;
    }
    std::string describe() const override {
        return "bare kernels that move the same rows, counts and flags through this GPU's memory, launches included";
    }

  private:
    std::unique_ptr<BareLl> bare_;
};

// With a single rank nothing crosses a wire: the bound is bare kernels. A routing from a file may drop tokens, which
// they cannot.
bool has_bare_bound(const Options& options) {
    return is_cuda(options.backend) && options.num_ranks == 1 && !options.is_high_throughput() &&
           options.routing.find(".npy") == std::string::npos && options.recipe == NCCL_EP_DISP_QUANT_NONE &&
           options.dtype == ncclBfloat16 && !options.sender_sums;
}

}  // namespace

std::unique_ptr<LowerBound> make_lower_bound(const tools::RankContext& context, const Options& options, ncclComm_t comm,
                                             tools::Device& device, const OperationBytes& largest,
                                             const std::vector<int32_t>& routing) {
    if (!is_cuda(options.backend)) {
        return std::make_unique<CopyBound>(largest);
    }
    if (has_bare_bound(options)) {
        return std::make_unique<BareBound>(make_bare_ll(
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
    return std::make_unique<WireBound>(
        context.num_ranks, make_gpu_lower_bound(context, comm, device, *std::max_element(all.begin(), all.end())));
}

}  // namespace crossdock::bench
