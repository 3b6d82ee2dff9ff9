// SPDX-License-Identifier: Apache-2.0
#include "world.h"

#include "internal.h"

namespace crossdock::testing {

const char* world_name(WorldKind kind) {
    switch (kind) {
        case WorldKind::kThreads:
            return "threads";
        case WorldKind::kProcesses:
            return "processes";
        case WorldKind::kHosts:
            return "hosts";
        case WorldKind::kDeterministic:
            return "deterministic";
        case WorldKind::kGpu:
            return "gpu";
        case WorldKind::kGpuProcesses:
            return "gpu-processes";
    }
    return "";
}

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

RunReport run_ranks(const WorldSpec& spec, int num_ranks, const RankProgram& program) {
    switch (spec.kind) {
        case WorldKind::kThreads:
            return run_as_threads(num_ranks, program);
        case WorldKind::kProcesses:
            return run_as_processes(spec, num_ranks, program);
        case WorldKind::kHosts:
            return run_as_hosts(spec, num_ranks, program);
        case WorldKind::kDeterministic:
            return run_deterministic(spec, num_ranks, program);
        case WorldKind::kGpu:
            return run_on_gpu_threads(num_ranks, program);
        case WorldKind::kGpuProcesses:
            return run_on_gpu_processes(spec, num_ranks, program);
    }
    return {};
}

std::string why_unavailable(WorldKind kind) {
    if (kind == WorldKind::kHosts) return why_no_hosts();
    return is_gpu_world(kind) ? why_no_gpu() : "";
}

}  // namespace crossdock::testing
