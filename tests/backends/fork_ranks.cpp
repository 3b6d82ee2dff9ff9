// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstring>

#include "internal.h"
#include "patient_clock.h"
#include "tools/common/processes.h"

namespace crossdock::testing {
namespace {

// The report of a child: its digest, then its failures, each closed by a zero byte.
std::string packed(const ChildReport& report) {
    std::string bytes(reinterpret_cast<const char*>(&report.digest), sizeof report.digest);
    for (const std::string& failure : report.failures) bytes.append(failure).push_back('\0');
    return bytes;
}

void unpack(const std::string& bytes, int rank, RunReport& report) {
    if (bytes.size() < sizeof(uint64_t)) return;
    std::memcpy(&report.digests[rank], bytes.data(), sizeof(uint64_t));
    for (size_t begin = sizeof(uint64_t); begin < bytes.size();) {
        const size_t end = std::min(bytes.find('\0', begin), bytes.size());
        report.failures.push_back(bytes.substr(begin, end - begin));
        begin = end + 1;
    }
}

}  // namespace

RunReport fork_ranks(const BackendSpec& spec, int num_ranks, const std::function<ChildReport(int rank)>& child) {
    using Clock = std::chrono::steady_clock;
    RunReport report;
    report.digests.resize(num_ranks);
    Processes processes;
    for (int rank = 0; rank < num_ranks; ++rank) processes.start([&] { return packed(child(rank)); });
    const Clock::time_point deadline = Clock::now() + std::chrono::seconds(spec.limit_s);
    while (!processes.wait(std::chrono::seconds(1)) && Clock::now() < deadline) {
        for (int rank = 0; rank < num_ranks; ++rank) {
            if (processes.has_ended(rank)) PatientClock::end(rank);
        }
    }
    processes.kill();
    for (int rank = 0; rank < num_ranks; ++rank) {
        unpack(processes.report(rank), rank, report);
        const bool doomed = std::find(spec.doomed.begin(), spec.doomed.end(), rank) != spec.doomed.end();
        const std::string end = processes.how_it_ended(rank);
        if (processes.was_killed_here(rank)) {
            report.failures.push_back(fmt::format("rank {} was still running after {} s", rank, spec.limit_s));
        } else if (!end.empty() && !(doomed && processes.signal(rank) != 0)) {
            report.failures.push_back(fmt::format("rank {} {}", rank, end));
        }
    }
    return report;
}

}  // namespace crossdock::testing
