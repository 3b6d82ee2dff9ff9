// SPDX-License-Identifier: Apache-2.0
#include "run_ranks.h"

#include "internal.h"

namespace crossdock::testing {

void run_guarded(RankContext& context, const RankProgram& program) {
    try {
        program(context);
    } catch (const StopProgram&) {
        // Recorded where it was thrown.
    } catch (const std::exception& error) {
        context.record_failure(__FILE__, __LINE__,
                               fmt::format("the program ended with an exception: {}", error.what()));
    }
}

RunReport run_ranks(const BackendSpec& spec, int num_ranks, const RankProgram& program) {
    switch (spec.kind) {
        case Backend::kThreads:
            return run_as_threads(num_ranks, program);
        case Backend::kProcesses:
            return run_as_processes(spec, num_ranks, program);
        case Backend::kHosts:
            return run_as_hosts(spec, num_ranks, program);
        case Backend::kSimulation:
            return run_simulated(spec, num_ranks, program);
        case Backend::kCuda:
            return run_on_gpu_threads(num_ranks, program);
        case Backend::kCudaProcesses:
            return run_on_gpu_processes(spec, num_ranks, program);
    }
    return {};
}

std::string why_unavailable(Backend kind) {
    if (kind == Backend::kHosts) return why_no_hosts();
    return is_cuda(kind) ? why_no_gpu() : "";
}

}  // namespace crossdock::testing
