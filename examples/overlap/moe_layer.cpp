// SPDX-License-Identifier: Apache-2.0
//
// moe_layer.py on CPUs: a MoE layer whose experts compute blocks of rows while others still arrive, and whose rows
// return while others are computed. Ranks are threads, and each has another thread for its experts. The sums have the
// same bits as those of the layer one step after the other. It is faster only if each thread has a core.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

#include "crossdock/communicator.hpp"
#include "crossdock/group.hpp"
#include "crossdock/overlap.hpp"

namespace {

constexpr std::size_t kRanks = 2, kExperts = 8, kLocal = kExperts / kRanks, kTopk = 2;
constexpr std::size_t kTokens = 64, kSlots = kRanks * kTokens, kHidden = 128, kInner = 128;
constexpr unsigned kBlockRows = 16;
constexpr unsigned kLayers = 20;
constexpr std::uint64_t kTimeoutNs = 60'000'000'000;

using Matrix = std::vector<float>;

// Values between -1 and 1, the same in each run.
Matrix values(std::size_t number, std::uint32_t seed) {
    Matrix made(number);
    for (float& value : made) {
        seed = seed * 1664525 + 1013904223;
        value = static_cast<float>(seed >> 8) / float{1 << 23} - 1.0f;
    }
    return made;
}

// Experts of each token.
std::vector<int> routing(std::uint32_t seed) {
    std::vector<int> ids;
    for (std::size_t token = 0; token < kTokens; ++token) {
        for (std::size_t k = 0; k < kTopk; ++k) ids.push_back(static_cast<int>((seed + 3 * token + 5 * k) % kExperts));
    }
    return ids;
}

// y[rows, n] = x[rows, k] * w[k, n]
void multiply(const float* x, const float* w, float* y, std::size_t rows, std::size_t n, std::size_t k) {
    std::fill(y, y + rows * n, 0.0f);
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t i = 0; i < k; ++i) {
            for (std::size_t column = 0; column < n; ++column)
                y[row * n + column] += x[row * k + i] * w[i * n + column];
        }
    }
}

class Layer {
  public:
    explicit Layer(const crossdock::Communicator& communicator)
        : seed_(static_cast<std::uint32_t>(communicator.rank()) + 1),
          group_(communicator.get(), crossdock::low_latency_config(kExperts, kTokens, kHidden * sizeof(float))),
          handle_(group_, NCCL_EP_LAYOUT_EXPERT_MAJOR, kTopk),
          words_(handle_.overlap_words(kBlockRows)) {
        handle_.update(topk_idx_);
    }

    void run_sequential() {
        handle_.dispatch(input_, rows_, counter_);
        for (std::size_t expert = 0; expert < kLocal; ++expert)
            compute(expert, 0, static_cast<std::size_t>(counts_[expert]));
        handle_.combine(answers_, topk_weights_, output_);
    }
    // Between begin_overlap and end_overlap. Returns false if rows did not come.
    bool run_overlapped() {
        bool have_come = false;
        {
            const std::jthread experts([&] { have_come = run_experts(); });
            handle_.dispatch(input_, rows_, counter_);
            handle_.combine(answers_, topk_weights_, output_);
        }  // the experts have left: the next dispatch may clear this one's counters
        return have_come;
    }

    // Between these, dispatches publish rows and combines wait for blocks.
    void begin_overlap() {
        crossdock::Tensor words(words_.data(), ncclUint32, {words_.size()});
        crossdockOverlap_t overlap = CROSSDOCK_OVERLAP_INIT;
        overlap.memory = words.get();
        overlap.block_rows = kBlockRows;
        overlap.done_value = 1;
        handle_.set_overlap(overlap);
    }
    void end_overlap() { handle_.end_overlap(); }

    Matrix& sums() { return sums_; }

  private:
    bool run_experts() {
        const crossdock::OverlapConsumer consumer(words_.data(), kLocal, kSlots, kBlockRows);
        const std::uint32_t turn = consumer.turn();
        for (std::uint32_t expert = 0; expert < kLocal; ++expert) {
            std::uint32_t rows = 0;
            if (!consumer.wait_count(turn, expert, kTimeoutNs, rows)) return false;
            for (std::uint32_t block = 0; block * kBlockRows < rows; ++block) {
                const std::uint32_t num = consumer.wait_block(turn, expert, block, kTimeoutNs);
                if (num == 0) return false;
                compute(expert, block * kBlockRows, num);
                consumer.finish(turn, expert, block);
            }
        }
        consumer.leave(1);
        return true;
    }
    // Rows [first, first + rows) of a local expert.
    void compute(std::size_t expert, std::size_t first, std::size_t rows) {
        const std::size_t at = (expert * kSlots + first) * kHidden;
        Matrix middle(rows * kInner);
        multiply(&received_[at], &up_[expert * kHidden * kInner], middle.data(), rows, kInner, kHidden);
        for (float& value : middle) value /= 1.0f + std::exp(-value);  // SiLU
        multiply(middle.data(), &down_[expert * kInner * kHidden], &computed_[at], rows, kHidden, kInner);
    }

    std::uint32_t seed_;
    crossdock::Group group_;
    crossdock::Handle handle_;
    std::vector<std::uint32_t> words_;  // zero before the first dispatch
    std::vector<int> ids_ = routing(seed_), counts_ = std::vector<int>(kLocal);
    Matrix x_ = values(kTokens * kHidden, seed_), weights_ = values(kTokens * kTopk, seed_ + 100);
    Matrix up_ = values(kLocal * kHidden * kInner, seed_ + 200), down_ = values(kLocal * kInner * kHidden, seed_ + 300);
    Matrix received_ = Matrix(kLocal * kSlots * kHidden), computed_ = received_, sums_ = Matrix(kTokens * kHidden);
    crossdock::Tensor topk_idx_{ids_.data(), ncclInt32, {kTokens, kTopk}};
    crossdock::Tensor topk_weights_{weights_.data(), ncclFloat32, {kTokens, kTopk}};
    crossdock::Tensor input_{x_.data(), ncclFloat32, {kTokens, kHidden}};
    crossdock::Tensor rows_{received_.data(), ncclFloat32, {kLocal, kSlots, kHidden}};
    crossdock::Tensor counter_{counts_.data(), ncclInt32, {kLocal}};
    crossdock::Tensor answers_{computed_.data(), ncclFloat32, {kLocal, kSlots, kHidden}};
    crossdock::Tensor output_{sums_.data(), ncclFloat32, {kTokens, kHidden}};
};

template <typename Run>
double us_per_layer(Run run) {
    const auto begin = std::chrono::steady_clock::now();
    for (unsigned i = 0; i < kLayers; ++i) run();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / kLayers;
}

// Whether the sums are the same both ways.
bool run_rank(const crossdock::Communicator& communicator) {
    Layer layer(communicator);
    const double sequential_us = us_per_layer([&] { layer.run_sequential(); });
    const Matrix expected = layer.sums();
    std::fill(layer.sums().begin(), layer.sums().end(), NAN);

    bool have_come = true;
    layer.begin_overlap();
    const double overlapped_us = us_per_layer([&] { have_come = layer.run_overlapped() && have_come; });
    layer.end_overlap();
    const bool is_same = have_come && layer.sums() == expected;
    std::printf("rank %d: one after the other %.0f us, overlapped %.0f us per layer, sums %s\n", communicator.rank(),
                sequential_us, overlapped_us, is_same ? "have the same bits" : "DIFFER");
    return is_same;
}

}  // namespace

int main() {
    std::atomic<int> num_wrong(0);
    try {
        crossdock::run_threads(kRanks,
                               [&](const crossdock::Communicator& comm) { num_wrong += run_rank(comm) ? 0 : 1; });
    } catch (const crossdock::Error& error) {
        std::fprintf(stderr, "moe_layer: %s\n", error.what());
        return 1;
    }
    return num_wrong == 0 ? 0 : 1;
}
