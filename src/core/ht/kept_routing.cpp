// SPDX-License-Identifier: Apache-2.0
#include "core/ht/kept_routing.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "core/error.h"
#include "kernels/ht/arguments.h"

namespace crossdock {
namespace {

class Tables {
  public:
    Tables(std::byte* memory, const HtHandleGeometry& geometry, int rank)
        : t_(view_of<HtTables, uint64_t>(memory, geometry)),
          routing_(*t_.routing),
          geometry_(geometry),
          rank_(static_cast<uint32_t>(rank)),
          column_(geometry.column_entries()) {}

    void check(bool expert_major) const {
        for (uint32_t source = 0; source < geometry_.num_ranks; ++source)
            expect(tokens_of(source) <= geometry_.max_tokens, "numbers of tokens");
        expect(tokens_of(rank_) == routing_.num_tokens, "numbers of tokens");
        check_ids();
        check_sent();
        check_received();
        check_experts();
        check_zones(expert_major);
        if (geometry_.teams() > 1) check_teams();
    }

  private:
    static void expect(bool holds, const char* table) {
        require(holds, ncclInvalidUsage,
                "handle_mem has been overwritten: no update leaves such {} in it; call ncclEpUpdateHandle first",
                table);
    }
    uint32_t tokens_of(uint32_t source) const { return t_.source_tokens[source]; }
    // The bits that a chunk's mask may have.
    static uint32_t possible(uint32_t tokens, uint32_t chunk) {
        const uint32_t left = tokens - chunk * kChunkTokens;
        return left < kChunkTokens ? (1u << left) - 1 : ~0u;
    }

    void check_ids() const {
        const auto experts = static_cast<int64_t>(geometry_.num_ranks) * geometry_.experts_per_rank;
        const size_t choices = size_t{routing_.num_tokens} * routing_.topk;
        const auto is_one = [&](int32_t id) { return id >= -1 && id < experts; };
        expect(std::all_of(t_.ids, t_.ids + choices, is_one), "expert ids");
    }

    // Masks of chunks, and how many tokens are marked before each and in all. Nothing is sent to a rank that was lost.
    void check_marks(const uint32_t* masks, const uint32_t* firsts, uint32_t tokens, const char* table) const {
        uint32_t before = 0;
        for (uint32_t chunk = 0; chunk < num_chunks(tokens); ++chunk) {
            const uint32_t end = firsts[chunk + 1];
            const auto marked = static_cast<uint32_t>(std::popcount(masks[chunk]));
            expect((masks[chunk] & ~possible(tokens, chunk)) == 0 && firsts[chunk] == before && end >= before &&
                       end - before <= kChunkTokens && (masks[chunk] == 0 || end - before == marked),
                   table);
            before = end;
        }
        expect(firsts[num_chunks(tokens)] == before, table);
    }
    void check_sent() const {
        const uint64_t most = uint64_t{geometry_.num_ranks} * geometry_.max_tokens;
        for (uint32_t peer = 0; peer < geometry_.num_ranks; ++peer) {
            check_marks(t_.sent_masks + size_t{peer} * t_.chunks, t_.sent_firsts + size_t{peer} * (t_.chunks + 1),
                        routing_.num_tokens, "rows to send");
            expect(t_.bases[peer] <= most, "numbers of first rows");
        }
    }

    // A column: the rows of all sources, or those of one expert, are numbered from 0 on.
    void check_column(uint32_t column, uint32_t num_rows) const {
        uint32_t number = 0;
        for (uint32_t source = 0; source < geometry_.num_ranks; ++source) {
            for (uint32_t chunk = 0; chunk < num_chunks(tokens_of(source)); ++chunk) {
                const size_t at = column * column_ + size_t{source} * t_.chunks + chunk;
                expect((t_.masks[at] & ~possible(tokens_of(source), chunk)) == 0 && t_.firsts[at] == number,
                       "rows to receive");
                number += static_cast<uint32_t>(std::popcount(t_.masks[at]));
            }
        }
        expect(number == num_rows, "numbers of rows");
    }
    void check_received() const {
        check_column(0, routing_.num_rows);
        for (uint32_t expert = 0; expert < geometry_.experts_per_rank; ++expert)
            check_column(1 + expert, t_.expert_rows[expert]);
    }

    // The masks of received rows say the same as each token's experts.
    void check_experts() const {
        std::vector<uint32_t> masks(geometry_.experts_per_rank);
        for (uint32_t source = 0; source < geometry_.num_ranks; ++source) {
            for (uint32_t chunk = 0; chunk < num_chunks(tokens_of(source)); ++chunk) {
                const uint32_t rows = collect_masks(source, chunk, masks);
                const size_t entry = size_t{source} * t_.chunks + chunk;
                bool agree = t_.masks[entry] == rows;
                for (uint32_t expert = 0; expert < geometry_.experts_per_rank; ++expert)
                    agree = agree && t_.masks[(1 + expert) * column_ + entry] == masks[expert];
                expect(agree, "experts of tokens");
            }
        }
    }
    // Of each expert of a chunk's tokens; returns the tokens that have one.
    uint32_t collect_masks(uint32_t source, uint32_t chunk, std::vector<uint32_t>& masks) const {
        std::fill(masks.begin(), masks.end(), 0);
        uint32_t rows = 0;
        const uint32_t first = chunk * kChunkTokens;
        for (uint32_t bit = 0; bit < std::min(kChunkTokens, tokens_of(source) - first); ++bit) {
            const uint64_t* words = t_.bitmaps + (size_t{source} * geometry_.max_tokens + first + bit) * t_.words;
            uint32_t num = 0;
            for (uint32_t w = 0; w < t_.words; ++w) {
                for (uint64_t bits = words[w]; bits != 0; bits &= bits - 1, ++num) {
                    const uint32_t expert = 64 * w + static_cast<uint32_t>(std::countr_zero(bits));
                    expect(expert < geometry_.experts_per_rank, "experts of tokens");
                    masks[expert] |= 1u << bit;
                }
            }
            expect(num <= routing_.topk, "experts of tokens");
            if (num > 0) rows |= 1u << bit;
        }
        return rows;
    }

    void check_zones(bool expert_major) const {
        uint32_t slots = 0;
        for (uint32_t expert = 0; expert < geometry_.experts_per_rank; ++expert) {
            expect(t_.zones[expert] == slots, "first rows of experts");
            slots += static_cast<uint32_t>(align_up(t_.expert_rows[expert], routing_.alignment));
        }
        expect(t_.zones[geometry_.experts_per_rank] == slots, "first rows of experts");
        expect(routing_.total == (expert_major ? slots : routing_.num_rows), "numbers of rows");
    }

    void check_teams() const {
        const uint32_t size = geometry_.lsa_team_size;
        for (uint32_t team = 0; team < geometry_.teams(); ++team) {
            if (team == rank_ / size) continue;
            const uint32_t of_rail_peer = tokens_of(team * size + rank_ % size);
            for (uint32_t route = team * size; route < (team + 1) * size; ++route) {
                check_marks(t_.rail_masks + size_t{route} * t_.chunks, t_.rail_firsts + size_t{route} * (t_.chunks + 1),
                            of_rail_peer, "rows to forward");
            }
            for (const bool comes : {false, true}) {
                const size_t at = (comes ? geometry_.teams() : 0) + team;
                check_marks(t_.crossing_masks + at * t_.chunks, t_.crossing_firsts + at * (t_.chunks + 1),
                            comes ? of_rail_peer : routing_.num_tokens, "rows between teams");
            }
        }
    }

    HtTables t_;
    const HtRouting& routing_;
    HtHandleGeometry geometry_;
    uint32_t rank_;
    uint64_t column_;  // entries
};

}  // namespace

void expect_sound_tables(std::byte* memory, const HtHandleGeometry& geometry, int rank, bool expert_major) {
    Tables(memory, geometry, rank).check(expert_major);
}

}  // namespace crossdock
