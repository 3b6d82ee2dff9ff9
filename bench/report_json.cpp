// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "bench/report.h"

namespace crossdock::bench {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const tools::Spread& spread) {
    return {{"median", spread.median}, {"p99", spread.p99},   {"min", spread.min},
            {"max", spread.max},       {"mean", spread.mean}, {"count", spread.count}};
}

Json to_json(const Timing& timing) {
    Json json = {{"time_us", to_json(timing.time)}};
    if (timing.slowest.count > 0) {
        json["slowest_rank_us"] = to_json(timing.slowest);
    }
    if (timing.host.count > 0) {
        json["host_us"] = to_json(timing.host);
    }
    if (timing.device.count > 0) {
        json["device_us"] = to_json(timing.device);
        json["graph_operations"] = timing.graph_operations;
    }
    return json;
}

Json operation_json(const CaseResult& result, const LibraryResult& library, int index) {
    const OperationBytes& bytes = result.bytes[index];
    const Timing& timing = library.timings[index];
    const double us = compared(timing).median;
    Json json = to_json(timing);
    if (bytes.v1 > 0) {
        json["v1_gb_s"] = us > 0 ? bytes.v1 / us * 1e-3 : 0;
    }
    json["v2_gb_s"] = us > 0 ? bytes.v2 / us * 1e-3 : 0;
    json["wire_gb_s"] = us > 0 ? bytes.wire / us * 1e-3 : 0;
    json["part_of_bound"] = us > 0 ? compared(result.lower_bounds[index]).median / us : 0;
    if (const KernelTiming& kernel = library.kernels[index]; kernel.duration.count > 0) {
        json["kernel_us"] = to_json(kernel.duration);
        json["kernels"] = kernel.num_kernels;
    }
    if (const OverlapTiming& overlap = library.overlaps[index]; overlap.alone.count > 0) {
        json["overlap"] = {{"product_alone_us", to_json(overlap.alone)},
                           {"product_between_us", to_json(overlap.between)},
                           {"send_us", to_json(overlap.send)},
                           {"complete_us", to_json(overlap.complete)},
                           {"loss", overlap.loss()}};
    }
    return json;
}

Json case_json(const CaseResult& result) {
    Json json = {{"tokens", result.num_tokens},
                 {"hidden", result.setting.hidden},
                 {"experts", result.setting.num_experts},
                 {"topk", result.setting.topk},
                 {"max_num_sms", result.setting.max_num_sms}};
    if (result.setting.is_high_throughput()) {
        json["max_recv_tokens"] = result.setting.eager ? 0 : result.setting.budget;
    }
    for (Operation operation : result.setting.operations()) {
        const auto index = static_cast<int>(operation);
        const OperationBytes& bytes = result.bytes[index];
        Json& counted = json["bytes_per_rank"][operation_name(operation)];
        counted = {{"delivered", bytes.delivered}, {"wire", bytes.wire}};
        if (bytes.v1 > 0) {
            counted["v1"] = bytes.v1;
        }
        counted["v2"] = bytes.v2;
        json["bound"][operation_name(operation)] = to_json(result.lower_bounds[index]);
    }
    for (const LibraryResult& library : result.libraries) {
        Json entry = {{"name", library.name},
                      {"version", library.version},
                      {"symmetric_bytes", library.symmetric_bytes},
                      {"local_bytes", library.local_bytes},
                      {"start_up_ms",
                       {{"communicator", library.start_up.communicator},
                        {"first_window", library.start_up.first_window},
                        {"group", library.start_up.group},
                        {"handle", library.start_up.handle}}}};
        if (result.setting.is_high_throughput()) {
            entry["start_up_ms"]["first_operations"] = library.start_up.first_operations;
        }
        if (library.device_bytes > 0) {
            entry["device_bytes"] = library.device_bytes;
        }
        if (result.setting.validate) {
            const Validation& validation = library.validation;
            entry["validation"] = {
                {"passed", validation.passed()},           {"rows", validation.num_rows},
                {"wrong_rows", validation.wrong_rows},     {"values", validation.num_values},
                {"wrong_values", validation.wrong_values}, {"largest_part_of_bound", validation.largest_part}};
        }
        for (Operation operation : result.setting.operations()) {
            entry[operation_name(operation)] = operation_json(result, library, static_cast<int>(operation));
        }
        json["libraries"].push_back(entry);
    }
    return json;
}

}  // namespace

void write_json(const Options& options, const Machine& machine, const std::vector<CaseResult>& results) {
    if (options.json_path.empty()) {
        return;
    }
    Json json;
    json["command"] = options.command_line;
    json["machine"] = {
        {"host", machine.host}, {"system", machine.system}, {"cpu", machine.cpu}, {"cpus", machine.num_cpus}};
    if (!machine.gpu.empty()) {
        json["machine"]["gpu"] = machine.gpu;
    }
    json["case"] = {{"mode", mode_name(options.mode)},
                    {"backend", backend_name(options.backend)},
                    {"processes", has_processes(options.backend) || options.launched.has_value()},
                    {"ranks", options.num_ranks},
                    {"max_tokens", options.max_tokens()},
                    {"layout", label_of(options.layout)},
                    {"dtype", find_data_type(options.dtype)->option},
                    {"recipe", recipe_of(options.recipe).option},
                    {"windows", options.windows},
                    {"routing", options.routing},
                    {"seed", options.seed},
                    {"skew_us", options.skew_us},
                    {"iterations", options.num_iterations},
                    {"warmup", options.num_warmups}};
    json["case"]["sums"] = options.sender_sums ? "sender" : "exact";
    if (options.is_high_throughput()) {
        json["case"]["pass"] = options.backward ? "backward" : "forward";
        json["case"]["combine_recipe"] = recipe_of(options.combine_recipe).option;
        json["case"]["eager"] = options.eager;
        json["case"]["alignment"] = options.alignment;
    } else {
        json["case"]["split"] = options.split;
        json["case"]["masks"] = options.masks;
        json["case"]["ids"] = options.int32_ids ? "int32" : "int64";
    }
    if (is_cuda(options.backend)) {
        json["case"]["graph_operations"] = options.graph_operations;
    }
    // What is swept stands with each result; what all have in common stands here, too.
    const auto add_common = [&json](const char* name, const std::vector<int>& values) {
        if (values.size() == 1) {
            json["case"][name] = values[0];
        }
    };
    add_common("hidden", options.hidden_sizes);
    add_common("experts", options.expert_counts);
    add_common("topk", options.topks);
    add_common("max_num_sms", options.sms);
    for (const CaseResult& result : results) {
        json["results"].push_back(case_json(result));
    }
    std::ofstream file(options.json_path);
    file << json.dump(2) << '\n';
    if (!file) {
        throw std::runtime_error(fmt::format("--json: {} cannot be written", options.json_path));
    }
}

}  // namespace crossdock::bench
