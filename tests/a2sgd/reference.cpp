// SPDX-License-Identifier: Apache-2.0
#include "a2sgd/reference.h"

#include <algorithm>
#include <cmath>

#include "reference/formats.h"

namespace crossdock::reference {
namespace {

constexpr size_t kChunk = 4096;
constexpr size_t kColumns = 256;
constexpr size_t kChunksOfSegment = 8;

struct Sums {
    double positive = 0;
    double negative = 0;
};

// c and c + 128, then c and c + 64, ...
template <typename Value>
Value halved(std::vector<Value> columns) {
    while (columns.size() > 1) {
        const size_t half = columns.size() / 2;
        for (size_t i = 0; i < half; ++i) columns[i] += columns[i + half];
        columns.resize(half);
    }
    return columns[0];
}

template <typename Sum>
Sums chunk_sums(const GradientPiece& piece, size_t first) {
    std::vector<Sum> positive(kColumns), negative(kColumns);
    for (size_t i = first; i < std::min(first + kChunk, piece.count()); ++i) {
        const float value = piece.at(i);
        if (value >= 0) {
            positive[(i - first) % kColumns] += value;
        } else {
            negative[(i - first) % kColumns] -= value;
        }
    }
    return {halved(positive), halved(negative)};
}

SignMeans means_of(const Sums& sums, uint64_t num_nonnegative, uint64_t num_negative) {
    SignMeans means;
    means.a = sums.positive / static_cast<double>(std::max<uint64_t>(1, num_nonnegative));
    means.b = sums.negative / static_cast<double>(std::max<uint64_t>(1, num_negative));
    means.num_nonnegative = num_nonnegative;
    return means;
}

}  // namespace

size_t GradientPiece::count() const { return bytes.size() / type_bytes(type); }
float GradientPiece::at(size_t i) const { return decode(type, bytes.data() + i * type_bytes(type)); }

SignMeans plain_means(const Gradient& gradient) {
    Sums sums;
    uint64_t num_nonnegative = 0, num_negative = 0;
    int nonfinite_piece = -1;
    for (size_t p = 0; p < gradient.size(); ++p) {
        for (size_t i = 0; i < gradient[p].count(); ++i) {
            const double value = gradient[p].at(i);
            if (value >= 0) {
                sums.positive += value;
                ++num_nonnegative;
            } else {
                sums.negative -= value;
                ++num_negative;
            }
            if (!std::isfinite(value) && nonfinite_piece < 0) nonfinite_piece = static_cast<int>(p);
        }
    }
    SignMeans means = means_of(sums, num_nonnegative, num_negative);
    means.nonfinite_piece = nonfinite_piece;
    return means;
}

SignMeans ordered_means(const Gradient& gradient, bool sums_in_fp64) {
    std::vector<Sums> chunks;
    for (const GradientPiece& piece : gradient) {
        for (size_t first = 0; first < piece.count(); first += kChunk)
            chunks.push_back(sums_in_fp64 ? chunk_sums<double>(piece, first) : chunk_sums<float>(piece, first));
    }
    std::vector<double> positive(kColumns), negative(kColumns);
    for (size_t segment = 0; segment * kChunksOfSegment < chunks.size(); ++segment) {
        Sums sums;
        for (size_t i = segment * kChunksOfSegment; i < std::min(chunks.size(), (segment + 1) * kChunksOfSegment);
             ++i) {
            sums.positive += chunks[i].positive;
            sums.negative += chunks[i].negative;
        }
        positive[segment % kColumns] += sums.positive;
        negative[segment % kColumns] += sums.negative;
    }
    const SignMeans plain = plain_means(gradient);
    uint64_t count = 0;
    for (const GradientPiece& piece : gradient) count += piece.count();
    SignMeans means =
        means_of({halved(positive), halved(negative)}, plain.num_nonnegative, count - plain.num_nonnegative);
    means.nonfinite_piece = plain.nonfinite_piece;
    return means;
}

Gradient moved(const Gradient& gradient, float up, float down) {
    Gradient result = gradient;
    for (GradientPiece& piece : result) {
        for (size_t i = 0; i < piece.count(); ++i) {
            const float value = piece.at(i);
            encode(piece.type, value + (value >= 0 ? up : down), piece.bytes.data() + i * type_bytes(piece.type));
        }
    }
    return result;
}

}  // namespace crossdock::reference
