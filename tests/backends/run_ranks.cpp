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
    return is_cuda(spec.kind) ? run_on_gpus(spec, num_ranks, program) : run_on_cpus(spec, num_ranks, program);
}

std::string why_unavailable(Backend kind) { return is_cuda(kind) ? why_no_gpu() : why_not_on_cpus(kind); }

}  // namespace crossdock::testing
