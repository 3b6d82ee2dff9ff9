// SPDX-License-Identifier: Apache-2.0
//
// hello.c in C++: four ranks as threads, one expert each. Owners close what they opened, and a failed call throws
// crossdock::Error with the library's message.
#include <atomic>
#include <cstdio>
#include <vector>

#include "crossdock/communicator.hpp"
#include "crossdock/group.hpp"

namespace {

constexpr int kRanks = 4;
constexpr std::size_t kTokens = 2;
constexpr std::size_t kHidden = 4;
constexpr std::size_t kTopk = 2;
constexpr std::size_t kSlots = kRanks * kTokens;

// Every token through its experts and back; how many values are wrong.
int run_rank(const crossdock::Communicator& communicator) {
    const int rank = communicator.rank();
    std::vector<float> tokens = {1.0f + static_cast<float>(rank), 0, 0, 1, 0, 1.0f + static_cast<float>(rank), 2, 0};
    std::vector<float> received(kSlots * kHidden);
    std::vector<float> results(kTokens * kHidden);
    std::vector<float> weights = {0.5f, 0.5f, 0.25f, 0.75f};
    std::vector<int> choices = {0, 1, 2, 3};
    int count = 0;

    crossdock::Group group(communicator.get(), crossdock::low_latency_config(kRanks, kTokens, kHidden * sizeof(float)));
    crossdock::Handle handle(group, NCCL_EP_LAYOUT_EXPERT_MAJOR, kTopk);
    crossdock::Tensor topk_idx(choices.data(), ncclInt32, {kTokens, kTopk});
    crossdock::Tensor topk_weights(weights.data(), ncclFloat32, {kTokens, kTopk});
    crossdock::Tensor input(tokens.data(), ncclFloat32, {kTokens, kHidden});
    crossdock::Tensor rows(received.data(), ncclFloat32, {1, kSlots, kHidden});
    crossdock::Tensor counter(&count, ncclInt32, {1});
    crossdock::Tensor output(results.data(), ncclFloat32, {kTokens, kHidden});

    handle.update(topk_idx);
    handle.dispatch(input, rows, counter);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count) * kHidden; ++i) {
        received[i] *= static_cast<float>(rank + 1);  // the expert
    }
    handle.combine(rows, topk_weights, output);

    int num_wrong = 0;
    for (std::size_t i = 0; i < kHidden; ++i) {
        num_wrong += results[i] != tokens[i] * 1.5f;
        num_wrong += results[kHidden + i] != tokens[kHidden + i] * 3.75f;
    }
    std::printf("rank %d: its expert got %d rows, %d values are wrong\n", rank, count, num_wrong);
    return num_wrong;
}

}  // namespace

int main() {
    std::atomic<int> num_wrong(0);
    try {
        crossdock::run_threads(kRanks, [&](const crossdock::Communicator& comm) { num_wrong += run_rank(comm); });
    } catch (const crossdock::Error& error) {
        std::fprintf(stderr, "hello: %s\n", error.what());
        return 1;
    }
    return num_wrong == 0 ? 0 : 1;
}
