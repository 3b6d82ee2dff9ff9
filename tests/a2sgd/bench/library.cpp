// SPDX-License-Identifier: Apache-2.0
#include "crossdock/error.hpp"
#include "tests/a2sgd/bench/averaging.h"

namespace crossdock::bench {
namespace {

constexpr uint64_t kMeansBytes = 8;  // two fp32; the word around them has 8 more, which say that they have arrived
constexpr uint64_t kWordBytes = 16;

class A2sgd : public Averaging {
  public:
    explicit A2sgd(ncclComm_t comm) : comm_(comm) { check(crossdockCommCount(comm, &num_ranks_)); }
    ~A2sgd() override { crossdockA2sgdDestroy(a2sgd_); }
    A2sgd(const A2sgd&) = delete;
    A2sgd& operator=(const A2sgd&) = delete;

    std::string name() const override { return "a2sgd"; }
    uint64_t bytes_sent() const override { return steps_ * kWordBytes * static_cast<uint64_t>(num_ranks_ - 1); }
    uint64_t message_bits(size_t) const override { return 8 * kMeansBytes; }

    void average(std::vector<float>& gradient) override {
        const crossdockA2sgdPiece_t piece{gradient.data(), gradient.size(), ncclFloat32, "gradient"};
        if (a2sgd_ == nullptr) check(crossdockA2sgdCreate(&a2sgd_, comm_, &piece, 1, nullptr));
        check(crossdockA2sgdSetPieces(a2sgd_, &piece, 1));
        check(crossdockA2sgdBegin(a2sgd_, nullptr));
        check(crossdockA2sgdEnd(a2sgd_, nullptr));
        ++steps_;
    }

  private:
    ncclComm_t comm_;
    int num_ranks_ = 1;
    uint64_t steps_ = 0;
    crossdockA2sgd_t a2sgd_ = nullptr;
};

}  // namespace

std::unique_ptr<Averaging> make_a2sgd(ncclComm_t comm) { return std::make_unique<A2sgd>(comm); }

}  // namespace crossdock::bench
