// SPDX-License-Identifier: Apache-2.0
#include "bench/report.h"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <cstdio>
#include <fstream>
#include <thread>

#include "bench/gpu.h"
#include "bench/lower_bound.h"
#include "bench/overlap.h"
#include "tools/common/terminal.h"

namespace crossdock::bench {
namespace {

using tools::Colour;
using tools::paint;

// Three significant figures, from microseconds to seconds.
std::string in_us(double us) { return us < 99.95 ? fmt::format("{:.2f}", us) : fmt::format("{:.0f}", us); }

std::string in_us(const tools::Spread& spread, double tools::Spread::*member) {
    return spread.count > 0 ? in_us(spread.*member) : "-";
}

std::string gigabytes_per_second(double bytes, double us) {
    return us > 0 && bytes > 0 ? fmt::format("{:.2f}", bytes / us * 1e-3) : "-";
}

std::string model_of_cpu() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.rfind("model name", 0) == 0) {
            return line.substr(line.find(':') + 2);
        }
    }
    return "unknown";
}

void print_row(const Options& options, const CaseResult& result, const char* name, Operation operation,
               const Timing& timing, const Timing& bound) {
    const OperationBytes& bytes = result.bytes[static_cast<int>(operation)];
    const double us = compared(timing).median;
    const double ratio = us > 0 ? compared(bound).median / us : 0;
    fmt::print("  {:>6} {:9} {:12.12}", result.num_tokens, operation_name(operation), name);
    fmt::print(" {:>8} {:>8} {:>8} {:>8}", in_us(timing.time, &tools::Spread::median),
               in_us(timing.time, &tools::Spread::p99), in_us(timing.time, &tools::Spread::min),
               in_us(timing.time, &tools::Spread::max));
    if (is_cuda(options.backend)) {
        fmt::print(" {:>8} {:>7} {:>7}", in_us(timing.device, &tools::Spread::median),
                   in_us(timing.host, &tools::Spread::median), in_us(timing.host, &tools::Spread::min));
    }
    fmt::print(" {:>7} {:>7} {:>8} {:>6.0f} %\n",
               gigabytes_per_second(options.is_high_throughput() ? bytes.wire : bytes.v1, us),
               gigabytes_per_second(bytes.v2, us), in_us(compared(bound), &tools::Spread::median), ratio * 100);
}

// What only one of the modes knows.
std::string special_case(const Options& options) {
    if (!options.is_high_throughput()) {
        return fmt::format("{}{}{}{}", options.sender_sums ? "sender's sums" : "exact sums",
                           options.split ? ", split" : "", options.int32_ids ? ", int32 ids" : "",
                           options.masks ? ", masks" : "");
    }
    return fmt::format(
        "{} pass{}{}{}{}", options.backward ? "backward" : "forward",
        options.quantises_combine() ? fmt::format(", combine in {}", recipe_of(options.combine_recipe).option) : "",
        options.sender_sums ? "" : ", exact sums", options.eager ? ", eager" : "",
        options.alignment > 1 ? fmt::format(", zones of {}", options.alignment) : "");
}

// Tokens, and what else may differ between the cases of a run.
std::string case_name(const CaseResult& result) {
    const Options& setting = result.setting;
    return fmt::format("{} x {}, {} of {}{}", result.num_tokens, setting.hidden, setting.topk, setting.num_experts,
                       setting.max_num_sms > 0 ? fmt::format(", {} SMs", setting.max_num_sms) : "");
}

}  // namespace

Machine describe_machine(const Options& options) {
    utsname names{};
    uname(&names);
    Machine machine;
    machine.host = names.nodename;
    machine.system = fmt::format("{} {}", names.sysname, names.release);
    machine.cpu = model_of_cpu();
    machine.num_cpus = static_cast<int>(std::thread::hardware_concurrency());
    machine.gpu = is_cuda(options.backend) ? describe_gpu() : "";
    return machine;
}

void print_heading(const Options& options, const Machine& machine) {
    const char* mode = options.is_high_throughput() ? "high throughput" : "low latency";
    const std::string ranks =
        !is_cuda(options.backend)
            ? fmt::format("{} ranks as {}", options.num_ranks, backend_name(options.backend))
            : fmt::format("{} ranks on GPUs, as {}", options.num_ranks,
                          has_processes(options.backend) || options.launched ? "processes" : "threads");
    fmt::print("{}\n", paint(Colour::kBold, std::string("ep_bench: ") + mode + ", " + ranks));
    fmt::print("  machine  {}, {} CPUs; {}\n", machine.cpu, machine.num_cpus, machine.system);
    if (!machine.gpu.empty()) {
        fmt::print("           {}\n", machine.gpu);
    }
    fmt::print("  case     {}, {}, recipe {}, {}, {}, routing {}, seed {}\n", label_of(options.layout),
               find_data_type(options.dtype)->option, recipe_of(options.recipe).option, special_case(options),
               options.windows ? "windows" : "no windows", options.routing, options.seed);
    fmt::print("  timing   {} iterations after {}{}\n", options.num_iterations, options.num_warmups,
               options.skew_us > 0 ? fmt::format(", ranks start {} us apart in all", options.skew_us) : "");
    std::fflush(stdout);
}

void print_setting(const Options& setting) {
    fmt::print("\n  hidden {}, top-{} of {} experts{}\n\n", setting.hidden, setting.topk, setting.num_experts,
               setting.max_num_sms > 0 ? fmt::format(", at most {} SMs", setting.max_num_sms) : "");
    fmt::print("  {:>6} {:9} {:12} {:>8} {:>8} {:>8} {:>8}", "tokens", "operation", "library", "median", "p99", "min",
               "max");
    if (is_cuda(setting.backend)) {
        fmt::print(" {:>8} {:>7} {:>7}", "device", "host", "min");
    }
    fmt::print(" {:>7} {:>7} {:>8} {:>8}\n", setting.is_high_throughput() ? "wire" : "v1 GB/s", "v2 GB/s", "bound",
               "of bound");
    std::fflush(stdout);
}

void print_case(const Options& options, const CaseResult& result) {
    for (Operation operation : options.operations()) {
        const auto index = static_cast<int>(operation);
        for (const LibraryResult& library : result.libraries) {
            print_row(options, result, library.name.c_str(), operation, library.timings[index],
                      result.lower_bounds[index]);
        }
    }
    for (const LibraryResult& library : result.libraries) {
        if (options.validate) {
            const Validation& validation = library.validation;
            fmt::print("         {}: {} of {} rows and {} of {} sums wrong, largest error {:.1f} % of its bound: {}\n",
                       library.name, validation.wrong_rows, validation.num_rows, validation.wrong_values,
                       validation.num_values, validation.largest_part * 100,
                       validation.passed() ? paint(Colour::kGreen, "valid") : paint(Colour::kRed, "NOT VALID"));
        }
    }
    std::fflush(stdout);
}

void print_footer(const Options& options, const std::vector<CaseResult>& results) {
    const OperationBytes& dispatch = results.back().bytes[static_cast<int>(Operation::kDispatch)];
    const OperationBytes& combine = results.back().bytes[static_cast<int>(Operation::kCombine)];
    const bool on_gpu = is_cuda(options.backend);
    fmt::print(
        "\n  Times in us. {}\n",
        on_gpu ? "Latency by events, mean over ranks. Host: time of the call while the GPU is idle, median and minimum."
               : "Latency: from the first rank's start to the last rank's end.");
    if (on_gpu) {
        fmt::print("  Device: steady-state time per operation, up to {} operations per CUDA graph, slowest rank.\n",
                   options.graph_operations);
    }
    fmt::print("  GB/s: bytes {} and by NCCL EP 0.2's definition (v2), mean over ranks, over {}.\n",
               options.is_high_throughput() ? "that leave each rank (wire)" : "by NCCL EP 0.1's (v1)",
               on_gpu ? "the device's median time" : "the median time");
    fmt::print("  Lower bound: {}.\n", results.back().lower_bound);
    fmt::print(
        "  With {} tokens per rank, a dispatch delivers {:.2f} MB to each rank and a combine {:.2f}; {:.2f} and {:.2f} "
        "MB leave each rank.\n",
        results.back().num_tokens, dispatch.delivered * 1e-6, combine.delivered * 1e-6, dispatch.wire * 1e-6,
        combine.wire * 1e-6);
    for (const LibraryResult& library : results.front().libraries) {
        const StartUp& start = library.start_up;
        fmt::print("  {} took {:.1f} ms for a group and {:.1f} for a handle{}{}.\n", library.name, start.group,
                   start.handle,
                   options.is_high_throughput()
                       ? fmt::format(", {:.1f} for the first update, dispatch and combine", start.first_operations)
                       : "",
                   on_gpu ? fmt::format(", after {:.0f} for NCCL's communicator and {:.0f} for its first window",
                                        start.communicator, start.first_window)
                          : "");
        if (library.symmetric_bytes + library.local_bytes > 0) {
            fmt::print("  {} uses {:.1f} MiB of symmetric and {:.1f} MiB of other memory per rank.\n", library.name,
                       static_cast<double>(library.symmetric_bytes) / 1048576,
                       static_cast<double>(library.local_bytes) / 1048576);
        }
        if (library.device_bytes > 0) {
            fmt::print("  {}: group and handle use {:.0f} MiB of GPU memory.\n", library.name,
                       static_cast<double>(library.device_bytes) / 1048576);
        }
    }
    std::fflush(stdout);
}

void print_kernels(const std::vector<CaseResult>& results) {
    fmt::print("\n  Kernels by CUPTI, us per operation, begun by all ranks at once, mean over ranks\n");
    fmt::print("  {:32} {:9} {:12} {:>8} {:>8} {:>8} {:>8} {:>8}\n", "case", "operation", "library", "median", "mean",
               "min", "max", "kernels");
    for (const CaseResult& result : results) {
        for (Operation operation : result.setting.operations()) {
            for (const LibraryResult& library : result.libraries) {
                const KernelTiming& timing = library.kernels[static_cast<int>(operation)];
                const auto column = [&timing](double tools::Spread::*member) { return in_us(timing.duration, member); };
                fmt::print("  {:32} {:9} {:12.12} {:>8} {:>8} {:>8} {:>8} {:>8.1f}\n", case_name(result),
                           operation_name(operation), library.name, column(&tools::Spread::median),
                           column(&tools::Spread::mean), column(&tools::Spread::min), column(&tools::Spread::max),
                           timing.num_kernels);
            }
        }
    }
    std::fflush(stdout);
}

void print_overlaps(const std::vector<CaseResult>& results) {
    fmt::print("\n  A product of {0} x {0} bf16 matrices between the halves of an operation, median us\n",
               kProductEdge);
    fmt::print("  {:32} {:9} {:12} {:>8} {:>8} {:>8} {:>8} {:>8}\n", "case", "operation", "library", "alone", "between",
               "loss", "send", "complete");
    for (const CaseResult& result : results) {
        for (Operation operation : {Operation::kDispatch, Operation::kCombine}) {
            for (const LibraryResult& library : result.libraries) {
                const OverlapTiming& timing = library.overlaps[static_cast<int>(operation)];
                fmt::print("  {:32} {:9} {:12.12} {:>8} {:>8} {:>6.1f} % {:>8} {:>8}\n", case_name(result),
                           operation_name(operation), library.name, in_us(timing.alone.median),
                           in_us(timing.between.median), timing.loss() * 100, in_us(timing.send.median),
                           in_us(timing.complete.median));
            }
        }
    }
    std::fflush(stdout);
}

}  // namespace crossdock::bench
