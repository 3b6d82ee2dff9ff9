// SPDX-License-Identifier: Apache-2.0
// The executor of the threads and processes backends: a launch's warps are fibers of the calling thread, resumed in
// turn, in real time.
#pragma once

#include <memory>

#include "runtime/cpu/ended_peers.h"
#include "runtime/cpu/executor.h"
#include "runtime/cpu/progress.h"

namespace crossdock::cpu {

// Any number of threads may run launches at once. A kernel launches no kernels. After a thread's first launches of a
// shape further ones allocate nothing.
class LocalExecutor final : public Executor {
  public:
    // num_ranks: how many ranks of this host share its cores.
    // progress: what is driven forward meanwhile; may be null.
    explicit LocalExecutor(int num_ranks, std::shared_ptr<Progress> progress = nullptr);

    // Before the first launch: waits end for a rank of which end_of() says that it has ended.
    void watch_peers(int num_ranks, std::function<PeerEnd(int rank)> end_of);

    void run(const LaunchShape& shape, const std::function<void(Warp&)>& kernel) override;
    bool wait(const std::function<bool()>& ready, uint64_t deadline_ns) override;
    uint64_t now_ns() override;

  private:
    int num_spins_;
    std::shared_ptr<Progress> progress_;
    std::unique_ptr<EndedPeers> peers_;  // may be null
};

}  // namespace crossdock::cpu
