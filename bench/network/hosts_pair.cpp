// SPDX-License-Identifier: Apache-2.0
// Put and signal from a kernel to a rank of another host: what groups on CPU ranks of several hosts do. Two processes
// play the hosts.
// Before whatever opens the namespace cpu, which is an inline one for kernels.
#include "device/context.h"
#include "device/network.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "bench/network/measure.h"
#include "crossdock.h"
#include "fabric/communicator.h"
#include "runtime/cpu/executor.h"
#include "runtime/runtime.h"

namespace crossdock::network_bench {
namespace {

constexpr uint64_t kTimeoutNs = 20'000'000'000;
constexpr uint32_t kBatch = 32;  // puts behind which a signal comes
constexpr uint64_t kWordBytes = 64;

// Words: of round trips, of the stream's batches, of batches that have come.
enum Word : uint64_t { kTurn = 0, kSent = 8, kCame = 16 };

class Rank {
  public:
    Rank(ncclComm_t comm, uint64_t bytes)
        : communicator_(communicator_of(comm)),
          memory_(communicator_->allocate_symmetric(kWordBytes + 2 * bytes, kTimeoutNs)),
          network_(communicator_->network_of(*memory_)),
          peer_(1 - communicator_->rank()),
          bytes_(bytes) {}

    // A kernel of one warp.
    void run(const std::function<void(const Ctx& ctx)>& kernel) {
        communicator_->runtime().cpu_executor()->run({}, [&](cpu::Warp& warp) { kernel(Ctx(warp)); });
    }

    void put() {
        const uint64_t source = kWordBytes;
        const uint64_t target = kWordBytes + bytes_;
        if (bytes_ == sizeof(uint64_t)) {
            put_value_to_peer(network_, peer_, target, 1);
        } else {
            put_to_peer(network_, peer_, target, source, bytes_);
        }
    }
    void signal(Word word) { signal_peer(network_, peer_, word, 1); }
    void await(const Ctx& ctx, Word word, uint64_t least) {
        const auto* seen = reinterpret_cast<const uint64_t*>(network_.local + word);
        const uint64_t deadline_ns = ctx.now_ns() + kTimeoutNs;
        while (ctx.load_acquire_system(seen) < least) {
            if (ctx.now_ns() > deadline_ns) throw std::runtime_error("the other rank does not answer");
            ctx.pause(deadline_ns);
        }
    }
    void barrier() { communicator_->barrier("network_bench", kTimeoutNs); }

  private:
    std::shared_ptr<Communicator> communicator_;
    std::unique_ptr<SymmetricMemory> memory_;
    NetworkHandle network_;
    int peer_;
    uint64_t bytes_;
};

Result measure(Rank& self, int rank, const Amount& amount) {
    Result result;
    const uint32_t warm_up = amount.round_trips / 10 + 1;
    self.run([&](const Ctx& ctx) {
        uint64_t begin = 0;
        for (uint32_t turn = 1; turn <= warm_up + amount.round_trips; ++turn) {
            if (turn == warm_up + 1) begin = now_ns();
            if (rank == 1) self.await(ctx, kTurn, turn);
            self.put();
            self.signal(kTurn);
            if (rank == 0) self.await(ctx, kTurn, turn);
        }
        result.half_round_trip_us = static_cast<double>(now_ns() - begin) / 2e3 / amount.round_trips;
    });
    const uint64_t batches = (amount.messages + kBatch - 1) / kBatch;
    self.run([&](const Ctx& ctx) {
        for (uint64_t pass = 0; pass < 2; ++pass) {  // the first one warms up
            const uint64_t begin = now_ns();
            for (uint64_t batch = pass * batches + 1; batch <= (pass + 1) * batches; ++batch) {
                if (rank == 0) {
                    if (batch > 2) self.await(ctx, kCame, batch - 2);
                    for (uint32_t i = 0; i < kBatch; ++i) self.put();
                    self.signal(kSent);
                } else {
                    self.await(ctx, kSent, batch);
                    self.signal(kCame);
                }
            }
            if (rank == 0) self.await(ctx, kCame, (pass + 1) * batches);
            result.gigabytes_per_s =
                static_cast<double>(amount.bytes * kBatch * batches) / static_cast<double>(now_ns() - begin);
        }
    });
    return result;
}

void check(ncclResult_t result) {
    if (result != ncclSuccess) throw std::runtime_error(crossdockGetLastError());
}

}  // namespace

Result measure_hosts(const Amount& amount, const std::string& transports) {
    const std::string address = next_address();
    return run_pair(transports, [&](Meeting&, int rank) {
        setenv("CROSSDOCK_HOST", rank == 0 ? "host0" : "host1", 1);
        ncclComm_t comm = nullptr;
        check(crossdockCommInitHosts(&comm, 2, rank, address.c_str()));
        Result result;
        {
            Rank self(comm, amount.bytes);
            result = measure(self, rank, amount);
            self.barrier();
        }
        check(crossdockCommDestroy(comm));
        return result;
    });
}

}  // namespace crossdock::network_bench
