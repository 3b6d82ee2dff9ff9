// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/fault_support.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <filesystem>
#include <new>

namespace crossdock::testing {

Problem busy_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed, ncclEpAlgorithm_t algorithm) {
    Problem problem;
    problem.seed = seed;
    problem.num_ranks = num_ranks;
    problem.num_experts = 2 * num_ranks;
    problem.max_tokens = 6;
    problem.num_topk = num_ranks;
    problem.hidden = problem.combine_hidden = 32;
    problem.layout = layout;
    set_mode(problem, algorithm);
    problem.ranks.resize(num_ranks);
    Random random(seed);
    for (reference::RankInput& rank : problem.ranks) {
        rank.num_tokens = problem.max_tokens;
        for (int i = 0; i < problem.max_tokens * num_ranks; ++i) {
            // One expert on each rank.
            rank.ids.push_back((i % num_ranks) * 2 + random.below(2));
            rank.weights.push_back(static_cast<float>(random.unit()) + 0.25f);
        }
    }
    return problem;
}

uint64_t short_timeout_ns(const RankContext& context) { return context.is_gpu() ? 500'000'000 : 200'000'000; }

ActiveRanks query_mask(RankContext& context, ncclEpGroup_t group) {
    const cudaStream_t stream = context.make_stream();
    Buffer status(context, stream, static_cast<size_t>(context.num_ranks()) * sizeof(int));
    RANK_OK(context, ncclEpMaskQuery(group, reinterpret_cast<int*>(status.data()), stream));
    ActiveRanks active(context.num_ranks());
    context.copy_to_host(active.data(), status.data(), status.bytes(), stream);
    for (const int entry : active) RANK_CHECK(context, entry == 0 || entry == 1, "a mask entry is {}", entry);
    status.check_guards("the mask");
    return active;
}

ncclEpGroupConfig_t mask_config(RankContext& context, const Problem& problem, uint64_t timeout_ns) {
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.enable_mask = 1;
    config.timeout_ns = timeout_ns;
    return config;
}

void degraded_step(RankContext& context, ncclEpGroup_t group, Layer& layer) {
    layer.prepare_dispatch();
    const ActiveRanks before = query_mask(context, group);
    RANK_OK(context, layer.dispatch());
    context.synchronize(layer.stream());
    const ActiveRanks at_dispatch = query_mask(context, group);
    layer.check_dispatch(NCCL_EP_FWD_PASS, at_dispatch, at_dispatch != before);
    layer.prepare_combine(at_dispatch);
    RANK_OK(context, layer.combine());
    context.synchronize(layer.stream());
    const ActiveRanks at_combine = query_mask(context, group);
    layer.check_combine(NCCL_EP_FWD_PASS, at_combine);
    RANK_CHECK(context, at_combine[context.rank()] == 1, "this rank has masked itself");
}

void step_until_failure(RankContext& context, Layer& layer) {
    for (bool combine = false; true; combine = !combine) {
        const ncclResult_t result = combine ? layer.combine() : layer.dispatch();
        if (result == ncclSuccess) continue;
        RANK_CHECK(context, result == ncclRemoteError, "{}: {}", result_name(result), crossdockGetLastError());
        return;
    }
}

int async_error(RankContext& context, ncclEpGroup_t group) {
    int error = -1;
    RANK_OK(context, ncclEpGetAsyncError(group, &error));
    return error;
}

int diagnosed_peer(RankContext& context, ncclEpGroup_t group) {
    crossdockDiagnosis_t diagnosis = CROSSDOCK_DIAGNOSIS_INIT;
    RANK_OK(context, crossdockGroupDiagnosis(group, &diagnosis));
    RANK_CHECK(context, diagnosis.valid == 1, "no diagnosis after an expired wait");
    RANK_CHECK(context, diagnosis.rank == context.rank(), "the diagnosis is rank {}'s", diagnosis.rank);
    RANK_CHECK(context, diagnosis.operation[0] != '\0' && diagnosis.step[0] != '\0',
               "the diagnosis names no operation or no step");
    // Who is told of a loss may not have waited, nor who sees that a process has ended, which it does not in
    // simulations.
    RANK_CHECK(context, diagnosis.elapsed_us > 0 || std::string(diagnosis.step) == "report" || !context.is_simulated(),
               "no time elapsed");
    return diagnosis.peer;
}

void check_diagnosis(RankContext& context, ncclEpGroup_t group, int peer) {
    const int diagnosed = diagnosed_peer(context, group);
    RANK_CHECK(context, diagnosed == peer, "rank {} is named, not rank {}", diagnosed, peer);
}

LostRanks::LostRanks() {
    void* memory = mmap(nullptr, kMostRanks * sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    peers_ = static_cast<int*>(memory);
    clear();
}

LostRanks::~LostRanks() { munmap(peers_, kMostRanks * sizeof(int)); }

void LostRanks::clear() { std::fill_n(peers_, kMostRanks, -1); }

bool LostRanks::has_any() const {
    return std::any_of(peers_, peers_ + kMostRanks, [](int peer) { return peer >= 0; });
}

std::string LostRanks::complaint(int num_ranks, int dead, bool everybody) const {
    for (int rank = 0; rank < num_ranks; ++rank) {
        if (rank == dead || (peers_[rank] < 0 && !everybody)) continue;
        int named = rank;
        for (int i = 0; i < num_ranks && named != dead && named >= 0; ++i) named = peers_[named];
        if (named != dead)
            return fmt::format("rank {} names rank {}, which does not lead to rank {}", rank, peers_[rank], dead);
    }
    return "";
}

std::string LostRanks::complaint_about_names(int num_ranks, int dead, bool everybody) const {
    for (int rank = 0; rank < num_ranks; ++rank) {
        if (rank == dead || peers_[rank] == dead || (peers_[rank] < 0 && !everybody)) continue;
        return fmt::format("rank {} names rank {}, not rank {}", rank, peers_[rank], dead);
    }
    return "";
}

std::vector<std::string> left_in_shared_memory() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
        // Other programs of this machine come and go there.
        const std::string name = entry.path().filename().string();
        if (name.find("crossdock") != std::string::npos) names.push_back(name);
    }
    return names;
}

void harm_at_many_steps(const BackendSpec& backend, Harm harm, int num_ranks, int harmed, const Seeds& seeds,
                        const RankProgram& program,
                        const std::function<void(std::vector<std::string>& failures)>& look) {
    BackendSpec spec = backend;
    const RunReport healthy = expect_clean(spec, num_ranks, 0, program);
    ASSERT_GT(healthy.num_steps, 0u);
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
        const uint64_t step = reference::random_bits(seed, 1) % (healthy.num_steps + 1);
        crossdockSimulationConfig_t& config = spec.simulation;
        config.seed = seed;
        (harm == Harm::kKill ? config.killed_rank : config.cut_rank) = harmed;
        (harm == Harm::kKill ? config.killed_at_step : config.cut_at_step) = step;
        const RunReport report = run_ranks(spec, num_ranks, program);
        std::vector<std::string> failures = harm == Harm::kKill ? failures_of_others(report, harmed) : report.failures;
        if (look) look(failures);
        for (const std::string& failure : failures) {
            ADD_FAILURE() << failure << "\nrank " << harmed << (harm == Harm::kKill ? " was killed" : " was cut off")
                          << " at step " << step << " of " << healthy.num_steps
                          << "\nreplay: " << replay_line(spec.kind, num_ranks, seed);
        }
    }
}

std::vector<std::string> failures_of_others(const RunReport& report, int rank) {
    std::vector<std::string> others;
    const std::string own = fmt::format("rank {}:", rank);
    for (const std::string& failure : report.failures) {
        if (failure.compare(0, own.size(), own) != 0) others.push_back(failure);
    }
    return others;
}

}  // namespace crossdock::testing
