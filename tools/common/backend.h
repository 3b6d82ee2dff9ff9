// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a program run: the option --backend of the benchmarks, the demo and the conformance suite. Ranks
// are started by tools/common/ranks.cpp, those of tests by tests/backends.
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

struct BackendOption {
    Backend value;
    const char* name;     // of the option
    const char* meaning;  // for --help
    bool is_cuda = false;
    bool has_processes = false;  // each rank is one; else all ranks are in this process
    // Programs that offer it. The conformance suite has all.
    bool in_bench = false;
    bool in_demo = false;
};

// In the order in which the suite runs them: processes are forked from it while it has no threads yet.
inline constexpr BackendOption kBackends[] = {
    {.value = Backend::kProcesses,
     .name = "processes",
     .meaning = "of this machine",
     .has_processes = true,
     .in_bench = true,
     .in_demo = true},
    {.value = Backend::kHosts,
     .name = "hosts",
     .meaning = "processes; nodes share no memory and are connected by UCX",
     .has_processes = true,
     .in_demo = true},
    {.value = Backend::kThreads, .name = "threads", .meaning = "of this process", .in_bench = true, .in_demo = true},
    {.value = Backend::kSimulation, .name = "simulation", .meaning = "fibers of one thread", .in_demo = true},
    {.value = Backend::kCuda,
     .name = "cuda",
     .meaning = "threads with GPUs",
     .is_cuda = true,
     .in_bench = true,
     .in_demo = true},
    {.value = Backend::kCudaProcesses,
     .name = "cuda-processes",
     .meaning = "processes with GPUs",
     .is_cuda = true,
     .has_processes = true,
     .in_bench = true},
};

constexpr const BackendOption& option_of(Backend backend) {
    for (const BackendOption& option : kBackends) {
        if (option.value == backend) return option;
    }
    return kBackends[0];
}

inline const char* backend_name(Backend backend) { return option_of(backend).name; }
inline bool is_cuda(Backend backend) { return option_of(backend).is_cuda; }
inline bool has_processes(Backend backend) { return option_of(backend).has_processes; }

inline std::vector<Backend> backends_where(bool (*fits)(const BackendOption& option)) {
    std::vector<Backend> fitting;
    for (const BackendOption& option : kBackends) {
        if (fits(option)) fitting.push_back(option.value);
    }
    return fitting;
}

inline std::vector<std::string> backend_names(const std::vector<Backend>& backends) {
    std::vector<std::string> names;
    for (const Backend backend : backends) names.emplace_back(backend_name(backend));
    return names;
}

// For --help: "threads: of this process; ...".
inline std::string backend_meanings(const std::vector<Backend>& backends) {
    std::string text;
    for (const Backend backend : backends)
        text += std::string(text.empty() ? "" : "; ") + backend_name(backend) + ": " + option_of(backend).meaning;
    return text;
}

// Of these backends the one of that name.
inline std::optional<Backend> backend_named(const std::string& name, const std::vector<Backend>& backends) {
    for (const Backend backend : backends) {
        if (name == backend_name(backend)) return backend;
    }
    return std::nullopt;
}

}  // namespace crossdock
