// SPDX-License-Identifier: Apache-2.0
// Prints the tables of sizes in docs/protocol.md from the one description of the arena that hosts and kernels use:
//     g++ -std=c++20 -Isrc docs/arena_sizes.cpp -o arena_sizes && ./arena_sizes
// Another shape: ./arena_sizes RANKS EXPERTS TOKENS ROW_BYTES TOPK CELLS_PER_TOKEN BUFFERS
#include <cstdio>
#include <cstdlib>

#include "kernels/ll/geometry.h"

using crossdock::LlGeometry;
using crossdock::LlHandleGeometry;

static void print_head(const char* what) {
    std::printf("| %-12s | %-31s | %10s | %10s |\n", what, "contents", "offset", "bytes");
    std::printf("|--------------|---------------------------------|-----------:|-----------:|\n");
}

static void print_part(const char* name, const char* contents, uint64_t begin, uint64_t end) {
    std::printf("| %-12s | %-31s | %10llu | %10llu |\n", name, contents, static_cast<unsigned long long>(begin),
                static_cast<unsigned long long>(end - begin));
}

static void print_arena(const LlGeometry& arena) {
    print_head("arena");
    print_part("entered", "u64 [ranks]", arena.entered_offset(), arena.barrier_offset());
    print_part("barrier", "u64 [2 phases][ranks]", arena.barrier_offset(), arena.buffer_offset(0));
    for (int buffer = 0; buffer < static_cast<int>(arena.num_buffers); ++buffer) {
        char name[16];
        std::snprintf(name, sizeof(name), "buffer %d", buffer);
        print_part(name, "the parts below", arena.buffer_offset(buffer), arena.buffer_offset(buffer + 1));
    }
    print_part("in all", "", 0, arena.arena_bytes());
}

static void print_buffer(const LlGeometry& arena) {
    print_head("buffer");
    print_part("entries", "u128 [ranks]", arena.entries_offset(), arena.counts_offset());
    print_part("counts", "u64 [ranks][1 + local experts]", arena.counts_offset(), arena.row_flags_offset());
    print_part("row flags", "u64 [slots], or [cells]", arena.row_flags_offset(), arena.headers_offset());
    print_part("headers", "u128 [slots][1 + choices]", arena.headers_offset(), arena.weights_offset());
    print_part("weights", "u128 [slots][choices / 2]", arena.weights_offset(), arena.rows_offset());
    print_part("rows", "slots [ranks][tokens], or cells", arena.rows_offset(), arena.buffer_bytes());
}

int main(int argc, char** argv) {
    uint32_t shape[7] = {8, 256, 128, 2 * 7168, 8, 8, crossdock::kNumBuffers};
    for (int i = 1; i < argc && i <= 7; ++i) shape[i - 1] = static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10));
    // As on GPUs: all rows may be lines.
    const LlGeometry arena{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[2]};
    const LlHandleGeometry handle{arena.num_ranks, arena.experts_per_rank(), arena.max_tokens, arena.topk};
    print_arena(arena);
    std::printf("\n");
    print_buffer(arena);
    std::printf("\nslot or cell %llu bytes; a handle %llu bytes\n", static_cast<unsigned long long>(arena.row_stride()),
                static_cast<unsigned long long>(handle.bytes()));
}
