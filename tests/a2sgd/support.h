// SPDX-License-Identifier: Apache-2.0
// A rank's gradient with its library object, driven through the C API and compared with the reference after every step.
#pragma once

#include "a2sgd/reference.h"
#include "conformance/support/options.h"
#include "conformance/support/tensors.h"
#include "crossdock/a2sgd.h"

namespace crossdock::testing {

struct A2sgdPieceShape {
    ncclDataType_t type = ncclFloat32;
    size_t count = 0;
    size_t offset = 0;  // entries from an aligned place
};
using A2sgdShape = std::vector<A2sgdPieceShape>;

// Of `rank` in `step`: entries of both signs, some zeros of either.
reference::Gradient random_gradient(const A2sgdShape& shape, uint64_t seed, int rank, int step);

crossdockA2sgdConfig_t a2sgd_config(bool sums_in_fp64 = false, bool skips_nonfinite = false);

class A2sgdRank {
  public:
    // Stops the program if the object cannot be made.
    A2sgdRank(RankContext& context, const A2sgdShape& shape, const crossdockA2sgdConfig_t& config);
    ~A2sgdRank();
    A2sgdRank(const A2sgdRank&) = delete;
    A2sgdRank& operator=(const A2sgdRank&) = delete;

    crossdockA2sgd_t get() const { return a2sgd_; }
    cudaStream_t stream() const { return stream_; }
    std::vector<crossdockA2sgdPiece_t> pieces() const;

    void write(const reference::Gradient& gradient);
    void begin() { RANK_OK(context_, crossdockA2sgdBegin(a2sgd_, stream_)); }
    void end() { RANK_OK(context_, crossdockA2sgdEnd(a2sgd_, stream_)); }
    crossdockA2sgdReport_t report();

    // What every rank's gradient became must be what the reference says; `gradients` are those before the step.
    void check(const std::vector<reference::Gradient>& gradients);
    void check_unchanged() { check_bytes(written_); }
    void step(const std::vector<reference::Gradient>& gradients);

  private:
    void check_bytes(const reference::Gradient& expected);

    RankContext& context_;
    A2sgdShape shape_;
    bool sums_in_fp64_;
    cudaStream_t stream_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<std::string> names_;
    reference::Gradient written_;
    crossdockA2sgd_t a2sgd_ = nullptr;
};

}  // namespace crossdock::testing
