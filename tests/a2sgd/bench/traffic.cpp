// SPDX-License-Identifier: Apache-2.0
#include "tests/a2sgd/bench/traffic.h"

#include <functional>

#include "bench/stopwatch.h"
#include "crossdock/error.hpp"
#include "tests/a2sgd/bench/averaging.h"
#include "tools/common/random.h"
#include "tools/common/ranks.h"

namespace crossdock::bench {
namespace {

using Make = std::function<std::unique_ptr<Averaging>(Wire&, const tools::RankContext&)>;

std::vector<float> random_gradient(size_t entries, int rank) {
    tools::Random random(static_cast<uint64_t>(rank) + 1);
    std::vector<float> gradient(entries);
    for (float& entry : gradient) entry = random.symmetric();
    return gradient;
}

TrafficResult run(const Make& make, int num_ranks, size_t entries, int num_steps) {
    Wire wire(num_ranks);
    TrafficResult result;
    const auto ranks = tools::start_threads(num_ranks, [&](const tools::RankContext& context) {
        const auto averaging = make(wire, context);
        std::vector<float> gradient = random_gradient(entries, context.rank);
        check(crossdockCommBarrier(context.host));
        const double us = time_us([&] {
            for (int step = 0; step < num_steps; ++step) averaging->average(gradient);
        });
        if (context.rank != 0) return;
        result.name = averaging->name();
        result.message_bits = averaging->message_bits(entries);
        result.bytes_sent = static_cast<double>(averaging->bytes_sent()) / num_steps;
        result.step_us = us / num_steps;
    });
    constexpr double kGraceS = 5;
    const auto failures = ranks->wait([] {}, kGraceS);
    if (!failures.empty()) throw std::runtime_error(tools::to_string(failures.front()));
    return result;
}

}  // namespace

std::vector<TrafficResult> compare_traffic(int num_ranks, size_t entries, int num_steps, double top_k_part) {
    using Context = tools::RankContext;
    const Make makers[] = {
        [](Wire& wire, const Context& context) { return make_dense(wire, context.rank); },
        [=](Wire& wire, const Context& context) { return make_top_k(wire, context.rank, top_k_part); },
        [](Wire& wire, const Context& context) { return make_qsgd(wire, context.rank, 1); },
        [](Wire&, const Context& context) { return make_a2sgd(context.host); },
    };
    std::vector<TrafficResult> results;
    for (const Make& make : makers) results.push_back(run(make, num_ranks, entries, num_steps));
    return results;
}

}  // namespace crossdock::bench
