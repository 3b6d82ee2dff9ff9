// SPDX-License-Identifier: Apache-2.0
#include "a2sgd/support.h"

#include <cmath>
#include <cstring>

#include "reference/formats.h"
#include "reference/problem.h"

namespace crossdock::testing {

using reference::type_bytes;

reference::Gradient random_gradient(const A2sgdShape& shape, uint64_t seed, int rank, int step) {
    reference::Gradient gradient;
    for (size_t p = 0; p < shape.size(); ++p) {
        const size_t bytes = type_bytes(shape[p].type);
        reference::GradientPiece piece{shape[p].type, std::vector<std::byte>(shape[p].count * bytes)};
        const uint64_t stream =
            reference::random_bits(seed, 64 * static_cast<uint64_t>(step) + p) + static_cast<uint64_t>(rank);
        for (size_t i = 0; i < shape[p].count; ++i) {
            const uint64_t bits = reference::random_bits(stream, i);
            float value = static_cast<float>(static_cast<int64_t>(bits % 20'001) - 9'000) * 1e-4f;
            if (bits >> 32 == 7 * (bits >> 40)) value = 0;
            if (bits >> 60 == 3) value = -0.0f;
            reference::encode(shape[p].type, value, piece.bytes.data() + i * bytes);
        }
        gradient.push_back(std::move(piece));
    }
    return gradient;
}

crossdockA2sgdConfig_t a2sgd_config(bool sums_in_fp64, bool skips_nonfinite) {
    crossdockA2sgdConfig_t config = CROSSDOCK_A2SGD_CONFIG_INIT;
    config.sums = sums_in_fp64 ? CROSSDOCK_A2SGD_SUMS_FP64 : CROSSDOCK_A2SGD_SUMS_FP32;
    config.skip_nonfinite = skips_nonfinite ? 1 : 0;
    config.timeout_ns = 60'000'000'000;
    return config;
}

A2sgdRank::A2sgdRank(RankContext& context, const A2sgdShape& shape, const crossdockA2sgdConfig_t& caller)
    : context_(context),
      shape_(shape),
      sums_in_fp64_(caller.sums == CROSSDOCK_A2SGD_SUMS_FP64),
      stream_(context.make_stream()) {
    for (size_t p = 0; p < shape.size(); ++p) {
        const size_t bytes = (shape[p].offset + shape[p].count) * type_bytes(shape[p].type);
        buffers_.push_back(std::make_unique<Buffer>(context, stream_, bytes));
        names_.push_back(fmt::format("layer{}.weight", p));
    }
    crossdockA2sgdConfig_t config = caller;
    config.lsa_team_size = lsa_team_for(context.num_ranks());
    const std::vector<crossdockA2sgdPiece_t> own = pieces();
    RANK_OK(context, crossdockA2sgdCreate(&a2sgd_, context.comm(), own.data(), own.size(), &config));
}

A2sgdRank::~A2sgdRank() {
    if (a2sgd_ != nullptr) crossdockA2sgdDestroy(a2sgd_);
}

std::vector<crossdockA2sgdPiece_t> A2sgdRank::pieces() const {
    std::vector<crossdockA2sgdPiece_t> result;
    for (size_t p = 0; p < shape_.size(); ++p) {
        std::byte* data = buffers_[p]->data() + shape_[p].offset * type_bytes(shape_[p].type);
        result.push_back({data, shape_[p].count, shape_[p].type, names_[p].c_str()});
    }
    return result;
}

void A2sgdRank::write(const reference::Gradient& gradient) {
    written_ = gradient;
    for (size_t p = 0; p < shape_.size(); ++p) {
        const size_t before = shape_[p].offset * type_bytes(shape_[p].type);
        std::vector<std::byte> bytes(before, kPoison);
        bytes.insert(bytes.end(), gradient[p].bytes.begin(), gradient[p].bytes.end());
        buffers_[p]->write(bytes);
    }
}

crossdockA2sgdReport_t A2sgdRank::report() {
    crossdockA2sgdReport_t report = CROSSDOCK_A2SGD_REPORT_INIT;
    RANK_OK(context_, crossdockA2sgdReport(a2sgd_, &report));
    return report;
}

void A2sgdRank::check_bytes(const reference::Gradient& expected) {
    for (size_t p = 0; p < shape_.size(); ++p) {
        const size_t before = shape_[p].offset * type_bytes(shape_[p].type);
        std::vector<std::byte> bytes(before, kPoison);
        bytes.insert(bytes.end(), expected[p].bytes.begin(), expected[p].bytes.end());
        buffers_[p]->check(bytes, type_bytes(shape_[p].type), names_[p]);
        context_.add_to_digest(bytes.data(), bytes.size());
    }
}

void A2sgdRank::check(const std::vector<reference::Gradient>& gradients) {
    const crossdockA2sgdReport_t seen = report();
    const reference::Gradient& own = gradients[static_cast<size_t>(context_.rank())];
    const reference::SignMeans plain = plain_means(own);
    const double tolerance = sums_in_fp64_ ? 1e-7 : 2e-6;
    RANK_CHECK(context_, std::abs(seen.a - plain.a) <= tolerance * plain.a, "a {} instead of {}", seen.a, plain.a);
    RANK_CHECK(context_, std::abs(seen.b - plain.b) <= tolerance * plain.b, "b {} instead of {}", seen.b, plain.b);
    RANK_CHECK(context_, seen.num_nonnegative == plain.num_nonnegative, "{} are not negative, instead of {}",
               seen.num_nonnegative, plain.num_nonnegative);
    double sums[2] = {0, 0};
    for (const reference::Gradient& gradient : gradients) {
        const reference::SignMeans ordered = ordered_means(gradient, sums_in_fp64_);
        sums[0] += static_cast<float>(ordered.a);
        sums[1] += static_cast<float>(ordered.b);
    }
    const reference::SignMeans ordered = ordered_means(own, sums_in_fp64_);
    const float expected[4] = {static_cast<float>(ordered.a), static_cast<float>(ordered.b),
                               static_cast<float>(sums[0] / static_cast<double>(gradients.size())),
                               static_cast<float>(sums[1] / static_cast<double>(gradients.size()))};
    const float got[4] = {seen.a, seen.b, seen.mean_a, seen.mean_b};
    RANK_CHECK(context_, std::memcmp(expected, got, sizeof got) == 0, "a b A B are {} {} {} {} instead of {} {} {} {}",
               got[0], got[1], got[2], got[3], expected[0], expected[1], expected[2], expected[3]);
    check_bytes(moved(own, expected[2] - expected[0], expected[1] - expected[3]));
}

void A2sgdRank::step(const std::vector<reference::Gradient>& gradients) {
    write(gradients[static_cast<size_t>(context_.rank())]);
    begin();
    end();
    check(gradients);
}

}  // namespace crossdock::testing
