// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "tests/a2sgd/bench/averaging.h"

namespace crossdock::bench {
namespace {

class Dense : public Averaging {
  public:
    Dense(Wire& wire, int rank) : wire_(wire), rank_(static_cast<size_t>(rank)) {}

    std::string name() const override { return "dense"; }
    uint64_t bytes_sent() const override { return wire_.bytes_sent(static_cast<int>(rank_)); }
    uint64_t message_bits(size_t entries) const override { return 32 * uint64_t{entries}; }

    void average(std::vector<float>& gradient) override {
        const size_t ranks = static_cast<size_t>(wire_.num_ranks());
        const size_t part = (gradient.size() + ranks - 1) / ranks;
        std::vector<float> padded(part * ranks);
        std::copy(gradient.begin(), gradient.end(), padded.begin());
        std::vector<float> received(part);
        const auto part_at = [&](size_t step) { return padded.data() + part * ((rank_ + 2 * ranks - step) % ranks); };
        for (size_t step = 0; step + 1 < ranks; ++step) {
            pass_on(part_at(step), received);
            float* sum = part_at(step + 1);
            for (size_t i = 0; i < part; ++i) sum[i] += received[i];
        }
        // This rank now holds all of the part behind its own.
        float* finished = part_at(ranks - 1);
        for (size_t i = 0; i < part; ++i) finished[i] /= static_cast<float>(ranks);
        for (size_t step = 0; step + 1 < ranks; ++step) {
            pass_on(part_at(step + ranks - 1), received);
            std::copy(received.begin(), received.end(), part_at(step + ranks));
        }
        std::copy_n(padded.begin(), gradient.size(), gradient.begin());
    }

  private:
    void pass_on(const float* part, std::vector<float>& received) {
        wire_.pass_on(static_cast<int>(rank_), part, received.data(), received.size() * sizeof(float));
    }

    Wire& wire_;
    size_t rank_;
};

}  // namespace

std::unique_ptr<Averaging> make_dense(Wire& wire, int rank) { return std::make_unique<Dense>(wire, rank); }

}  // namespace crossdock::bench
