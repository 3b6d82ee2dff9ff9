// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/a2sgd/bench/averaging.h"

namespace crossdock::bench {
namespace {

struct Entry {
    uint32_t place;
    float value;
};

class TopK : public Averaging {
  public:
    TopK(Wire& wire, int rank, double part) : wire_(wire), rank_(rank), part_(part) {}

    std::string name() const override { return "top-k"; }
    uint64_t bytes_sent() const override { return wire_.bytes_sent(rank_); }
    uint64_t message_bits(size_t entries) const override { return 8 * sizeof(Entry) * count_of(entries); }

    void average(std::vector<float>& gradient) override {
        kept_.resize(gradient.size());
        for (size_t i = 0; i < gradient.size(); ++i) kept_[i] += gradient[i];
        const size_t count = count_of(gradient.size());
        std::vector<uint32_t> places(gradient.size());
        std::iota(places.begin(), places.end(), 0u);
        std::nth_element(places.begin(), places.begin() + static_cast<ptrdiff_t>(count) - 1, places.end(),
                         [&](uint32_t a, uint32_t b) { return std::abs(kept_[a]) > std::abs(kept_[b]); });
        std::vector<std::byte> own(count * sizeof(Entry));
        for (size_t i = 0; i < count; ++i) {
            const Entry entry{places[i], kept_[places[i]]};
            std::memcpy(own.data() + i * sizeof(Entry), &entry, sizeof(Entry));
            kept_[places[i]] = 0;
        }
        std::fill(gradient.begin(), gradient.end(), 0.0f);
        for (const std::vector<std::byte>& message : wire_.all_gather(rank_, own)) {
            for (size_t at = 0; at < message.size(); at += sizeof(Entry)) {
                Entry entry;
                std::memcpy(&entry, message.data() + at, sizeof(Entry));
                gradient[entry.place] += entry.value / static_cast<float>(wire_.num_ranks());
            }
        }
    }

  private:
    size_t count_of(size_t entries) const {
        return std::clamp<size_t>(static_cast<size_t>(std::llround(part_ * static_cast<double>(entries))), 1, entries);
    }

    Wire& wire_;
    int rank_;
    double part_;
    std::vector<float> kept_;
};

}  // namespace

std::unique_ptr<Averaging> make_top_k(Wire& wire, int rank, double part) {
    return std::make_unique<TopK>(wire, rank, part);
}

}  // namespace crossdock::bench
