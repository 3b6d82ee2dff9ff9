// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a program run: the option --backend of the benchmarks, the demo and the conformance suite.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace crossdock {

enum class Backend {
    kThreads,       // ranks are threads of this process
    kProcesses,     // ranks are processes of this machine
    kHosts,         // ranks are processes on hosts, real or played, that the network connects
    kSimulation,    // ranks are fibers of one thread; one seed is one run
    kCuda,          // ranks are threads of this process, on GPUs
    kCudaProcesses  // ranks are processes, on GPUs
};

inline const char* backend_name(Backend backend) {
    switch (backend) {
        case Backend::kThreads:
            return "threads";
        case Backend::kProcesses:
            return "processes";
        case Backend::kHosts:
            return "hosts";
        case Backend::kSimulation:
            return "simulation";
        case Backend::kCuda:
            return "cuda";
        case Backend::kCudaProcesses:
            return "cuda-processes";
    }
    return "";
}

inline bool is_cuda(Backend backend) { return backend == Backend::kCuda || backend == Backend::kCudaProcesses; }

// Of these backends the one of that name.
inline std::optional<Backend> backend_named(const std::string& name, const std::vector<Backend>& backends) {
    for (const Backend backend : backends) {
        if (name == backend_name(backend)) return backend;
    }
    return std::nullopt;
}

}  // namespace crossdock
