// SPDX-License-Identifier: Apache-2.0
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bench/network/measure.h"
#include "tools/common/processes.h"
#include "tools/common/shared_array.h"

namespace crossdock::network_bench {

struct Meeting {
    std::byte handles[2][128];
    std::atomic<uint32_t> written[2];
    std::atomic<uint64_t> number;
    Result result;
};

void exchange(Meeting& meeting, int rank, const void* own, void* others) {
    std::memcpy(meeting.handles[rank], own, 128);
    meeting.written[rank].store(1, std::memory_order_release);
    while (meeting.written[1 - rank].load(std::memory_order_acquire) == 0) sched_yield();
    std::memcpy(others, meeting.handles[1 - rank], 128);
}

void publish(Meeting& meeting, uint64_t number) { meeting.number.store(number, std::memory_order_release); }

uint64_t await_number(Meeting& meeting) {
    uint64_t number = 0;
    while ((number = meeting.number.load(std::memory_order_acquire)) == 0) sched_yield();
    return number;
}

void stay_on_cores(int rank, int cores_per_rank) {
    cpu_set_t allowed, own;
    CPU_ZERO(&allowed);
    CPU_ZERO(&own);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
    const int count = CPU_COUNT(&allowed) >= 2 * cores_per_rank ? cores_per_rank : 1;
    int number = 0;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (!CPU_ISSET(core, &allowed)) continue;
        if (number / count == rank) CPU_SET(core, &own);
        ++number;
    }
    sched_setaffinity(0, sizeof(own), &own);
}

std::string next_address() {
    static int port = 11'000 + static_cast<int>(now_ns() % 10'000);
    return "127.0.0.1:" + std::to_string(++port);
}

Result run_pair(const std::string& transports, const RankFunction& rank, int cores_per_rank) {
    tools::SharedArray<Meeting> shared(1);
    Meeting& meeting = shared[0];
    Processes processes;
    for (int each = 0; each < 2; ++each) {
        processes.start([&]() -> std::string {
            if (!transports.empty()) setenv("UCX_TLS", transports.c_str(), 1);
            // Two hosts, so that frames cross TCP instead of a Unix socket.
            if (transports == "tcp") setenv("CROSSDOCK_HOST", std::to_string(each).c_str(), 1);
            stay_on_cores(each, cores_per_rank);
            try {
                const Result result = rank(meeting, each);
                if (each == 0) meeting.result = result;
                return "";
            } catch (const std::exception& error) {
                return "rank " + std::to_string(each) + ": " + error.what();
            }
        });
    }
    processes.wait();
    for (size_t each = 0; each < 2; ++each) {
        if (!processes.report(each).empty()) throw std::runtime_error(processes.report(each));
        const std::string end = processes.how_it_ended(each);
        if (!end.empty()) throw std::runtime_error("rank " + std::to_string(each) + " " + end);
    }
    return meeting.result;
}

}  // namespace crossdock::network_bench
