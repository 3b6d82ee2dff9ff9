// SPDX-License-Identifier: Apache-2.0
// What the compared ways to average make of gradients, and what they send for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <thread>

#include "crossdock/error.hpp"
#include "tests/a2sgd/bench/averaging.h"
#include "tools/common/random.h"

namespace crossdock::bench {
namespace {

using Gradients = std::vector<std::vector<float>>;
using Make = std::function<std::unique_ptr<Averaging>(Wire&, int rank, ncclComm_t comm)>;

Gradients random_gradients(size_t ranks, size_t entries, uint64_t seed) {
    tools::Random random(seed);
    Gradients gradients(ranks, std::vector<float>(entries));
    for (auto& gradient : gradients)
        for (float& entry : gradient) entry = random.symmetric();
    return gradients;
}

std::vector<float> means_of(const Gradients& gradients) {
    std::vector<float> means(gradients[0].size());
    for (size_t i = 0; i < means.size(); ++i) {
        double sum = 0;
        for (const auto& gradient : gradients) sum += gradient[i];
        means[i] = static_cast<float>(sum / static_cast<double>(gradients.size()));
    }
    return means;
}

struct Outcome {
    Gradients gradients;  // of the last step
    std::vector<uint64_t> bytes_sent;
};

// Every rank is a thread; the same gradients in each of the steps.
Outcome run(const Make& make, const Gradients& gradients, int num_steps = 1) {
    const size_t ranks = gradients.size();
    Wire wire(static_cast<int>(ranks));
    std::vector<ncclComm_t> comms(ranks);
    check(crossdockCommInitAll(comms.data(), static_cast<int>(ranks)));
    Outcome outcome{gradients, std::vector<uint64_t>(ranks)};
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
            const auto averaging = make(wire, static_cast<int>(rank), comms[rank]);
            for (int step = 0; step < num_steps; ++step) {
                outcome.gradients[rank] = gradients[rank];
                averaging->average(outcome.gradients[rank]);
            }
            outcome.bytes_sent[rank] = averaging->bytes_sent();
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (ncclComm_t comm : comms) check(crossdockCommDestroy(comm));
    return outcome;
}

// The ring gives every rank the means, in two times (ranks - 1) / ranks of the gradient's bytes.
TEST(Averaging, DenseIsTheMean) {
    for (const size_t ranks : {1, 2, 3, 5}) {
        const Gradients gradients = random_gradients(ranks, 60, ranks);
        const Outcome outcome = run([](Wire& w, int rank, ncclComm_t) { return make_dense(w, rank); }, gradients);
        const std::vector<float> means = means_of(gradients);
        for (size_t rank = 0; rank < ranks; ++rank) {
            for (size_t i = 0; i < means.size(); ++i) EXPECT_NEAR(outcome.gradients[rank][i], means[i], 1e-6f);
            EXPECT_EQ(outcome.bytes_sent[rank], 2 * (ranks - 1) * 60 / ranks * sizeof(float));
        }
    }
}

// The largest entries arrive, and what was kept back comes later: over many steps nothing is lost.
TEST(Averaging, TopKKeepsWhatItDoesNotSend) {
    const Gradients gradients = random_gradients(3, 100, 7);
    const Make make = [](Wire& w, int rank, ncclComm_t) { return make_top_k(w, rank, 0.05); };
    const Outcome one = run(make, gradients);
    EXPECT_LE(std::count_if(one.gradients[0].begin(), one.gradients[0].end(), [](float e) { return e != 0; }), 15);
    EXPECT_EQ(one.gradients[0], one.gradients[2]);
    EXPECT_EQ(one.bytes_sent[1], 2u * 5 * 8);
    const size_t largest =
        static_cast<size_t>(std::max_element(gradients[0].begin(), gradients[0].end(),
                                             [](float a, float b) { return std::abs(a) < std::abs(b); }) -
                            gradients[0].begin());
    EXPECT_NE(one.gradients[0][largest], 0);

    const int steps = 400;
    Wire wire(1);
    const auto averaging = make_top_k(wire, 0, 0.05);
    std::vector<double> sums(100);
    for (int step = 0; step < steps; ++step) {
        std::vector<float> gradient = gradients[0];
        averaging->average(gradient);
        for (size_t i = 0; i < sums.size(); ++i) sums[i] += gradient[i];
    }
    for (size_t i = 0; i < sums.size(); ++i) EXPECT_NEAR(sums[i] / steps, gradients[0][i], 0.1) << i;
}

// Rounding at random has the right mean, and no error larger than a level.
TEST(Averaging, QsgdIsRightInTheMean) {
    const Gradients gradients = random_gradients(1, 700, 9);
    Wire wire(1);
    const auto averaging = make_qsgd(wire, 0, 1);
    std::vector<double> sums(700);
    const int steps = 3000;
    for (int step = 0; step < steps; ++step) {
        std::vector<float> gradient = gradients[0];
        averaging->average(gradient);
        for (size_t i = 0; i < sums.size(); ++i) {
            sums[i] += gradient[i];
            ASSERT_LE(std::abs(gradient[i] - gradients[0][i]), 1.0f / 7);
        }
    }
    for (size_t i = 0; i < sums.size(); ++i) EXPECT_NEAR(sums[i] / steps, gradients[0][i], 0.01);
    EXPECT_EQ(averaging->message_bits(700), 8u * 2 * (4 + 256));
}

// 64 bits per rank and step, whatever the size; entries keep their deviations.
TEST(Averaging, A2sgdSendsTwoNumbers) {
    const Gradients gradients = random_gradients(4, 1000, 11);
    const Outcome outcome = run([](Wire&, int, ncclComm_t comm) { return make_a2sgd(comm); }, gradients, 3);
    double a[4], b[4], mean_a = 0, mean_b = 0;
    for (size_t rank = 0; rank < 4; ++rank) {
        double sums[2] = {0, 0}, counts[2] = {0, 0};
        for (const float entry : gradients[rank]) {
            sums[entry >= 0 ? 0 : 1] += std::abs(entry);
            counts[entry >= 0 ? 0 : 1] += 1;
        }
        a[rank] = sums[0] / counts[0];
        b[rank] = sums[1] / counts[1];
        mean_a += a[rank] / 4;
        mean_b += b[rank] / 4;
    }
    for (size_t rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(outcome.bytes_sent[rank], 3u * 3 * 16);
        for (size_t i = 0; i < 1000; ++i) {
            const float entry = gradients[rank][i];
            const double moved = entry >= 0 ? entry - a[rank] + mean_a : entry + b[rank] - mean_b;
            EXPECT_NEAR(outcome.gradients[rank][i], moved, 1e-6);
        }
    }
}

}  // namespace
}  // namespace crossdock::bench
