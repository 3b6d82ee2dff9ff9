// SPDX-License-Identifier: Apache-2.0
// Small random kernels and a model of them. A program is a list of steps, executed in order by the ranks that take part
// in a step. A rank whose memory is accessed takes part: it signals that it is ready, and ends the step when the access
// is complete. So each program is correct, and the model's values are right. A planted mistake leaves one thing out.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "run.h"

namespace random_kernel {

constexpr int kMaxRanks = 4;
constexpr int kCells = 8;    // words of 64 bits of a block's part of the window
constexpr int kPart = 512;   // bytes of that part: cells, then VA signals of each rank
constexpr int kMaxPuts = 3;  // of a step
constexpr int kMaxBlocks = 2;

enum Kind {
    kPutWeak,    // `from` puts cells to `to`, each with a weak signal
    kPutStrong,  // the same, with one strong signal for all
    kPutValue,   // the same by values
    kGet,        // `from` gets cells of `to`
    kAllPut,     // every rank puts to the next one, followed by a barrier
    kAllToAll,   // small all-to-alls of every rank
    kReset,      // `to` resets the signal that `from` raises
    kNumKinds,
    kWild  // a call with any arguments: not of correct programs
};
enum Done { kFlush, kFlushAsync, kCounter, kNumDone };
enum Mistake { kNone, kNoWait, kNoFlush, kWeakForAll, kNoGetFlush, kNoFence, kNumMistakes };

struct Step {
    Kind kind;
    Done done;
    bool by_block, uses_va, uses_add;
    int from, to;
    int num_puts;
    int source[kMaxPuts], target[kMaxPuts];
    uint64_t value[kMaxPuts], next_value[kMaxPuts];  // the source's when it is put, and then
    // What the signals and counters have come to: inc, add or VA by `from` at `to`; ready by `to` at `from`.
    uint64_t told, ready, answered, counted;
    Mistake mistake;
};

// ---- The kernel ----

struct Pair {
    uint64_t first, second;
};

// One call per thread. Signals of a context: inc by rank r is r, add is kMaxRanks + r; ready is 2 * kMaxRanks + r.
struct Player {
    const ncclDevComm& comm;
    ncclWindow_t window;
    ncclGin gin;
    ncclCoopCta block;
    ncclTeam world;
    ncclLLA2AHandle handle;
    size_t part;
    uint64_t* cells;

    __device__ Player(const ncclDevComm& devComm, ncclWindow_t win, ncclLLA2AHandle all_to_alls)
        : comm(devComm),
          window(win),
          gin(devComm, static_cast<int>(blockIdx.x)),
          world(ncclTeamWorld(devComm)),
          handle(all_to_alls),
          part(kPart * blockIdx.x),
          cells(static_cast<uint64_t*>(ncclGetLocalPointer(win, part))) {}

    // Lets the block's all-to-alls begin at this epoch, as if there had been earlier ones: NCCL keeps it in the first
    // word of a block's lines, less 2. If it is a late one, every other slot holds what the first ones have left, which
    // is to be gone when epochs begin anew; the others were never used.
    void begin_all_to_alls(uint32_t epoch) {
        auto* words = static_cast<uint32_t*>(ncclGetResourceBufferLocalPointer(comm, handle.bufHandle)) +
                      4 * blockIdx.x * (1 + 2 * handle.nSlots);
        if (threadIdx.x == 0) {
            words[0] = epoch - 2;
            for (uint32_t set = epoch == ~0u ? 1 : 0; epoch > 2 && set < 2; ++set) {
                for (uint32_t slot = 0; slot < handle.nSlots; slot += 2) {
                    std::fill_n(words + 4 * (1 + set * handle.nSlots + slot), 4, 2 + set);
                }
            }
        }
        ncclLsaBarrierSession<ncclCoopCta>(block, comm, ncclTeamTagLsa(), blockIdx.x)
            .sync(block, cuda::memory_order_acq_rel);
    }

    size_t cell(int index) const { return part + 8 * static_cast<size_t>(index); }
    size_t va(int rank) const { return part + 8 * static_cast<size_t>(kCells + rank); }
    static ncclGinSignal_t number(int group, int rank) {
        return static_cast<ncclGinSignal_t>(group * kMaxRanks + rank);
    }

    // Ends with the group's threads together.
    template <typename Body>
    void by(bool by_block, Body body) {
        if (by_block) {
            body(block);
        } else {
            if (threadIdx.x == 0) body(ncclCoopThread());
            block.sync();
        }
    }
    void tell_ready(int peer) {
        if (threadIdx.x == 0) gin.signal(world, peer, ncclGin_WeakSignalInc{number(2, comm.rank)});
    }
    void wait_ready(int peer, uint64_t count) { gin.waitSignal(block, number(2, peer), count); }

    template <typename Coop, typename Counter>
    void put(const Step& step, int i, Coop coop, bool has_signal, bool is_strong, Counter counter) {
        const auto post = [&](auto signal) {
            if (step.kind == kPutValue) {
                gin.putValue(world, step.to, window, cell(step.target[i]), step.value[i], signal, coop);
            } else {
                gin.put(world, step.to, window, cell(step.target[i]), window, cell(step.source[i]), 8, signal, counter,
                        coop);
            }
        };
        const ncclGinSignal_t inc = number(0, comm.rank), add = number(1, comm.rank);
        if (!has_signal) return post(ncclGin_None{});
        if (step.uses_va && is_strong) return post(ncclGin_StrongVASignalInc{window, va(comm.rank)});
        if (step.uses_va) return post(ncclGin_WeakVASignalInc{window, va(comm.rank)});
        if (step.uses_add && is_strong) return post(ncclGin_StrongSignalAdd{add, 3});
        if (step.uses_add) return post(ncclGin_WeakSignalAdd{add, 3});
        if (is_strong) return post(ncclGin_StrongSignalInc{inc});
        post(ncclGin_WeakSignalInc{inc});
    }
    template <typename Coop>
    void flush(const Step& step, int peer, Coop coop) {
        if (step.done == kFlushAsync) {
            ncclGinRequest_t request;
            gin.flushAsync(world, static_cast<uint32_t>(peer), &request, coop);
            gin.wait(request, coop);
        } else {
            gin.flush(coop);
        }
    }
    void store_values(const Step& step, const uint64_t (&values)[kMaxPuts]) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < step.num_puts; ++i) cells[step.source[i]] = values[i];
        }
    }
    void expect(const Step& step, int index, uint64_t value) {
        const uint64_t seen = cells[index];
        if (seen != value && step.mistake == kNone) __trap();
        // Keeps the compiler from removing the load.
        if (seen == 0xdead) cells[kPart / 8 - 1] = 1;
    }

    void puts(const Step& step) {
        const bool is_strong = step.kind == kPutStrong;
        if (comm.rank == step.to) tell_ready(step.from);
        if (comm.rank == step.from) {
            wait_ready(step.to, step.ready);
            if (step.kind != kPutValue) store_values(step, step.value);
            by(step.by_block, [&](auto coop) {
                const bool counts = step.done == kCounter && step.kind != kPutValue;
                for (int i = 0; i < step.num_puts; ++i) {
                    const bool has_signal = !is_strong || i == step.num_puts - 1;
                    const bool puts_strong = is_strong && step.mistake != kWeakForAll;
                    if (counts) {
                        put(step, i, coop, has_signal, puts_strong, ncclGin_WeakCounterInc{0});
                    } else {
                        put(step, i, coop, has_signal, puts_strong, ncclGin_None{});
                    }
                }
                if (step.kind == kPutValue || step.mistake == kNoFlush) return;
                if (counts) {
                    gin.waitCounter(coop, 0, step.counted);
                } else {
                    flush(step, step.to, coop);
                }
            });
            if (step.kind != kPutValue) store_values(step, step.next_value);
        }
        if (comm.rank == step.to) {
            if (step.mistake != kNoWait) {
                if (step.uses_va) {
                    gin.waitSignal(block, window, va(step.from), step.told);
                } else {
                    gin.waitSignal(block, number(step.uses_add ? 1 : 0, step.from), step.told);
                }
            }
            for (int i = 0; i < step.num_puts; ++i) expect(step, step.target[i], step.value[i]);
        }
    }
    void gets(const Step& step) {
        if (comm.rank == step.to) {
            store_values(step, step.value);
            tell_ready(step.from);
            // Its own signal is what the getter answers with.
            wait_ready(step.from, step.answered);
            store_values(step, step.next_value);
        } else if (comm.rank == step.from) {
            wait_ready(step.to, step.ready);
            by(step.by_block, [&](auto coop) {
                for (int i = 0; i < step.num_puts; ++i) {
                    gin.get(world, step.to, window, cell(step.source[i]), window, cell(step.target[i]), 8, coop);
                }
                if (step.mistake != kNoGetFlush) flush(step, step.to, coop);
            });
            for (int i = 0; i < step.num_puts; ++i) expect(step, step.target[i], step.value[i]);
            block.sync();
            tell_ready(step.to);
        }
    }
    void all_put(const Step& step) {
        ncclGinBarrierSession<ncclCoopCta> barrier(block, gin, ncclTeamTagWorld(), blockIdx.x);
        const int next = (comm.rank + 1) % comm.nRanks, previous = (comm.rank + comm.nRanks - 1) % comm.nRanks;
        barrier.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
        by(step.by_block, [&](auto coop) {
            gin.putValue(world, next, window, cell(step.target[0]), step.value[0] + static_cast<uint64_t>(comm.rank),
                         ncclGin_None{}, coop);
        });
        barrier.sync(block, cuda::memory_order_acq_rel,
                     step.mistake == kNoFence ? ncclGinFenceLevel::None : ncclGinFenceLevel::Put);
        expect(step, step.target[0], step.value[0] + static_cast<uint64_t>(previous));
    }
    // In each round every rank of the LSA team sends to each; receivers tell senders and rounds apart.
    void all_to_alls(const Step& step) {
        const ncclTeam lsa = ncclTeamLsa(comm);
        by(step.by_block, [&](auto coop) {
            ncclLLA2ASession<decltype(coop)> session(coop, comm, lsa, handle, blockIdx.x, kMaxRanks);
            for (int round = 0; round < 2 * step.num_puts; ++round) {
                const uint64_t value = step.value[round / 2] + static_cast<uint64_t>(round % 2 * 10);
                const uint64_t own = value + static_cast<uint64_t>(lsa.rank);
                const auto slot_of = [&](int rank) { return (rank + step.source[round / 2]) % kMaxRanks; };
                for (int peer = coop.thread_rank(); peer < lsa.nRanks; peer += coop.size()) {
                    session.send(peer, slot_of(lsa.rank), Pair{own, value + static_cast<uint64_t>(peer)});
                }
                for (int peer = coop.thread_rank(); peer < lsa.nRanks; peer += coop.size()) {
                    const Pair got = session.template recv<Pair>(slot_of(peer));
                    if (got.first != value + static_cast<uint64_t>(peer) || got.second != own) __trap();
                }
                session.endEpoch(coop);
            }
        });
    }
    void reset(const Step& step) {
        if (comm.rank == step.to) {
            if (threadIdx.x == 0) gin.resetSignal(number(0, step.from));
            tell_ready(step.from);
        } else if (comm.rank == step.from) {
            wait_ready(step.to, step.ready);
        }
    }
    // Any arguments: value[0] chooses the call, value[1] and value[2] are operands.
    void wild(const Step& step) {
        if (comm.rank != step.from || threadIdx.x != 0) return;
        const uint64_t a = step.value[1], b = step.value[2];
        const auto peer = static_cast<int>(static_cast<int8_t>(a)), other = static_cast<int>(static_cast<int8_t>(b));
        const size_t near = a >> 8 & 0x1fff;  // of a window of 0x1000 bytes
        const auto index = static_cast<uint32_t>(a >> 32) >> (b & 31);
        const ncclTeam team = {other, static_cast<int8_t>(b >> 8), static_cast<int8_t>(b >> 16)};
        const ncclCoopThread thread;
        ncclGinRequest_t request = {{a, b}};
        switch (step.value[0] % 14) {
            case 0:
                return gin.put(world, peer, window, near, window, b & 0x1fff, a >> 40, ncclGin_WeakSignalInc{index});
            case 1:
                return gin.put(team, peer, window, 0, window, 8, 8);
            case 2:
                return gin.put(world, 0, reinterpret_cast<ncclWindow_t>(a), b, window, 0, 8);
            case 3:
                return gin.put(world, 0, window, b, window, a, b);
            case 4:
                return gin.putValue(world, peer, window, near, b, ncclGin_StrongVASignalInc{window, b & 0x1fff});
            case 5:
                return gin.get(world, peer, window, near, window, b & 0x1fff, a >> 40);
            case 6:
                return gin.get(team, peer, window, a, window, b, 8);
            case 7:
                return gin.signal(team, peer, ncclGin_StrongSignalAdd{index, b});
            case 8:
                return gin.waitCounter(thread, index, 0, other);
            case 9:
                gin.readSignal(window, near, peer);
                return gin.resetSignal(window, b & 0x1fff);
            case 10:
                gin.flushAsync(world, static_cast<uint32_t>(peer), &request);
                return gin.wait(request);
            case 11:
                return gin.wait(request);
            case 12:
                ncclGetLsaPointer(window, near, peer);
                ncclGetPeerPointer(window, near, team, peer);
                return;
            case 13:
                ncclGin(comm, peer).resetCounter(index);
                ncclGinBarrierSession<ncclCoopThread>(thread, gin, ncclTeamTagWorld(), index);
                return;
        }
    }
};

__global__ void play(ncclDevComm comm, ncclWindow_t window, ncclLLA2AHandle handle, uint32_t first_epoch,
                     const std::vector<Step>* programs) {
    Player player(comm, window, handle);
    player.begin_all_to_alls(first_epoch);
    for (const Step& step : programs[blockIdx.x]) {
        switch (step.kind) {
            case kPutWeak:
            case kPutStrong:
            case kPutValue:
                player.puts(step);
                break;
            case kGet:
                player.gets(step);
                break;
            case kAllPut:
                player.all_put(step);
                break;
            case kAllToAll:
                player.all_to_alls(step);
                break;
            case kReset:
                player.reset(step);
                break;
            case kWild:
                player.wild(step);
                break;
            case kNumKinds:
                break;
        }
        __syncthreads();
    }
}

// ---- The model ----

struct Program {
    int num_ranks, num_blocks, num_threads;
    int queue_depth;       // of the proxy
    uint32_t first_epoch;  // of all-to-alls
    uint64_t first_va;     // what VA signals begin with
    std::vector<Step> steps[kMaxBlocks];
    uint64_t cells[kMaxRanks][kMaxBlocks][kCells];  // at the end
    bool has_mistake = false;                       // or wild calls: the model does not know what comes of it
};

// Numbers of a seed, after those that bytes give.
class Random {
  public:
    explicit Random(uint64_t seed, const uint8_t* bytes = nullptr, size_t num_bytes = 0)
        : state_(seed), bytes_(bytes), num_bytes_(num_bytes) {}
    uint64_t next() {
        state_ += 0x9e3779b97f4a7c15u;
        uint64_t value = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9u;
        value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
        return value ^ (value >> 31);
    }
    int below(int bound) {
        if (num_bytes_ == 0) return static_cast<int>(next() % static_cast<uint64_t>(bound));
        --num_bytes_;
        return *bytes_++ % bound;
    }

  private:
    uint64_t state_;
    const uint8_t* bytes_;
    size_t num_bytes_;
};

// Different cells in a row.
inline void draw_cells(Random& random, int (&cells)[kMaxPuts], int first, int count) {
    const int start = random.below(count);
    for (int i = 0; i < kMaxPuts; ++i) cells[i] = first + (start + i) % count;
}

// The program of the numbers. A mistake is in the last step of a fitting kind, if there is one, which ends the
// block's program.
inline Program draw(Random random, Mistake mistake = kNone) {
    Program program = {};
    program.num_ranks = 2 + random.below(kMaxRanks - 1);
    program.num_blocks = 1 + random.below(kMaxBlocks);
    program.num_threads = random.below(2) == 0 ? 1 : 3;
    // Short queues, and counts that are about to wrap around.
    program.queue_depth = 1 << random.below(3);
    program.first_epoch = random.below(2) == 0 ? 2 : ~uint32_t{0} - static_cast<uint32_t>(random.below(4));
    program.first_va = random.below(2) == 0 ? 0 : ~uint64_t{0} - static_cast<uint64_t>(random.below(4));
    uint64_t last_value = 0;
    const auto new_value = [&] { return last_value += 100; };
    for (int b = 0; b < program.num_blocks; ++b) {
        // By whom, at whom.
        uint64_t inc[kMaxRanks][kMaxRanks] = {}, add[kMaxRanks][kMaxRanks] = {}, va[kMaxRanks][kMaxRanks];
        for (auto& by_whom : va) std::fill(std::begin(by_whom), std::end(by_whom), program.first_va);
        uint64_t ready[kMaxRanks][kMaxRanks] = {}, counted[kMaxRanks] = {};
        const int num_steps = 3 + random.below(8);
        for (int i = 0; i < num_steps; ++i) {
            Step step = {};
            step.kind = static_cast<Kind>(random.below(kNumKinds));
            step.done = static_cast<Done>(random.below(kNumDone));
            step.by_block = random.below(2) == 0;
            step.uses_va = random.below(3) == 0;
            step.uses_add = random.below(2) == 0;
            step.from = random.below(program.num_ranks);
            step.to = (step.from + 1 + random.below(program.num_ranks - 1)) % program.num_ranks;
            step.num_puts = 1 + random.below(kMaxPuts);
            // Sources and targets are other cells, since a rank may be both.
            draw_cells(random, step.source, 0, kCells / 2);
            draw_cells(random, step.target, kCells / 2, kCells / 2);
            for (int k = 0; k < kMaxPuts; ++k) step.value[k] = new_value(), step.next_value[k] = new_value();
            auto& cells = program.cells;
            const bool is_put = step.kind == kPutWeak || step.kind == kPutStrong || step.kind == kPutValue;
            if (is_put) {
                step.ready = ++ready[step.to][step.from];
                const uint64_t signals = step.kind == kPutStrong ? 1 : static_cast<uint64_t>(step.num_puts);
                auto& word = step.uses_va ? va : step.uses_add ? add : inc;
                step.told = word[step.from][step.to] += !step.uses_va && step.uses_add ? 3 * signals : signals;
                if (step.kind != kPutValue && step.done == kCounter) {
                    step.counted = counted[step.from] += static_cast<uint64_t>(step.num_puts);
                }
                for (int k = 0; k < step.num_puts; ++k) {
                    if (step.kind != kPutValue) cells[step.from][b][step.source[k]] = step.next_value[k];
                    cells[step.to][b][step.target[k]] = step.value[k];
                }
            } else if (step.kind == kGet) {
                step.ready = ++ready[step.to][step.from];
                step.answered = ++ready[step.from][step.to];
                for (int k = 0; k < step.num_puts; ++k) {
                    cells[step.to][b][step.source[k]] = step.next_value[k];
                    cells[step.from][b][step.target[k]] = step.value[k];
                }
            } else if (step.kind == kAllPut) {
                for (int rank = 0; rank < program.num_ranks; ++rank) {
                    cells[(rank + 1) % program.num_ranks][b][step.target[0]] =
                        step.value[0] + static_cast<uint64_t>(rank);
                }
            } else if (step.kind == kReset) {
                inc[step.from][step.to] = 0;
                step.ready = ++ready[step.to][step.from];
            }
            program.steps[b].push_back(step);
        }
    }
    const auto fits = [&](const Step& step) {
        const bool has_source = step.kind == kPutWeak || step.kind == kPutStrong;
        switch (mistake) {
            case kNoWait:
                return has_source || step.kind == kPutValue;
            case kNoFlush:
                return has_source;
            case kWeakForAll:
                return step.kind == kPutStrong && step.num_puts > 1;
            case kNoGetFlush:
                return step.kind == kGet;
            case kNoFence:
                return step.kind == kAllPut;
            case kNone:
            case kNumMistakes:
                break;
        }
        return false;
    };
    for (auto& steps : program.steps) {
        for (size_t i = steps.size(); i-- > 0 && !program.has_mistake;) {
            if (!fits(steps[i])) continue;
            steps[i].mistake = mistake;
            // Later steps could order by chance what this one does not.
            steps.resize(i + 1);
            program.has_mistake = true;
        }
    }
    return program;
}

inline Program draw(uint64_t seed, Mistake mistake = kNone) { return draw(Random(seed), mistake); }

// One wild call by each block of a rank.
inline Program draw_wild(Random random) {
    Program program = {};
    program.num_ranks = 1 + random.below(3);
    program.num_blocks = 1 + random.below(kMaxBlocks);
    program.num_threads = 1;
    program.first_epoch = 2;
    program.has_mistake = true;
    for (int b = 0; b < program.num_blocks; ++b) {
        Step step = {};
        step.kind = kWild;
        step.from = random.below(program.num_ranks);
        step.value[0] = static_cast<uint64_t>(random.below(256));
        // Often small numbers, which are near what is allowed.
        for (int k = 1; k < 3; ++k) step.value[k] = random.next() >> 8 * random.below(8);
        program.steps[b].push_back(step);
    }
    return program;
}

inline Setup setup_of(const Program& program) {
    std::vector<uint64_t> words(kPart / 8);
    std::fill_n(words.begin() + kCells, kMaxRanks, program.first_va);
    return {.ranks = program.num_ranks,
            .signals = 3 * kMaxRanks,
            .counters = 1,
            .barriers = kMaxBlocks,
            .queue_depth = program.queue_depth,
            .all_to_all_slots = ncclLLA2ACalcSlots(kMaxRanks, sizeof(Pair)),
            .words = words};
}

// Plays it, and compares this rank's cells with the model's.
inline Body body_of(const Program& program) {
    return [&program](TestRank& rank) {
        const ncclResult_t result =
            crossdockLaunch(rank.self.comm, static_cast<unsigned>(program.num_blocks),
                            static_cast<unsigned>(program.num_threads), 0, nullptr, play, rank.comm, rank.window,
                            rank.all_to_all, program.first_epoch, static_cast<const std::vector<Step>*>(program.steps));
        if (result != ncclSuccess || program.has_mistake) return result;
        for (int b = 0; b < program.num_blocks; ++b) {
            const char* part = static_cast<const char*>(rank.memory) + b * kPart;
            if (std::memcmp(part, program.cells[rank.self.rank][b], 8 * kCells) != 0) {
                std::fprintf(stderr, "rank %d, block %d differs from the model\n", rank.self.rank, b);
                return ncclInternalError;
            }
        }
        return ncclSuccess;
    };
}

}  // namespace random_kernel
