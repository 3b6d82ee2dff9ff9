// SPDX-License-Identifier: Apache-2.0
// The first byte chooses the backend, one rank on a communicator of threads, or two ranks in the simulation,
// whose seed is the second byte, whether there are high-throughput groups, and whether a rank may stop or differ from
// the other one. The rest is the ranks' program.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "crossdock/simulation.h"
#include "fuzz/session.h"

namespace {

using crossdock::fuzz::Input;
using crossdock::fuzz::PassedAlike;
using crossdock::fuzz::Session;
using crossdock::fuzz::SessionKind;

constexpr size_t kMaxBytes = 1024;

// Memory that outlives the ranks.
struct Kept {
    std::vector<void*> memory;

    ~Kept() {
        for (void* one : memory) {
            if (crossdockMemFree(one) != ncclSuccess) {
                std::abort();
            }
        }
    }
};

struct Pair {
    Input input;
    SessionKind kind;
    PassedAlike passed[2];
    Kept kept;
};

void run_one_of_two(ncclComm_t comm, int rank, void* context) {
    auto& pair = *static_cast<Pair*>(context);
    Session session(comm, pair.input, pair.kind, rank == 1, pair.kept.memory);
    session.run();
    pair.passed[rank] = session.passed();
}

void run_two_ranks(Input input, uint8_t seed, const SessionKind& kind) {
    crossdockSimulationConfig_t config = CROSSDOCK_SIMULATION_CONFIG_INIT;
    config.seed = seed;
    Pair pair{input, kind, {}, {}};
    const ncclResult_t result = crossdockRunSimulation(2, &config, run_one_of_two, &pair, nullptr);
    // Ranks that make the same calls cannot break the protocol, and one that ends early or differs only makes calls
    // fail.
    if (result != ncclSuccess) {
        std::fprintf(stderr, "FAILED: the simulation ended with %d: %s\n", static_cast<int>(result),
                     crossdockGetLastError());
        std::abort();
    }
    if (pair.passed[0].is_known && pair.passed[1].is_known && pair.passed[0] != pair.passed[1]) {
        std::fprintf(stderr, "FAILED: ranks that disagree have both succeeded\n");
        std::abort();
    }
}

void run_one_rank(Input input, bool has_ht) {
    ncclComm_t comm = nullptr;
    if (crossdockCommInitAll(&comm, 1) != ncclSuccess) {
        std::abort();
    }
    Kept kept;
    Session(comm, input, {.has_ht = has_ht}, false, kept.memory).run();
    if (crossdockCommDestroy(comm) != ncclSuccess) {
        std::abort();
    }
}

}  // namespace

extern "C" const char* __asan_default_options() {
    // Allocations of absurd sizes fail as they do without AddressSanitizer.
    return "allocator_may_return_null=1:max_allocation_size_mb=1024:detect_stack_use_after_return=0";
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    setenv("CROSSDOCK_JOIN_TIMEOUT_MS", "200", 1);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2 || size > kMaxBytes) {
        return -1;
    }
    const Input input(data + 2, size - 2);
    const bool has_ht = data[0] >= 192;
    if (data[0] % 4 == 0) {
        run_one_rank(input, has_ht);
    } else {
        run_two_ranks(input, data[1],
                      {.has_ht = has_ht, .is_stoppable = data[0] % 4 == 3, .may_disagree = data[0] % 4 == 2});
    }
    return 0;
}
