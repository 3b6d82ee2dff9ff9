// SPDX-License-Identifier: Apache-2.0
// Prints the table of sizes in docs/protocol.md from the one description of the arena that hosts and kernels use:
//     g++ -std=c++20 -Isrc docs/arena_sizes.cpp -o arena_sizes && ./arena_sizes
// Another shape: ./arena_sizes RANKS EXPERTS TOKENS ROW_BYTES TOPK CELLS_PER_TOKEN BUFFERS
#include <cstdio>
#include <cstdlib>

#include "kernels/ll/handle_memory.h"

using crossdock::LlArenaLayout;
using crossdock::LlGeometry;
using crossdock::LlHandleLayout;

static void print_part(const char* name, const char* contents, uint64_t bytes) {
    std::printf("| %s | %s | %llu |\n", name, contents, static_cast<unsigned long long>(bytes));
}

static void print_arena(const LlArenaLayout& arena, uint32_t num_buffers) {
    const crossdock::LlOffsets& parts = arena.offsets;
    std::printf("| part | contents | bytes |\n|---|---|---:|\n");
    print_part("entered", "u64 [ranks]", arena.barrier.offset - parts.entered.offset);
    print_part("barrier", "u64 [2][ranks]", parts.buffers - arena.barrier.offset);
    print_part("entries", "u128 [ranks]", parts.counts.offset - parts.entries.offset);
    print_part("counts", "u64 [ranks][1+L]", parts.row_flags.offset - parts.counts.offset);
    print_part("row flags", "u64 [slots or cells]", parts.headers.offset - parts.row_flags.offset);
    print_part("headers", "u128 [slots][1+K]", parts.weights.offset - parts.headers.offset);
    print_part("weights", "u128 [slots][K/2]", parts.rows.offset - parts.weights.offset);
    print_part("rows", "slots [ranks][M], or cells", parts.buffer_bytes - parts.rows.offset);
    char buffers[32];
    std::snprintf(buffers, sizeof(buffers), "%u buffers of %llu", num_buffers,
                  static_cast<unsigned long long>(parts.buffer_bytes));
    print_part("arena", buffers, arena.bytes);
}

int main(int argc, char** argv) {
    uint32_t shape[7] = {8, 256, 128, 2 * 7168, 8, 8, crossdock::kNumBuffers};
    for (int i = 1; i < argc && i <= 7; ++i) shape[i - 1] = static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10));
    // As on GPUs: all rows may be LL128 rows.
    const LlGeometry geometry{.num_ranks = shape[0],
                              .num_experts = shape[1],
                              .max_tokens = shape[2],
                              .row_capacity = shape[3],
                              .topk = static_cast<uint16_t>(shape[4]),
                              .has_several_teams = false,
                              .cells_per_token = shape[5],
                              .num_buffers = shape[6],
                              .ll128_tokens = shape[2]};
    const LlHandleLayout handle = LlHandleLayout::of(geometry.num_ranks, geometry.max_tokens, geometry.topk, false);
    print_arena(LlArenaLayout::of(geometry), geometry.num_buffers);
    std::printf("\nslot or cell %llu bytes; a handle %llu bytes\n",
                static_cast<unsigned long long>(geometry.row_stride()), static_cast<unsigned long long>(handle.bytes));
}
