// SPDX-License-Identifier: Apache-2.0
// A lower bound of an operation's time: the same bytes moved without any other work, measured in the same run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench/bytes.h"
#include "bench/options.h"
#include "bench/work.h"
#include "tools/common/device.h"

namespace crossdock::bench {

class LowerBound {
  public:
    virtual ~LowerBound() = default;

    // The work that moves the `bytes` of an operation with num_tokens tokens; `bytes` must outlive it. All ranks do it
    // at once. CPUs: this rank's thread copies the delivered bytes with memcpy. GPUs: bulk writes of the wire's bytes
    // to the peers; all repetitions are one kernel, so the bound includes no launches. One rank in low latency: bare
    // kernels (BareLl), launches included.
    virtual Work work(Operation operation, int num_tokens, const OperationBytes& bytes) = 0;

    // What is measured, for the report.
    virtual std::string describe() const = 0;
};

// Allocates for operations up to `largest`. routing: [ranks][tokens][topk]. GPUs: collective, on NCCL's communicator.
std::unique_ptr<LowerBound> make_lower_bound(const tools::RankContext& context, const Options& options, ncclComm_t comm,
                                             tools::Device& device, const OperationBytes& largest,
                                             const std::vector<int32_t>& routing);

}  // namespace crossdock::bench
