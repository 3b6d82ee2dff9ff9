// SPDX-License-Identifier: Apache-2.0
// MXFP8 rows: quantised and summed again, they are what the definitions of the formats say.
#include "kernels/ht/recipes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "reference/formats.h"
#include "reference/problem.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock {
namespace {

using Row = std::vector<std::byte>;

void run(const auto& kernel) {
    const LaunchShape shape{1, 1, 0};
    cpu::LocalExecutor(1).run(shape, [&](cpu::Warp& warp) { kernel(Ctx(warp)); });
}

// The wire form of a bf16 row, in parts of so many elements.
Row quantised(const Row& row, uint32_t part_elements) {
    const auto elements = static_cast<uint32_t>(row.size() / 2);
    Row wire(wire_bytes(HtWire::kMxfp8, 2 * elements, 2 * part_elements));
    run([&](const Ctx& ctx) {
        for (uint32_t first = 0; first < elements; first += part_elements) {
            const uint32_t part = std::min(part_elements, elements - first);
            std::byte* const target = wire.data() + first / part_elements * mxfp8_part_bytes(part_elements);
            quantise_mxfp8(ctx, row.data() + size_t{2} * first, part, target, target + part);
        }
    });
    return wire;
}

Row summed(const std::vector<Row>& wires, uint32_t elements, uint32_t part_elements) {
    std::vector<const std::byte*> rows;
    for (const Row& wire : wires) rows.push_back(wire.data());
    Row out(size_t{2} * elements);
    run([&](const Ctx& ctx) {
        sum_mxfp8_rows(ctx, rows.data(), static_cast<uint32_t>(rows.size()), elements, part_elements, out.data());
    });
    return out;
}

// Finite bf16 values: of each block the exponents lie around one of its own, from 0 to the largest.
Row random_row(uint64_t seed, uint32_t elements) {
    Row row(size_t{2} * elements);
    for (uint32_t i = 0; i < elements; ++i) {
        const uint64_t block = reference::random_bits(seed, ~uint64_t{i / kMxfp8Block});
        const uint64_t bits = reference::random_bits(seed, i);
        const auto center = static_cast<int>(block % 255);
        const int exponent = std::clamp(center - static_cast<int>(bits % 20), 0, 254);
        const auto value = static_cast<uint16_t>((bits >> 32 & 0x807F) | static_cast<uint64_t>(exponent) << 7);
        if (block % 13 != 0) std::memcpy(&row[size_t{2} * i], &value, sizeof value);  // else a block of zeros
    }
    return row;
}

TEST(Mxfp8, SumsAreWhatTheFormatsSay) {
    for (uint64_t seed = 1; seed <= 60; ++seed) {
        const auto elements = static_cast<uint32_t>(kMxfp8Block * (1 + seed % 9));
        const auto part = static_cast<uint32_t>(kMxfp8Block * (1 + seed % 4));
        std::vector<Row> wires;
        std::vector<float> sums(elements);
        for (uint64_t n = 0; n < seed % 11; ++n) {  // more than are loaded at once
            const Row row = random_row(100 * seed + n, elements);
            wires.push_back(quantised(row, part));
            const reference::Mxfp8Row expected = reference::through_mxfp8(reference::decoded(ncclBfloat16, row));
            for (uint32_t i = 0; i < elements; ++i)
                sums[i] = std::fma(expected.elements[i], expected.scales[i / kMxfp8Block], sums[i]);
        }
        EXPECT_EQ(summed(wires, elements, part), reference::encoded(ncclBfloat16, sums)) << "seed " << seed;
    }
}

// Every bf16 magnitude as the largest of a block: nothing saturates, and the scale is as small as can be.
TEST(Mxfp8, ScalesAreTheSmallestThatSuffice) {
    for (uint32_t bits = 0; bits < 0x7F80; ++bits) {
        const double largest = bf16_to_float(static_cast<uint16_t>(bits));
        const uint32_t scale = mxfp8_scale_of(bits << 16);
        const double factor = mxfp8_scale_to_float(scale);
        ASSERT_LE(largest, 448 * factor) << bits;
        ASSERT_TRUE(scale == 0 || largest > 224 * factor) << bits;
    }
}

// What is not finite takes its block along, and no other.
TEST(Mxfp8, ABlockThatIsNotFiniteBecomesNan) {
    for (const uint16_t bad : {uint16_t{0x7F80}, uint16_t{0xFF80}, uint16_t{0x7FC0}, uint16_t{0xFF81}}) {
        Row row = random_row(7, 3 * kMxfp8Block);
        std::memcpy(&row[size_t{2} * (kMxfp8Block + 5)], &bad, sizeof bad);
        const std::vector<float> values = reference::decoded(ncclBfloat16, summed({quantised(row, 64)}, 96, 64));
        for (uint32_t i = 0; i < values.size(); ++i)
            EXPECT_EQ(std::isnan(values[i]), i / kMxfp8Block == 1) << "element " << i << ", bits " << bad;
    }
}

// A ring that was made for rows as they are has room for quantised ones.
TEST(Mxfp8, QuantisedRowsAreNoLarger) {
    for (uint32_t elements = kMxfp8Block; elements <= 4096; elements += kMxfp8Block) {
        for (uint32_t part = kMxfp8Block; part <= 1024; part += kMxfp8Block) {
            const uint32_t bytes = wire_bytes(HtWire::kMxfp8, 2 * elements, 2 * part);
            ASSERT_EQ(bytes % 16, 0u);
            ASSERT_LE(bytes, 2 * elements);
        }
    }
}

}  // namespace
}  // namespace crossdock
