// SPDX-License-Identifier: Apache-2.0
// The executor of the threads and processes backends: a launch's warps are fibers of the calling thread, resumed round
// robin in real time.
#pragma once

#include <memory>

#include "runtime/cpu/executor.h"
#include "runtime/cpu/progress.h"

namespace crossdock::cpu {

// Thread safe. A kernel launches no kernels. A thread's repeated launches of a shape do not allocate.
class LocalExecutor final : public Executor {
  public:
    // num_ranks: number of ranks that share this host's cores. progress: called while warps wait; may be null.
    explicit LocalExecutor(int num_ranks, std::shared_ptr<Progress> progress = nullptr);

    void run(const LaunchShape& shape, const std::function<void(Warp&)>& kernel) override;
    bool wait(const std::function<bool()>& ready, uint64_t deadline_ns) override;
    uint64_t now_ns() override;
    void watch_peers(int num_ranks, PeerLosses& losses) override;

  private:
    int num_spins_;
    std::shared_ptr<Progress> progress_;
    std::unique_ptr<EndedPeers> peers_;  // may be null
};

}  // namespace crossdock::cpu
