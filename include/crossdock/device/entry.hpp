// SPDX-License-Identifier: Apache-2.0
// What the headers of this folder call in the library: the boundary between a program's kernels and the code that runs
// them. Programs do not call it themselves. Functions called by kernels end the kernel by an exception that nobody but
// the library catches; those of the host return a result, with a message for crossdockGetLastError.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl.h"

// A place in the kernel's source. Null file: not known.
struct crossdockWhere {
    const char* file;
    unsigned line;
};

// One thread of a running kernel, as its own code sees it.
struct crossdockThread {
    unsigned thread_idx[3], block_idx[3], block_dim[3], grid_dim[3];
    std::byte* static_shared;  // the block's __shared__ variables while another block runs
};

// A kernel launch. enter: called with the thread whose code runs from now on, and with null when it leaves.
struct crossdockLaunchArguments {
    unsigned grid[3], block[3];
    size_t dynamic_shared_bytes, static_shared_bytes;
    void (*enter)(const crossdockThread*);
    void (*body)(void* context);
    void* context;
};

enum crossdockFence { crossdockFenceBlock, crossdockFenceDevice, crossdockFenceSystem };

// Teams and counts that a kernel reads, and the device communicator behind them.
struct crossdockDevCommView {
    uint64_t id;  // 0: none
    int rank, num_ranks, lsa_rank, lsa_size;
    int num_contexts, num_signals, num_counters;
    int lsa_barriers, rail_gin_barriers, world_gin_barriers, hybrid_barriers;
    uint32_t rail_signal0, world_signal0, hybrid_rail_signal0, hybrid_world_signal0;
    uint32_t lsa_handle, hybrid_lsa_handle, list_lsa_handle;
    bool multimem;
    int gin_type;  // ncclGinType_t
};

// ncclDevCommRequirements; what its lists want is part of the sums.
// Without padding: ranks compare its bytes.
struct crossdockDevCommNeeds {
    int barriers, lsa_barriers, rail_gin_barriers, world_gin_barriers;
    int contexts, signals, counters;
    int queue_depth;
    int connection;                                      // ncclGinConnectionType_t
    int lsa_multimem, no_strong_signals, no_va_signals;  // 0 or 1
    int list_lsa_barriers;
    int ll_a2a_blocks, ll_a2a_slots;
    int max_team;             // with multimem: how many ranks of the LSA team it spans
    uint64_t resource_bytes;  // of the buffers that the list wants; the caller allocates them
    uint64_t bad_alignment;   // of one of them; 0: all are good
};

struct crossdockTeam {
    int num_ranks, rank, stride;
};

enum crossdockSignalKind { crossdockNoSignal, crossdockSignalInc, crossdockSignalAdd };

struct crossdockRemoteAction {
    crossdockSignalKind kind;
    bool is_strong;
    uint32_t signal;
    uint64_t value;
    ncclWindow_t window;  // not null: the signal is the word at offset of the peer's window
    size_t offset;
};

struct crossdockPut {
    uint64_t dev_comm;
    int context;
    crossdockTeam team;
    int peer;
    ncclWindow_t target;  // null: only the signal
    size_t target_offset;
    ncclWindow_t source;  // null: the value
    size_t source_offset;
    uint64_t value;
    size_t bytes;
    crossdockRemoteAction remote;
    bool has_counter;
    uint32_t counter;
    crossdockWhere where;
};

struct crossdockGet {
    uint64_t dev_comm;
    int context;
    crossdockTeam team;
    int peer;
    ncclWindow_t source;  // the peer's
    size_t source_offset;
    ncclWindow_t target;  // the own one
    size_t target_offset;
    size_t bytes;
    crossdockWhere where;
};

// What a wait waits for: a signal or a counter of one context, or a word of a window.
struct crossdockSlot {
    uint64_t dev_comm;
    int context;
    bool is_counter;
    uint32_t index;
    ncclWindow_t window;  // not null: the word at offset of the own window
    size_t offset;
};

enum crossdockPointerKind { crossdockPointerLocal, crossdockPointerLsa, crossdockPointerWorld, crossdockPointerTeam };

struct crossdockBarrierUse {
    uint64_t dev_comm;
    bool is_gin;
    uint32_t handle;  // of the set of barriers
    uint32_t index;
    int num_barriers;
    int leader;  // the first thread of those that use it together
};

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif
extern "C" {

// ---- Of the host ----

ncclResult_t crossdockLaunchKernel(ncclComm_t comm, const crossdockLaunchArguments* arguments);
ncclResult_t crossdockDevCommCreate(ncclComm_t comm, const crossdockDevCommNeeds* needs, crossdockDevCommView* view);
ncclResult_t crossdockDevCommDestroy(ncclComm_t comm, uint64_t id);
// Rank, number of ranks, LSA rank and LSA size; the rest stays 0.
ncclResult_t crossdockDevCommTeams(ncclComm_t comm, crossdockDevCommView* view);

// ---- Of kernels: a block's threads ----

void* crossdockDynamicShared();
void crossdockSyncBlock();
// Every lane of the mask; the same mask in each of them.
void crossdockSyncLanes(unsigned mask);
// count threads of the block, at the barrier of that number (0..15).
void crossdockSyncNamed(int number, int count);
// all[lane] becomes what each lane of the mask gave. bytes: at most 16.
void crossdockExchange(unsigned mask, const void* own, size_t bytes, void* all);
unsigned crossdockActiveMask();
// 16 bytes of the block, for each number in 0..15.
void* crossdockBlockScratch(int number);
void crossdockFenceMemory(crossdockFence scope);
// Before an atomic access to address that releases, and after one that acquires. is_poll: it may be part of a loop that
// waits for others.
void crossdockBeforeAtomic(const void* address, size_t bytes, bool writes, bool releases);
void crossdockAfterAtomic(const void* address, bool acquires, bool is_poll);
void crossdockPause(uint64_t nanoseconds);
uint64_t crossdockClock();
[[noreturn]] void crossdockTrap(const char* message, crossdockWhere where);
// A plain access of the running kernel; instruction: its address.
void crossdockAccess(const void* address, size_t bytes, bool is_write, const void* instruction);

// ---- Of kernels: NCCL's Device API ----

void* crossdockWindowPointer(ncclWindow_t window, size_t offset, crossdockPointerKind kind, crossdockTeam team,
                             int peer, crossdockWhere where);
// The own window that contains the address, and its offset there.
ncclWindow_t crossdockFindWindow(const void* address, size_t* offset, crossdockWhere where);
int crossdockLsaTeamSize();
void crossdockGinOpen(uint64_t dev_comm, int context, crossdockWhere where);
void crossdockGinPut(const crossdockPut* put);
void crossdockGinGet(const crossdockGet* get);
void crossdockGinFlush(uint64_t dev_comm, int context, crossdockWhere where);
// request (two words) stands for what the caller knows to have been posted in the context to the peer. A wait for it
// is a flush of that.
void crossdockGinFlushAsync(uint64_t dev_comm, int context, crossdockTeam team, int peer, uint64_t* request,
                            crossdockWhere where);
void crossdockGinWaitRequest(uint64_t dev_comm, int context, const uint64_t* request, bool acquires,
                             crossdockWhere where);
uint64_t crossdockGinRead(crossdockSlot slot, bool acquires, crossdockWhere where);
void crossdockGinWait(crossdockSlot slot, uint64_t least, int bits, bool acquires, crossdockWhere where);
// The same until crossdockClock() has reached deadline_ns: then false.
bool crossdockGinWaitUntil(crossdockSlot slot, uint64_t least, int bits, bool acquires, uint64_t deadline_ns,
                           crossdockWhere where);
void crossdockGinReset(crossdockSlot slot, crossdockWhere where);
uint64_t* crossdockGinShadow(crossdockSlot slot, crossdockWhere where);

// A session of a barrier begins and ends. All that use it at the same time have the same leader.
void crossdockBarrierEnter(const crossdockBarrierUse* use, crossdockWhere where);
void crossdockBarrierLeave(const crossdockBarrierUse* use);
// The session's part of an LSA barrier: tells peer, waits for peer (both LSA ranks).
void crossdockLsaArrive(const crossdockBarrierUse* use, int peer, bool releases, crossdockWhere where);
void crossdockLsaWait(const crossdockBarrierUse* use, int peer, bool acquires, crossdockWhere where);
// The same until crossdockClock() has reached deadline_ns: then false. Unlike crossdockLsaWait it does not begin the
// next round, so it can be called again.
bool crossdockLsaWaitUntil(const crossdockBarrierUse* use, int peer, bool acquires, uint64_t deadline_ns,
                           crossdockWhere where);
// Whether an exception passes through the calling thread: then destructors do not wait.
bool crossdockUnwinding();
}
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
