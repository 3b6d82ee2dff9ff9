// SPDX-License-Identifier: Apache-2.0
// Elastic operations of both modes: what is written and what is added up, against plain loops, bit for bit.
#include "conformance/support/elastic.h"
#include "conformance/support/modes.h"

namespace crossdock::testing {
namespace {

// Elastic operations of low latency need all ranks in one LSA team.
void on_each_elastic_backend(ncclEpAlgorithm_t mode, const std::vector<Backend>& kinds,
                             const std::function<void(const BackendSpec&)>& run) {
    is_ht(mode) ? on_each_backend(kinds, run) : on_each_backend_as_one_team(kinds, run);
}

ElasticShape shape_of(ncclEpAlgorithm_t mode, uint64_t seed, int most_ranks) {
    const int ranks = 1 + static_cast<int>(reference::random_bits(seed, 7) % static_cast<uint64_t>(most_ranks));
    return random_elastic_shape(mode, seed, ranks_or(ranks));
}

BackendSpec seeded(const BackendSpec& backend, uint64_t seed) {
    BackendSpec spec = backend;
    spec.simulation.seed = seed;
    return spec;
}

TEST_BOTH_MODES(Elastic, RandomOperationsMatchPlainLoops) {
    on_each_elastic_backend(mode, kEveryBackend, [=](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(1, seeds_in(spec.kind, 100));
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
            const ElasticShape shape = shape_of(mode, seed, 8);
            SCOPED_TRACE(shape.describe());
            expect_clean(seeded(spec, seed), shape.num_ranks, seed, random_elastic_operations(shape, 12));
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
