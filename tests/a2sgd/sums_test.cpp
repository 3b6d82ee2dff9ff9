// SPDX-License-Identifier: Apache-2.0
// A2SGD: what a step makes of gradients is what plain loops make of them, to the bit, on every backend.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "a2sgd/support.h"
#include "conformance/support/with_lsa_team.h"
#include "reference/formats.h"

namespace crossdock::testing {
namespace {

using reference::Gradient;

std::vector<Gradient> gradients_of(RankContext& context, const A2sgdShape& shape, uint64_t seed, int step) {
    std::vector<Gradient> gradients;
    for (int rank = 0; rank < context.num_ranks(); ++rank)
        gradients.push_back(random_gradient(shape, seed, rank, step));
    return gradients;
}

void set_entry(Gradient& gradient, size_t piece, size_t i, float value) {
    reference::GradientPiece& target = gradient[piece];
    reference::encode(target.type, value, target.bytes.data() + i * reference::type_bytes(target.type));
}

// Around rows, chunks and segments; several types in one gradient; pieces that no 16-byte load can read; empty ones.
const A2sgdShape kShapes[] = {
    {{ncclFloat32, 1}},
    {{ncclFloat32, 257, 1}},
    {{ncclBfloat16, 4096}},
    {{ncclFloat16, 4097, 3}, {ncclFloat32, 255}},
    {{ncclBfloat16, 1023, 1}, {ncclFloat32, 0}, {ncclFloat16, 5000}, {ncclFloat32, 9001}},
    {{ncclFloat32, 3 * 32768 + 5}, {ncclBfloat16, 40000}},
};

TEST(A2sgd, StepsMatchThePlainLoop) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            for (const bool sums_in_fp64 : {false, true}) {
                for (size_t i = 0; i < std::size(kShapes); ++i) {
                    A2sgdRank rank(context, kShapes[i], a2sgd_config(sums_in_fp64));
                    for (int step = 0; step < 3; ++step) rank.step(gradients_of(context, kShapes[i], i, step));
                }
            }
        });
    });
}

// More segments than columns, from very many pieces.
TEST(A2sgd, ManyPiecesHaveTheSameBits) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const A2sgdShape shape(2200, {ncclFloat32, 3});
            A2sgdRank rank(context, shape, a2sgd_config());
            rank.step(gradients_of(context, shape, 5, 0));
        });
    });
}

TEST(A2sgd, OneSignAndZerosAreNoSpecialCase) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const A2sgdShape shape{{ncclFloat32, 600}};
            A2sgdRank rank(context, shape, a2sgd_config());
            for (int kind = 0; kind < 4; ++kind) {
                std::vector<Gradient> gradients = gradients_of(context, shape, 6, kind);
                for (Gradient& gradient : gradients) {
                    for (size_t i = 0; i < gradient[0].count(); ++i) {
                        const float magnitude = std::abs(gradient[0].at(i)) + 1e-3f;
                        const float values[] = {magnitude, -magnitude, 0.0f, -0.0f};
                        set_entry(gradient, 0, i, values[kind]);
                    }
                }
                rank.step(gradients);
            }
        });
    });
}

// Other work, and steps of another object, between the halves.
TEST(A2sgd, StepsOfTwoObjectsInterleave) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(4), std::nullopt, [](RankContext& context) {
            A2sgdRank a(context, kShapes[3], a2sgd_config()), b(context, kShapes[4], a2sgd_config(true));
            for (int step = 0; step < 20; ++step) {
                const auto of_a = gradients_of(context, kShapes[3], 7, step);
                const auto of_b = gradients_of(context, kShapes[4], 8, step);
                a.write(of_a[static_cast<size_t>(context.rank())]);
                b.write(of_b[static_cast<size_t>(context.rank())]);
                a.begin();
                b.begin();
                a.end();
                b.end();
                a.check(of_a);
                b.check(of_b);
                RANK_CHECK(context, a.report().step == static_cast<uint64_t>(step) + 1, "step {}", a.report().step);
            }
        });
    });
}

TEST(A2sgd, PiecesMayMove) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const A2sgdShape one{{ncclFloat32, 9000}},
                three{{ncclFloat32, 1000}, {ncclFloat32, 0}, {ncclFloat32, 8000}};
            A2sgdRank rank(context, one, a2sgd_config()), lender(context, three, a2sgd_config());
            rank.step(gradients_of(context, one, 9, 0));
            const auto elsewhere = lender.pieces();
            RANK_OK(context, crossdockA2sgdSetPieces(rank.get(), elsewhere.data(), elsewhere.size()));
            const auto gradients = gradients_of(context, three, 9, 1);
            lender.write(gradients[static_cast<size_t>(context.rank())]);
            rank.begin();
            RANK_REFUSED(context, ncclInvalidUsage, "End",
                         crossdockA2sgdSetPieces(rank.get(), elsewhere.data(), elsewhere.size()));
            rank.end();
            const crossdockA2sgdReport_t seen = rank.report();
            const auto means = ordered_means(gradients[static_cast<size_t>(context.rank())], false);
            RANK_CHECK(context, seen.a == static_cast<float>(means.a), "a {} instead of {}", seen.a, means.a);
            RANK_CHECK(context, seen.step == 2, "step {}", seen.step);
        });
    });
}

// Who is not finite is named to everybody; with the option nobody's gradient changes.
TEST(A2sgd, NanAndInfinityAreReported) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            const A2sgdShape shape{{ncclFloat32, 500}, {ncclBfloat16, 9000}, {ncclFloat16, 700}};
            for (const bool skips : {false, true}) {
                A2sgdRank rank(context, shape, a2sgd_config(false, skips));
                const float bad_values[] = {std::numeric_limits<float>::quiet_NaN(),
                                            std::numeric_limits<float>::infinity(),
                                            -std::numeric_limits<float>::infinity()};
                for (int kind = 0; kind < 3; ++kind) {
                    const int bad_rank = kind % context.num_ranks();
                    auto gradients = gradients_of(context, shape, 10, kind);
                    set_entry(gradients[static_cast<size_t>(bad_rank)], 2, 699, bad_values[kind]);
                    set_entry(gradients[static_cast<size_t>(bad_rank)], 1, 8999, bad_values[kind]);
                    rank.write(gradients[static_cast<size_t>(context.rank())]);
                    rank.begin();
                    rank.end();
                    const crossdockA2sgdReport_t seen = rank.report();
                    RANK_CHECK(context, seen.num_nonfinite_ranks == 1 && seen.nonfinite_rank == bad_rank,
                               "{} ranks, first {}", seen.num_nonfinite_ranks, seen.nonfinite_rank);
                    RANK_CHECK(context, seen.nonfinite_piece == 1, "piece {}", seen.nonfinite_piece);
                    const std::string name = seen.nonfinite_name == nullptr ? "" : seen.nonfinite_name;
                    RANK_CHECK(context, name == "layer1.weight", "{}", name);
                    RANK_CHECK(context, seen.skipped == (skips ? 1 : 0), "skipped {}", seen.skipped);
                    RANK_CHECK(context, skips || !std::isfinite(seen.mean_a + seen.mean_b), "means {} {}", seen.mean_a,
                               seen.mean_b);
                    if (skips) rank.check_unchanged();
                }
                rank.step(gradients_of(context, shape, 11, 0));  // and goes on
                RANK_CHECK(context, rank.report().nonfinite_name == nullptr, "still reported");
            }
        });
    });
}

TEST(A2sgd, LsaTeamsDoNotMatter) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        if (is_cuda(spec.kind) || spec.kind == Backend::kHosts) return;
        for (const int lsa_team_size : {1, 2}) {
            const WithLsaTeam team(lsa_team_size);
            expect_clean(spec, 4, std::nullopt, [](RankContext& context) {
                A2sgdRank rank(context, kShapes[3], a2sgd_config());
                for (int step = 0; step < 10; ++step) rank.step(gradients_of(context, kShapes[3], 12, step));
            });
        }
    });
}

TEST(A2sgd, SeedsAreClean) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const Seeds seeds = seeds_or(1, 150);
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
            const WithLsaTeam team(seed % 3 == 0 ? 1 : 0);
            BackendSpec spec = backend;
            spec.simulation.seed = seed;
            expect_clean(spec, ranks_or(2 + static_cast<int>(seed % 3)), seed, [seed](RankContext& context) {
                const A2sgdShape shape{{ncclFloat32, 100}, {ncclBfloat16, 20 * seed}};
                A2sgdRank rank(context, shape, a2sgd_config(seed % 2 == 0));
                for (int step = 0; step < 6; ++step) rank.step(gradients_of(context, shape, seed, step));
            });
        }
    });
}

// If a rank writes garbage into the others' memory, a step fails, or it is made, perhaps with wrong means.
TEST(A2sgd, SurvivesGarbage) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const Seeds seeds = seeds_or(1, 300);
        uint64_t clean = 0;
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
            const WithLsaTeam team(seed % 2 == 0 ? 1 : 0);
            const bool is_clean = survives_garbage(backend, ranks_or(3), seed, [seed](RankContext& context) {
                const A2sgdShape shape{{ncclFloat32, 100}, {ncclBfloat16, 20 * (seed % 100)}};
                A2sgdRank rank(context, shape, a2sgd_config(seed % 3 == 0));
                for (uint64_t step = 1; step <= 10; ++step) {
                    rank.step(gradients_of(context, shape, seed, static_cast<int>(step)));
                    if (rank.report().step != step) throw std::logic_error("a step has ended and was not made");
                }
            });
            clean += is_clean ? 1 : 0;
        }
        EXPECT_TRUE(clean < seeds.count || seeds.count < 50) << "no rank saw garbage";
    });
}

// A captured step does at every replay what an eager one does, with the gradients of then.
TEST(A2sgd, GraphsReplaySteps) {
    on_each_backend({Backend::kCuda, Backend::kCudaProcesses}, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const A2sgdShape& shape = kShapes[5];
            A2sgdRank rank(context, shape, a2sgd_config());
            rank.step(gradients_of(context, shape, 13, 0));
            const Graph graph = context.capture(rank.stream(), [&] {
                rank.begin();
                rank.end();
            });
            for (int step = 1; step < 20; ++step) {
                const auto gradients = gradients_of(context, shape, 13, step);
                rank.write(gradients[static_cast<size_t>(context.rank())]);
                context.launch(graph, rank.stream());
                context.synchronize(rank.stream());
                rank.check(gradients);
                if (step % 5 == 0) rank.step(gradients);
            }
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
