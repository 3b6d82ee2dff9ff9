// SPDX-License-Identifier: Apache-2.0
// Tables for people, JSON for machines.
#pragma once

#include <string>
#include <vector>

#include "bench/options.h"
#include "bench/results.h"

namespace crossdock::bench {

struct Machine {
    std::string host;
    std::string system;  // kernel
    std::string cpu;
    int num_cpus = 0;
    std::string gpu;  // empty in the CPU backends
};

Machine describe_machine(const Options& options);

void print_heading(const Options& options, const Machine& machine);
void print_setting(const Options& setting);
void print_case(const Options& options, const CaseResult& result);
void print_footer(const Options& options, const std::vector<CaseResult>& results);

// With --kernels and --overlap.
void print_kernels(const std::vector<CaseResult>& results);
void print_overlaps(const std::vector<CaseResult>& results);

// What is known so far, where a file was asked for. Throws std::runtime_error with a message where it cannot be
// written.
void write_json(const Options& options, const Machine& machine, const std::vector<CaseResult>& results);

}  // namespace crossdock::bench
