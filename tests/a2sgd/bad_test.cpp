// SPDX-License-Identifier: Apache-2.0
// A2SGD used wrongly gets its code and a message; a rank that does not come is named within the timeout.
#include <gtest/gtest.h>

#include <algorithm>

#include "a2sgd/support.h"
#include "conformance/support/fault_support.h"
#include "reference/problem.h"

namespace crossdock::testing {
namespace {

struct CreateCall {
    crossdockA2sgd_t* out;
    ncclComm_t comm;
    std::vector<crossdockA2sgdPiece_t> pieces;
    const crossdockA2sgdPiece_t* pieces_pointer;
    size_t num_pieces;
    crossdockA2sgdConfig_t config;
};

struct Row {
    const char* name;
    void (*spoil)(CreateCall& call);
    const char* word;
    ncclResult_t code = ncclInvalidArgument;
};

const Row kRows[] = {
    {"out NULL", [](CreateCall& c) { c.out = nullptr; }, "a2sgd"},
    {"comm NULL", [](CreateCall& c) { c.comm = nullptr; }, "comm"},
    {"pieces NULL", [](CreateCall& c) { c.pieces_pointer = nullptr; }, "pieces"},
    {"no pieces", [](CreateCall& c) { c.num_pieces = 0; }, "num_pieces"},
    {"too many pieces", [](CreateCall& c) { c.num_pieces = 1 << 24; }, "16777214"},
    {"data NULL", [](CreateCall& c) { c.pieces[0].data = nullptr; }, "first"},
    {"not aligned", [](CreateCall& c) { c.pieces[0].data = static_cast<char*>(c.pieces[0].data) + 2; },
     "multiple of 4"},
    {"a type without sign", [](CreateCall& c) { c.pieces[1].datatype = ncclUint8; }, "piece 1"},
    {"more than memory", [](CreateCall& c) { c.pieces[1].count = SIZE_MAX / 4; }, "piece 1"},
    {"more than memory together", [](CreateCall& c) { c.pieces[0].count = c.pieces[1].count = SIZE_MAX / 8; },
     "more than memory can"},
    {"config too small", [](CreateCall& c) { c.config.size = 8; }, "size"},
    {"config's magic", [](CreateCall& c) { c.config.magic = 1; }, "magic"},
    {"unknown sums", [](CreateCall& c) { c.config.sums = static_cast<crossdockA2sgdSums_t>(2); }, "sums"},
    {"unknown skip", [](CreateCall& c) { c.config.skip_nonfinite = 2; }, "skip_nonfinite"},
    {"negative team", [](CreateCall& c) { c.config.lsa_team_size = -1; }, "lsa_team_size"},
    {"uneven team", [](CreateCall& c) { c.config.lsa_team_size = 4096; }, "lsa_team_size"},
};

TEST(BadA2sgd, CreationIsRefused) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            auto* const memory = static_cast<float*>(context.allocate(1024));
            for (const Row& row : kRows) {
                const crossdockA2sgd_t untouched = reinterpret_cast<crossdockA2sgd_t>(uintptr_t{64});
                crossdockA2sgd_t out = untouched;
                CreateCall call{&out,
                                context.comm(),
                                {{memory, 10, ncclFloat32, "first"}, {memory + 16, 10, ncclFloat32, nullptr}},
                                nullptr,
                                2,
                                a2sgd_config()};
                call.pieces_pointer = call.pieces.data();
                row.spoil(call);
                RANK_REFUSED(
                    context, row.code, row.word,
                    crossdockA2sgdCreate(call.out, call.comm, call.pieces_pointer, call.num_pieces, &call.config));
                RANK_CHECK(context, out == untouched, "{} wrote its output", row.name);
            }
        });
    });
}

// What only all ranks together can see is said by all of them.
TEST(BadA2sgd, RanksMustAgree) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, std::max(ranks_or(2), 2), std::nullopt, [](RankContext& context) {
            const bool is_odd = context.rank() == context.num_ranks() - 1;
            void* memory = context.allocate(4096);
            const auto create = [&](size_t count, const crossdockA2sgdConfig_t& config) {
                crossdockA2sgd_t out = nullptr;
                const crossdockA2sgdPiece_t piece{memory, count, ncclFloat32, nullptr};
                return crossdockA2sgdCreate(&out, context.comm(), &piece, 1, &config);
            };
            RANK_REFUSED(context, ncclInvalidUsage,
                         fmt::format("100 on rank 0, 101 on rank {}", context.num_ranks() - 1),
                         create(is_odd ? 101 : 100, a2sgd_config()));
            RANK_REFUSED(context, ncclInvalidUsage, "config->sums", create(100, a2sgd_config(is_odd)));
            RANK_REFUSED(context, ncclInvalidUsage, "skip_nonfinite", create(100, a2sgd_config(false, is_odd)));
            RANK_REFUSED(context, ncclInvalidUsage, "0 entries", create(0, a2sgd_config()));
        });
    });
}

TEST(BadA2sgd, HalvesHaveTheirOrder) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const A2sgdShape shape{{ncclFloat32, 300}};
            A2sgdRank rank(context, shape, a2sgd_config());
            RANK_CHECK(context, rank.report().step == 0, "a step before the first");
            RANK_REFUSED(context, ncclInvalidUsage, "Begin", crossdockA2sgdEnd(rank.get(), rank.stream()));
            rank.write(random_gradient(shape, 1, context.rank(), 0));
            rank.begin();
            RANK_REFUSED(context, ncclInvalidUsage, "End", crossdockA2sgdBegin(rank.get(), rank.stream()));
            rank.end();
            auto pieces = rank.pieces();
            pieces[0].count = 299;
            RANK_REFUSED(context, ncclInvalidArgument, "300", crossdockA2sgdSetPieces(rank.get(), pieces.data(), 1));
            RANK_REFUSED(context, ncclInvalidArgument, "report", crossdockA2sgdReport(rank.get(), nullptr));
            const auto stray = reinterpret_cast<crossdockA2sgd_t>(uintptr_t{64});
            RANK_REFUSED(context, ncclInvalidArgument, "live", crossdockA2sgdBegin(stray, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "live", crossdockA2sgdDestroy(stray));
            RANK_OK(context, crossdockA2sgdDestroy(nullptr));
        });
    });
}

// A rank that stays away is named within the timeout, by a message that every later call repeats.
TEST(BadA2sgd, ARankThatStaysAwayIsNamed) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            const int absent = context.num_ranks() - 1;
            const A2sgdShape shape{{ncclFloat32, 300}};
            crossdockA2sgdConfig_t config = a2sgd_config();
            config.timeout_ns = short_timeout_ns(context);
            A2sgdRank rank(context, shape, config);
            const auto gradient = random_gradient(shape, 2, context.rank(), 0);
            rank.write(gradient);
            rank.begin();
            rank.end();
            context.synchronize(rank.stream());
            if (context.rank() != absent) {
                rank.write(gradient);
                rank.begin();
                const ncclResult_t ended = crossdockA2sgdEnd(rank.get(), rank.stream());
                context.synchronize(rank.stream());
                RANK_CHECK(context, ended == (context.is_gpu() ? ncclSuccess : ncclRemoteError), "{}: {}",
                           result_name(ended), crossdockGetLastError());
                RANK_REFUSED(context, ncclRemoteError, fmt::format("means of rank {} in step 2", absent),
                             crossdockA2sgdBegin(rank.get(), rank.stream()));
                rank.check_unchanged();
            }
            context.barrier();
        });
    });
}

// Killed at any step, as a fiber: the others end, and say who it was.
TEST(BadA2sgd, ARankKilledAtAnyStepIsNamed) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const RankProgram program = [](RankContext& context) {
            crossdockA2sgdConfig_t config = a2sgd_config();
            config.timeout_ns = 1'000'000;
            std::vector<float> gradient(600, 1.0f + static_cast<float>(context.rank()));
            const crossdockA2sgdPiece_t piece{gradient.data(), gradient.size(), ncclFloat32, nullptr};
            crossdockA2sgd_t a2sgd = nullptr;
            ncclResult_t result = crossdockA2sgdCreate(&a2sgd, context.comm(), &piece, 1, &config);
            for (int step = 0; step < 4 && result == ncclSuccess; ++step) {
                result = crossdockA2sgdBegin(a2sgd, nullptr);
                if (result == ncclSuccess) result = crossdockA2sgdEnd(a2sgd, nullptr);
            }
            const std::string message = result == ncclSuccess ? "" : crossdockGetLastError();
            if (context.rank() != 1 && result != ncclSuccess)
                RANK_CHECK(context, result == ncclRemoteError && message.find("rank") != std::string::npos, "{}",
                           message);
            if (a2sgd != nullptr) crossdockA2sgdDestroy(a2sgd);
        };
        harm_at_many_steps(backend, Harm::kKill, 3, 1, seeds_or(0, 60), program);
    });
}

}  // namespace
}  // namespace crossdock::testing
