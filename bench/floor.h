// SPDX-License-Identifier: Apache-2.0
// What an operation is compared with: the same bytes moved with nothing else to do, measured in the same run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench/bytes.h"
#include "bench/options.h"
#include "bench/work.h"
#include "tools/common/device.h"

namespace crossdock::bench {

class Floor {
  public:
    virtual ~Floor() = default;

    // The work that moves `bytes`, which must outlive it, of an operation of so many tokens. CPUs: memcpy of the
    // delivered bytes by this rank's thread; GPUs: bulk writes of the wire's bytes to the peers, repetitions within one
    // kernel, so that what a launch costs is not in the floor of graphs; a single rank's low latency: bare kernels
    // (BareLl), launches included. All ranks do it at once.
    virtual Work work(Operation operation, int num_tokens, const OperationBytes& bytes) = 0;

    // What it does, for the report.
    virtual std::string describe() const = 0;
};

// Room for operations up to `largest`, with this routing [ranks][tokens][topk]. GPUs: collective, on a communicator of
// NCCL.
std::unique_ptr<Floor> make_floor(const tools::RankContext& context, const Options& options, ncclComm_t comm,
                                  tools::Device& device, const OperationBytes& largest,
                                  const std::vector<int32_t>& routing);

}  // namespace crossdock::bench
