// SPDX-License-Identifier: Apache-2.0
// What kernels call (crossdock/device/entry.hpp): CUDA's vocabulary.
#include "crossdock/device/entry.hpp"

#include <exception>

#include "core/error.h"
#include "device_api/kernel_thread.h"

using namespace crossdock;
using device_api::KernelThread;

void* crossdockDynamicShared() { return KernelThread::current().dynamic_shared(); }
void crossdockSyncBlock() { KernelThread::current().sync_block(); }
void crossdockSyncLanes(unsigned mask) { KernelThread::current().sync_lanes(mask); }
void crossdockSyncNamed(int number, int count) { KernelThread::current().sync_named(number, count); }
void crossdockExchange(unsigned mask, const void* own, size_t bytes, void* all) {
    KernelThread::current().exchange(mask, own, bytes, static_cast<std::byte*>(all));
}
void* crossdockBlockScratch(int number) { return KernelThread::current().scratch(static_cast<size_t>(number) % 16); }
unsigned crossdockActiveMask() { return KernelThread::current().active_mask(); }

void crossdockFenceMemory(crossdockFence) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    KernelThread& thread = KernelThread::current();
    if (thread.launch().simulated == nullptr) return;
    thread.clock.join(thread.pending);
    thread.pending = {};
    thread.fenced = thread.clock;
    thread.tick();
}

void crossdockBeforeAtomic(const void* address, size_t, bool writes, bool releases) {
    KernelThread* thread = KernelThread::current_or_null();
    if (thread == nullptr || !writes) return;
    if (thread->launch().simulated == nullptr) return;
    thread->scheduling_point();
    device_api::Clock& told = thread->launch().simulated->races().atomics[address];
    told.join(releases ? thread->clock : thread->fenced);
    if (releases) thread->tick();
}

void crossdockAfterAtomic(const void* address, bool acquires, bool is_poll) {
    KernelThread* thread = KernelThread::current_or_null();
    if (thread == nullptr) return;
    if (thread->launch().simulated != nullptr) {
        const device_api::Clock& told = thread->launch().simulated->races().atomics[address];
        (acquires ? thread->clock : thread->pending).join(told);
    }
    is_poll ? thread->poll(0) : thread->wrote();
}

void crossdockPause(uint64_t nanoseconds) {
    KernelThread& thread = KernelThread::current();
    thread.poll(thread.now_ns() + nanoseconds + 1);
}

uint64_t crossdockClock() { return KernelThread::current().now_ns(); }

void crossdockTrap(const char* message, crossdockWhere where) {
    fail(ncclInternalError, "{}: {} at {}", KernelThread::current().name(), message,
         device_api::RaceDetector::name(where));
}

void crossdockAccess(const void* address, size_t bytes, bool is_write, const void* instruction) {
    const KernelThread* thread = KernelThread::current_or_null();
    if (thread == nullptr || thread->launch().simulated == nullptr) return;
    thread->launch().simulated->races().thread_accesses(thread->who(), thread->number, thread->clock, address, bytes,
                                                        is_write, instruction);
}

bool crossdockUnwinding() { return std::uncaught_exceptions() > 0; }
