// SPDX-License-Identifier: Apache-2.0
// What the tests of failing ranks share.
#pragma once

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {

// A problem in which every rank sends to every other; high throughput as set_mode says.
Problem busy_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed, ncclEpAlgorithm_t algorithm = kLowLatency);

// For ranks that are lost while they live, or while nobody can hear of it: the others wait so long. On CPUs it is
// short, and loses no healthy rank on a busy machine (backends/patient_clock.h); on GPUs time is real.
uint64_t short_timeout_ns(const RankContext& context);
// For processes that die, which the others know at once. Nobody waits so long: the harness would end the test.
constexpr uint64_t kNeverNs = 3'600'000'000'000;

// A group that goes on without ranks that are silent for so long.
ncclEpGroupConfig_t mask_config(RankContext& context, const Problem& problem, uint64_t timeout_ns);

// A step in which ranks may be lost. What must come out is what the rank's own mask says afterwards.
void degraded_step(RankContext& context, ncclEpGroup_t group, Layer& layer);

// The rank's view of who is active.
ActiveRanks query_mask(RankContext& context, ncclEpGroup_t group);

// Steps until one fails.
void step_until_failure(RankContext& context, Layer& layer);

int async_error(RankContext& context, ncclEpGroup_t group);

// The rank for which the group's last expired wait was; checks that there is one.
int diagnosed_peer(RankContext& context, ncclEpGroup_t group);
void check_diagnosis(RankContext& context, ncclEpGroup_t group, int peer);

// A group made by hand, because it may fail to be; a rank that stops for any reason still destroys it.
struct DestroyGroup {
    void operator()(ncclEpGroup_t group) const { ncclEpGroupDestroy(group); }
};
using OwnedGroup = std::unique_ptr<ncclEpGroup, DestroyGroup>;

// Which rank each rank names as lost, in memory that threads and forked processes share. A rank that has failed is
// missed by its peers in turn, so a dead rank is named directly or through others.
class LostRanks {
  public:
    static constexpr int kMostRanks = 16;
    LostRanks();
    ~LostRanks();
    LostRanks(const LostRanks&) = delete;
    LostRanks& operator=(const LostRanks&) = delete;
    void note(int rank, int peer) { peers_[rank] = peer; }
    void clear();
    bool has_any() const;
    // Empty if all names lead to `dead`; else which do not. `everybody`: each other rank must name someone.
    std::string complaint(int num_ranks, int dead, bool everybody) const;
    // Empty if every name is `dead` itself.
    std::string complaint_about_names(int num_ranks, int dead, bool everybody) const;

  private:
    int* peers_;
};

// The names of this library that are left in /dev/shm.
std::vector<std::string> left_in_shared_memory();

// Runs the program in the simulation for many seeds, each time with a rank killed, or cut off the network, at a step
// that the seed says, until there are failures; a killed rank may say what it likes. look: sees each run's failures,
// and may add some.
enum class Harm { kKill, kCut };
void harm_at_many_steps(const BackendSpec& backend, Harm harm, int num_ranks, int harmed, const Seeds& seeds,
                        const RankProgram& program,
                        const std::function<void(std::vector<std::string>& failures)>& look = nullptr);

// The failures of all ranks but one, which may say what it likes.
std::vector<std::string> failures_of_others(const RunReport& report, int rank);

}  // namespace crossdock::testing
