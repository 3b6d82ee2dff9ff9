// SPDX-License-Identifier: Apache-2.0
// Timing one rank's operations in step with all other ranks.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "bench/gate.h"
#include "bench/gpu.h"
#include "bench/kernel_clock.h"
#include "bench/options.h"
#include "bench/overlap.h"
#include "bench/results.h"
#include "bench/work.h"
#include "tools/common/device.h"

namespace crossdock::bench {

class Measurer {
  public:
    Measurer(const tools::RankContext& context, const Options& options, tools::Device& device);

    // Times all works, in turn within each iteration so that they share what the machine does meanwhile; then, on GPUs,
    // the calls alone and graphs of many operations. Collective; the result, one entry per work, is complete on rank 0.
    std::vector<Timing> measure(const std::vector<Work>& works);

    // The kernels of each work (GPUs only), every operation begun by all ranks at once. Collective; complete on rank 0.
    // Without samples where not every kernel was recorded.
    std::vector<KernelTiming> measure_kernels(const std::vector<Work>& works, GpuGate& gate, KernelClock& clock);

    // A matrix product between the halves of an operation (GPUs only). Collective; complete on rank 0.
    OverlapTiming measure_overlap(GpuOverlap& overlap, const std::function<void()>& send,
                                  const std::function<void()>& complete);

  private:
    struct Sample {
        double start_us = 0;
        double end_us = 0;
    };

    Sample time_once(const Work& work);
    std::vector<std::vector<Sample>> gather(const std::vector<Sample>& own) const;  // [samples][ranks]
    tools::Spread mean_over_ranks(const std::vector<double>& own) const;
    Timing reduce(const std::vector<std::vector<Sample>>& samples) const;
    tools::Spread time_calls(const Work& work);
    void settle(const Work& work);
    int operations_per_graph(const Timing& timing) const;
    tools::Spread time_replays(size_t index, const Timing& timing);
    void barrier() const;

    const tools::RankContext& context_;
    const Options& options_;
    tools::Device& device_;
    std::unique_ptr<GpuStopwatch> gpu_;  // null: CPUs
};

}  // namespace crossdock::bench
