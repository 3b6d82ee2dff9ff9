// SPDX-License-Identifier: Apache-2.0
// Prints the tables of sizes in docs/protocol.md from the one description of the arena that hosts and kernels use:
//     g++ -std=c++20 -Isrc docs/arena_sizes.cpp -o arena_sizes && ./arena_sizes
// Another shape: ./arena_sizes RANKS EXPERTS TOKENS ROW_BYTES TOPK CELLS_PER_TOKEN
#include <cstdio>
#include <cstdlib>

#include "kernels/ll/geometry.h"

using crossdock::kNumBuffers;
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
    print_part("credits", "u64 [buffers][ranks]", arena.credits_offset(), arena.barrier_offset());
    print_part("barrier", "u64 [2 phases][ranks]", arena.barrier_offset(), arena.buffer_offset(0));
    for (int buffer = 0; buffer < kNumBuffers; ++buffer) {
        char name[16];
        std::snprintf(name, sizeof(name), "buffer %d", buffer);
        print_part(name, "the parts below", arena.buffer_offset(buffer), arena.buffer_offset(buffer + 1));
    }
    print_part("in all", "", 0, arena.arena_bytes());
}

static void print_buffer(const LlGeometry& arena) {
    print_head("buffer");
    print_part("entries", "u64 [ranks]", arena.entries_offset(), arena.counts_offset());
    print_part("counts", "u64 [ranks][1 + local experts]", arena.counts_offset(), arena.row_flags_offset());
    print_part("row flags", "u64 [slots], or [cells]", arena.row_flags_offset(), arena.weight_flags_offset());
    print_part("weight flags", "u64 [ranks]", arena.weight_flags_offset(), arena.weights_offset());
    print_part("weights", "f32 [ranks][tokens][choices]", arena.weights_offset(), arena.rows_offset());
    print_part("rows", "slots [ranks][tokens], or cells", arena.rows_offset(), arena.buffer_bytes());
}

int main(int argc, char** argv) {
    uint32_t shape[6] = {8, 256, 128, 2 * 7168, 8, 8};
    for (int i = 1; i < argc && i <= 6; ++i) shape[i - 1] = static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10));
    const LlGeometry arena{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
    const LlHandleGeometry handle{arena.num_ranks, arena.experts_per_rank(), arena.max_tokens, arena.topk};
    print_arena(arena);
    std::printf("\n");
    print_buffer(arena);
    std::printf("\nslot %llu bytes, header %u of them; cell %llu bytes; a handle %llu bytes\n",
                static_cast<unsigned long long>(arena.slot_bytes()), crossdock::row_header_bytes(arena.topk),
                static_cast<unsigned long long>(arena.cell_bytes()), static_cast<unsigned long long>(handle.bytes()));
}
