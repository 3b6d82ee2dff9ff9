// SPDX-License-Identifier: Apache-2.0
// Rows by expert out of rows by rank and back: what plain loops say, for any number of blocks and warps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "crossdock.h"
#include "device/numeric.h"
#include "kernels/routing/expand.h"
#include "kernels/routing/place.h"
#include "kernels/routing/reduce.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock {
namespace {

constexpr uint32_t kScales = 3;
constexpr LaunchShape kShapes[] = {{1, 1, 4096}, {6, 1, 4096}, {4, 3, 4096}};

template <typename Kernel>
void run(const LaunchShape& shape, Kernel&& kernel) {
    cpu::LocalExecutor(1).run(shape, [&](cpu::Warp& warp) { kernel(Ctx(warp)); });
}

template <typename Struct>
Struct begin_struct() {
    Struct made{};
    made.size = sizeof(Struct);
    made.magic = NCCL_EP_MAGIC;
    made.device = -1;
    return made;
}

// A routing whose places plain loops have found.
struct Routing {
    uint32_t rows, topk, experts, alignment, expanded;
    std::vector<int64_t> ids;
    std::vector<int32_t> counts, places, sources;

    // dropped: so many places are fewer than there would be zones for; negative: more.
    Routing(uint32_t num_rows, uint32_t num_topk, uint32_t num_experts, uint32_t zone_unit, int dropped)
        : rows(num_rows),
          topk(num_topk),
          experts(num_experts),
          alignment(zone_unit),
          ids(rows * topk),
          counts(experts, 0),
          places(rows * topk, -1) {
        std::mt19937 random(rows + topk);
        for (int64_t& id : ids) id = static_cast<int64_t>(random() % (experts + 4)) - 2;
        for (const int64_t id : ids) {
            if (is_here(id)) ++counts[static_cast<size_t>(id)];
        }
        int32_t end = 0;
        for (const int32_t count : counts) end += static_cast<int32_t>(zone_of(count));
        expanded = static_cast<uint32_t>(std::max(0, end - dropped));
        sources.assign(expanded, -2);
        std::fill_n(sources.begin(), std::min<size_t>(sources.size(), static_cast<size_t>(end)), -1);
        uint32_t begin = 0;
        for (uint32_t expert = 0; expert < experts; ++expert) {
            uint32_t next = begin;
            for (uint32_t pair = 0; pair < rows * topk; ++pair) {
                if (ids[pair] != expert) continue;
                const uint32_t place = next++;
                if (place >= expanded) continue;
                places[pair] = static_cast<int32_t>(place);
                sources[place] = static_cast<int32_t>(pair);
            }
            begin += zone_of(counts[expert]);
        }
    }
    bool is_here(int64_t id) const { return id >= 0 && id < experts; }
    uint32_t zone_of(int32_t count) const {
        return (static_cast<uint32_t>(count) + alignment - 1) / alignment * alignment;
    }
    std::string name() const {
        return std::to_string(rows) + " rows, top-" + std::to_string(topk) + ", " + std::to_string(experts) +
               " experts, zones of " + std::to_string(alignment) + ", " + std::to_string(expanded) + " places";
    }
};

std::vector<Routing> routings() {
    return {{37, 5, 6, 1, 0},  {37, 5, 6, 128, 0}, {37, 5, 6, 1, 30}, {37, 5, 6, 8, 21}, {200, 8, 3, 4, -50},
            {9, 70, 2, 16, 0}, {1, 1, 40, 3, 0},   {0, 4, 3, 8, -24}, {5, 0, 3, 8, -24}, {11, 3, 7, 2, 1000}};
}

TEST(RowsByExpert, PlacesAreThoseOfPlainLoops) {
    for (const Routing& routing : routings()) {
        const std::vector<int32_t> narrow(routing.ids.begin(), routing.ids.end());
        for (const bool is_narrow : {false, true}) {
            std::vector<int32_t> places(routing.places.size()), sources(routing.sources.size());
            std::vector<int32_t> more(routing.rows * (routing.topk + 2) + 2);
            auto p = begin_struct<crossdockRowPlaces_t>();
            p.id_type = is_narrow ? ncclInt32 : ncclInt64;
            p.ids = is_narrow ? static_cast<const void*>(narrow.data()) : routing.ids.data();
            p.num_rows = routing.rows;
            p.num_topk = routing.topk;
            p.num_expanded = routing.expanded;
            p.num_experts = routing.experts;
            p.counts = routing.counts.data();
            p.alignment = routing.alignment;
            p.places = places.data();
            p.sources = sources.data();
            p.more_places = more.data() + 2;
            p.more_stride = routing.topk + 2;
            const auto expect_places = [&] {
                EXPECT_EQ(places, routing.places) << routing.name();
                EXPECT_EQ(sources, routing.sources) << routing.name();
                for (uint32_t row = 0; row < routing.rows; ++row) {
                    const int32_t* own = more.data() + row * (routing.topk + 2);
                    EXPECT_TRUE(own[0] == 9 && own[1] == 9);
                    EXPECT_TRUE(
                        std::equal(own + 2, own + 2 + routing.topk, routing.places.data() + row * routing.topk));
                }
            };
            for (const LaunchShape& shape : kShapes) {
                for (auto* values : {&places, &sources, &more}) std::fill(values->begin(), values->end(), 9);
                run(shape, [&](const Ctx& ctx) { place_rows(ctx, p); });
                expect_places();
            }
            for (auto* values : {&places, &sources, &more}) std::fill(values->begin(), values->end(), 9);
            EXPECT_EQ(crossdockPlaceRows(&p, nullptr), ncclSuccess) << crossdockGetLastError();
            expect_places();
        }
    }
}

// Rows of a routing with scales by column, and what they are by expert.
struct Spread {
    const Routing& routing;
    uint32_t row_bytes;
    std::vector<uint8_t> rows, expanded;
    std::vector<uint32_t> scales, expanded_scales;
    std::vector<float> weights, expanded_weights;

    Spread(const Routing& of, uint32_t bytes)
        : routing(of), row_bytes(bytes), rows(of.rows * bytes), scales(of.rows * kScales), weights(of.ids.size()) {
        std::mt19937 random(5);
        for (uint8_t& byte : rows) byte = static_cast<uint8_t>(random());
        for (uint32_t& scale : scales) scale = static_cast<uint32_t>(random());
        for (float& weight : weights) weight = static_cast<float>(random());
        clear();
    }
    void clear() {
        expanded.assign(routing.expanded * row_bytes, 9);
        expanded_scales.assign(routing.expanded * kScales, 9);
        expanded_weights.assign(routing.expanded, 9);
    }
    crossdockExpandedRows_t arguments(bool has_zeros) {
        auto r = begin_struct<crossdockExpandedRows_t>();
        r.zeros_in_gaps = has_zeros ? 1 : 0;
        r.places = routing.places.data();
        r.sources = has_zeros ? routing.sources.data() : nullptr;
        r.num_rows = routing.rows;
        r.num_expanded = routing.expanded;
        r.num_topk = routing.topk;
        r.row_bytes = row_bytes;
        r.rows = rows.data();
        r.expanded_rows = expanded.data();
        r.num_scales = kScales;
        r.scales = scales.data();
        r.scale_strides[0] = 1;
        r.scale_strides[1] = routing.rows;
        r.expanded_scales = expanded_scales.data();
        r.expanded_scale_strides[0] = has_zeros ? kScales : 1;
        r.expanded_scale_strides[1] = has_zeros ? 1 : routing.expanded;
        r.weights = weights.data();
        r.expanded_weights = expanded_weights.data();
        return r;
    }
    void expect_right(const crossdockExpandedRows_t& r) const {
        for (uint32_t place = 0; place < routing.expanded; ++place) {
            const int32_t pair = routing.sources[place];
            const uint8_t gap = r.zeros_in_gaps != 0 && pair == -1 ? 0 : 9;
            const uint32_t row = pair < 0 ? 0 : static_cast<uint32_t>(pair) / routing.topk;
            for (uint32_t i = 0; i < row_bytes; ++i) {
                ASSERT_EQ(expanded[place * row_bytes + i], pair < 0 ? gap : rows[row * row_bytes + i])
                    << routing.name() << ", place " << place << ", byte " << i << " of " << row_bytes;
            }
            for (uint32_t i = 0; i < kScales; ++i) {
                const int64_t at = place * r.expanded_scale_strides[0] + i * r.expanded_scale_strides[1];
                ASSERT_EQ(expanded_scales[static_cast<size_t>(at)], pair < 0 ? gap : scales[i * routing.rows + row]);
            }
            ASSERT_EQ(expanded_weights[place], pair < 0 ? gap : weights[static_cast<size_t>(pair)]);
        }
    }
};

TEST(RowsByExpert, RowsScalesAndWeightsComeToTheirPlaces) {
    for (const Routing& routing : routings()) {
        for (const uint32_t row_bytes : {64U, 2080U, 20U, 7U, 1U}) {
            Spread spread(routing, row_bytes);
            for (const bool has_zeros : {false, true}) {
                const crossdockExpandedRows_t arguments = spread.arguments(has_zeros);
                for (const LaunchShape& shape : kShapes) {
                    spread.clear();
                    run(shape, [&](const Ctx& ctx) { expand_rows(ctx, spread.arguments(has_zeros)); });
                    spread.expect_right(arguments);
                }
            }
            spread.clear();
            crossdockExpandedRows_t plain = spread.arguments(true);
            plain.scales = nullptr;
            plain.expanded_scales = nullptr;
            plain.weights = nullptr;
            plain.expanded_weights = nullptr;
            EXPECT_EQ(crossdockExpandRows(&plain, nullptr), ncclSuccess) << crossdockGetLastError();
            EXPECT_EQ(spread.expanded_weights, std::vector<float>(routing.expanded, 9));
        }
    }
}

TEST(RowsByExpert, SumsAreThoseOfColumnsInTheirOrder) {
    for (const Routing& routing : routings()) {
        for (const uint32_t hidden : {8U, 264U, 13U}) {
            std::mt19937 random(7);
            std::vector<uint16_t> rows(routing.expanded * hidden);
            for (uint16_t& value : rows) value = float_to_bf16(static_cast<float>(random() % 2000) / 7.0F - 140.0F);
            // What gaps hold is not read.
            for (uint32_t place = 0; place < routing.expanded; ++place) {
                if (routing.sources[place] < 0) std::fill_n(rows.begin() + place * hidden, hidden, uint16_t{0x7FFF});
            }
            std::vector<float> weights(routing.expanded), expected(routing.rows * hidden, 0.0F);
            for (float& weight : weights) weight = static_cast<float>(random());
            for (uint32_t pair = 0; pair < routing.places.size(); ++pair) {
                const int32_t place = routing.places[pair];
                for (uint32_t i = 0; place >= 0 && i < hidden; ++i) {
                    expected[pair / routing.topk * hidden + i] +=
                        bf16_to_float(rows[static_cast<uint32_t>(place) * hidden + i]);
                }
            }
            for (const bool rounds : {false, true}) {
                std::vector<float> sums(routing.rows * hidden), back(routing.places.size());
                std::vector<uint16_t> rounded(routing.rows * hidden);
                auto r = begin_struct<crossdockReducedRows_t>();
                r.sum_type = rounds ? ncclBfloat16 : ncclFloat32;
                r.places = routing.places.data();
                r.num_rows = routing.rows;
                r.num_expanded = routing.expanded;
                r.num_topk = routing.topk;
                r.hidden = hidden;
                r.rows = rows.data();
                r.sums = rounds ? static_cast<void*>(rounded.data()) : sums.data();
                r.weights = weights.data();
                r.pair_weights = back.data();
                const auto expect_sums = [&] {
                    for (size_t i = 0; i < expected.size(); ++i) {
                        if (rounds) {
                            ASSERT_EQ(rounded[i], float_to_bf16(expected[i])) << routing.name();
                        } else {
                            ASSERT_EQ(sums[i], expected[i]) << routing.name();
                        }
                    }
                    for (size_t i = 0; i < back.size(); ++i) {
                        const int32_t place = routing.places[i];
                        ASSERT_EQ(back[i], place < 0 ? 0.0F : weights[static_cast<size_t>(place)]);
                    }
                };
                for (const LaunchShape& shape : kShapes) {
                    std::fill(back.begin(), back.end(), 9.0F);
                    std::fill(sums.begin(), sums.end(), 9.0F);
                    std::fill(rounded.begin(), rounded.end(), uint16_t{9});
                    run(shape, [&](const Ctx& ctx) { reduce_rows(ctx, r); });
                    expect_sums();
                }
                std::fill(sums.begin(), sums.end(), 9.0F);
                EXPECT_EQ(crossdockReduceRows(&r, nullptr), ncclSuccess) << crossdockGetLastError();
                expect_sums();
            }
        }
    }
}

template <typename Struct>
testing::AssertionResult is_refused(ncclResult_t (*function)(const Struct*, cudaStream_t), Struct arguments,
                                    const char* message, void (*change)(Struct&)) {
    change(arguments);
    if (function(&arguments, nullptr) != ncclInvalidArgument) return testing::AssertionFailure() << "not refused";
    if (std::strstr(crossdockGetLastError(), message) != nullptr) return testing::AssertionSuccess();
    return testing::AssertionFailure() << crossdockGetLastError();
}

// Garbage in ids, counts and places causes no access outside of the tensors; sanitizers check that.
TEST(RowsByExpert, GarbageStaysInside) {
    constexpr uint32_t kRows = 23, kTopk = 3, kExperts = 5, kExpanded = 40, kHidden = 16;
    std::mt19937_64 random(12);
    const auto number = [&](uint64_t small) {
        const uint64_t any = random();
        return any % 3 == 0 ? any : any % 3 == 1 ? uint64_t{1} << any / 3 % 64 : any / 3 % small;
    };
    for (int round = 0; round < 60; ++round) {
        std::vector<int64_t> ids(kRows * kTopk);
        for (int64_t& id : ids) id = static_cast<int64_t>(number(kExperts));
        std::vector<int32_t> counts(kExperts), places(kRows * kTopk), sources(kExpanded);
        for (int32_t& count : counts) count = static_cast<int32_t>(number(kRows));
        auto p = begin_struct<crossdockRowPlaces_t>();
        p.id_type = ncclInt64;
        p.ids = ids.data();
        p.num_rows = kRows;
        p.num_topk = kTopk;
        p.num_expanded = kExpanded;
        p.num_experts = kExperts;
        p.counts = counts.data();
        p.alignment = 1 + static_cast<unsigned int>(random() % 8);
        p.places = places.data();
        p.sources = sources.data();
        for (const LaunchShape& shape : kShapes) run(shape, [&](const Ctx& ctx) { place_rows(ctx, p); });
        for (const int32_t place : places) EXPECT_TRUE(place >= -1 && place < static_cast<int32_t>(kExpanded)) << place;

        for (int32_t& place : places) place = static_cast<int32_t>(number(kExpanded));
        for (int32_t& source : sources) source = static_cast<int32_t>(number(3)) - 1;
        std::vector<uint16_t> rows(kRows * kHidden), expanded(kExpanded * kHidden);
        std::vector<float> sums(kRows * kHidden);
        auto spread = begin_struct<crossdockExpandedRows_t>();
        spread.zeros_in_gaps = 1;
        spread.places = places.data();
        spread.sources = sources.data();
        spread.num_rows = kRows;
        spread.num_expanded = kExpanded;
        spread.num_topk = kTopk;
        spread.row_bytes = kHidden * 2;
        spread.rows = rows.data();
        spread.expanded_rows = expanded.data();
        EXPECT_EQ(crossdockExpandRows(&spread, nullptr), ncclSuccess) << crossdockGetLastError();
        auto reduced = begin_struct<crossdockReducedRows_t>();
        reduced.sum_type = ncclFloat32;
        reduced.places = places.data();
        reduced.num_rows = kRows;
        reduced.num_expanded = kExpanded;
        reduced.num_topk = kTopk;
        reduced.hidden = kHidden;
        reduced.rows = expanded.data();
        reduced.sums = sums.data();
        EXPECT_EQ(crossdockReduceRows(&reduced, nullptr), ncclSuccess) << crossdockGetLastError();
    }
}

TEST(RowsByExpert, WrongArgumentsAreRefusedWithMessages) {
    const Routing routing(4, 2, 3, 1, 0);
    std::vector<int32_t> places(routing.places.size()), sources(routing.sources.size());
    auto p = begin_struct<crossdockRowPlaces_t>();
    p.id_type = ncclInt64;
    p.ids = routing.ids.data();
    p.num_rows = 4;
    p.num_topk = 2;
    p.num_expanded = routing.expanded;
    p.num_experts = 3;
    p.counts = routing.counts.data();
    p.alignment = 1;
    p.places = places.data();
    p.sources = sources.data();
    ASSERT_EQ(crossdockPlaceRows(&p, nullptr), ncclSuccess) << crossdockGetLastError();
    const auto place = [&](const char* message, void (*change)(crossdockRowPlaces_t&)) {
        return is_refused(&crossdockPlaceRows, p, message, change);
    };
    EXPECT_TRUE(place("places->size is 8", [](auto& a) { a.size = 8; }));
    EXPECT_TRUE(place("device is -2, allowed", [](auto& a) { a.device = -2; }));
    EXPECT_TRUE(place("id_type is 7, allowed: ncclInt32", [](auto& a) { a.id_type = ncclFloat32; }));
    EXPECT_TRUE(place("num_topk is 65537, allowed: 0..65536", [](auto& a) { a.num_topk = 65537; }));
    EXPECT_TRUE(place("num_rows is 1073741824, allowed: 0..1073741823", [](auto& a) { a.num_rows = 1U << 30; }));
    EXPECT_TRUE(
        place("num_expanded is 2147483648, allowed: 0..2147483647", [](auto& a) { a.num_expanded = 1U << 31; }));
    EXPECT_TRUE(place("num_experts is 0, allowed: 1..32768", [](auto& a) { a.num_experts = 0; }));
    EXPECT_TRUE(place("alignment is 0, allowed: 1..", [](auto& a) { a.alignment = 0; }));
    EXPECT_TRUE(place("ids is NULL", [](auto& a) { a.ids = nullptr; }));
    EXPECT_TRUE(place("counts is NULL", [](auto& a) { a.counts = nullptr; }));
    EXPECT_TRUE(place("places is NULL", [](auto& a) { a.places = nullptr; }));
    EXPECT_TRUE(place("sources is NULL", [](auto& a) { a.sources = nullptr; }));

    Spread spread(routing, 6);
    const auto expand = [&](const char* message, void (*change)(crossdockExpandedRows_t&)) {
        return is_refused(&crossdockExpandRows, spread.arguments(true), message, change);
    };
    EXPECT_TRUE(expand("rows->magic is", [](auto& a) { a.magic = 8; }));
    EXPECT_TRUE(expand("device is -2, allowed", [](auto& a) { a.device = -2; }));
    EXPECT_TRUE(expand("num_rows is 1073741824", [](auto& a) { a.num_rows = 1U << 30; }));
    EXPECT_TRUE(expand("row_bytes is 2147483648, allowed: 0..", [](auto& a) { a.row_bytes = 1U << 31; }));
    EXPECT_TRUE(expand("places is NULL", [](auto& a) { a.places = nullptr; }));
    EXPECT_TRUE(expand("sources is NULL", [](auto& a) { a.sources = nullptr; }));
    EXPECT_TRUE(expand("rows is NULL", [](auto& a) { a.rows = nullptr; }));
    EXPECT_TRUE(expand("expanded_rows is NULL", [](auto& a) { a.expanded_rows = nullptr; }));
    EXPECT_TRUE(expand("scales is NULL", [](auto& a) { a.scales = nullptr; }));
    EXPECT_TRUE(expand("expanded_scales is NULL", [](auto& a) { a.expanded_scales = nullptr; }));
    EXPECT_TRUE(expand("weights is NULL", [](auto& a) { a.weights = nullptr; }));
    EXPECT_TRUE(expand("expanded_weights is NULL", [](auto& a) { a.expanded_weights = nullptr; }));

    std::vector<float> sums(4 * 8), back(routing.places.size());
    const std::vector<uint16_t> rows(routing.expanded * 8);
    auto r = begin_struct<crossdockReducedRows_t>();
    r.sum_type = ncclFloat32;
    r.places = routing.places.data();
    r.num_rows = 4;
    r.num_expanded = routing.expanded;
    r.num_topk = 2;
    r.hidden = 8;
    r.rows = rows.data();
    r.sums = sums.data();
    r.weights = spread.expanded_weights.data();
    r.pair_weights = back.data();
    const auto reduce = [&](const char* message, void (*change)(crossdockReducedRows_t&)) {
        return is_refused(&crossdockReduceRows, r, message, change);
    };
    EXPECT_TRUE(reduce("rows->size is 8", [](auto& a) { a.size = 8; }));
    EXPECT_TRUE(reduce("device is -2, allowed", [](auto& a) { a.device = -2; }));
    EXPECT_TRUE(reduce("sum_type is 6, allowed: ncclFloat32 (7)", [](auto& a) { a.sum_type = ncclFloat16; }));
    EXPECT_TRUE(reduce("num_expanded is 2147483648", [](auto& a) { a.num_expanded = 1U << 31; }));
    EXPECT_TRUE(reduce("hidden is 1073741824, allowed: 0..1073741823", [](auto& a) { a.hidden = 1U << 30; }));
    EXPECT_TRUE(reduce("places is NULL", [](auto& a) { a.places = nullptr; }));
    EXPECT_TRUE(reduce("rows is NULL", [](auto& a) { a.rows = nullptr; }));
    EXPECT_TRUE(reduce("sums is NULL", [](auto& a) { a.sums = nullptr; }));
    EXPECT_TRUE(reduce("weights is NULL", [](auto& a) { a.weights = nullptr; }));
    EXPECT_TRUE(reduce("pair_weights is NULL", [](auto& a) { a.pair_weights = nullptr; }));
}

}  // namespace
}  // namespace crossdock
