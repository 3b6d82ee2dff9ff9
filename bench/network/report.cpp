// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/network/measure.h"

namespace crossdock::network_bench {
namespace {

double median_of(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

std::string processor() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
    }
    return "unknown";
}

}  // namespace

Result median(const Row& row) {
    std::vector<double> times, rates;
    for (const Result& each : row.results) {
        times.push_back(each.half_round_trip_us);
        rates.push_back(each.gigabytes_per_s);
    }
    return {median_of(times), median_of(rates), 0};
}

void print_table(const std::vector<Row>& rows, const std::vector<RateRow>& rates) {
    fmt::print("{:<14} {:<14} {:>9} {:>20} {:>8}\n", "transport", "way", "bytes", "half round trip, us", "GB/s");
    for (const Row& row : rows) {
        const Result result = median(row);
        fmt::print("{:<14} {:<14} {:>9} {:>20.2f} {:>8.2f}\n", row.transports, row.way, row.amount.bytes,
                   result.half_round_trip_us, result.gigabytes_per_s);
    }
    if (rates.empty()) return;
    fmt::print("\n{:<14} {:<14} {:>9} {:>24}\n", "transport", "way", "contexts", "puts of 8 bytes per us");
    for (const RateRow& row : rates) {
        fmt::print("{:<14} {:<14} {:>9} {:>24.2f}\n", row.transports, row.way, row.contexts,
                   median_of(row.messages_per_us));
    }
}

void write_json(const std::vector<Row>& rows, const std::vector<RateRow>& rates, const std::string& file) {
    utsname system = {};
    uname(&system);
    nlohmann::json document;
    document["machine"] = {
        {"processor", processor()}, {"cores", sysconf(_SC_NPROCESSORS_ONLN)}, {"kernel", system.release}};
    for (const Row& row : rows) {
        nlohmann::json entry = {{"transport", row.transports},
                                {"way", row.way},
                                {"bytes", row.amount.bytes},
                                {"round_trips", row.amount.round_trips},
                                {"messages", row.amount.messages}};
        for (const Result& each : row.results) {
            entry["half_round_trip_us"].push_back(each.half_round_trip_us);
            entry["gigabytes_per_s"].push_back(each.gigabytes_per_s);
        }
        document["rows"].push_back(entry);
    }
    for (const RateRow& row : rates) {
        document["rates"].push_back({{"transport", row.transports},
                                     {"way", row.way},
                                     {"contexts", row.contexts},
                                     {"messages_per_us", row.messages_per_us}});
    }
    std::ofstream(file) << document.dump(1) << "\n";
}

}  // namespace crossdock::network_bench
