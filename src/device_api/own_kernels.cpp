// SPDX-License-Identifier: Apache-2.0
#include "device_api/own_kernels.h"

#include "device/cpu/remote_memory.h"
#include "device_api/kernel_thread.h"
#include "fabric/communicator.h"

namespace crossdock::device_api {
namespace {

const SymmetricMemory& memory_of(ncclWindow_t window) { return *reinterpret_cast<const SymmetricMemory*>(window); }

// Null if the peer's memory is mapped here.
cpu::RemoteMemory* way_to(const SymmetricMemory& memory, int peer) {
    return memory.remote != nullptr && memory.remote->is_remote(peer) ? memory.remote : nullptr;
}

void put_data(cpu::Warp& warp, const crossdockPut& put) {
    const SymmetricMemory& target = memory_of(put.target);
    const void* source = &put.value;
    if (put.source != nullptr) source = memory_of(put.source).local + put.source_offset;
    if (cpu::RemoteMemory* remote = way_to(target, put.peer)) {
        remote->put(put.peer, put.target_offset, source, put.bytes);
    } else if (put.source == nullptr) {
        warp.put_value(put.peer, reinterpret_cast<uint64_t*>(target.peers.at(put.peer, put.target_offset)), put.value);
    } else {
        warp.put(put.peer, target.peers.at(put.peer, put.target_offset), source, put.bytes);
    }
}

void raise_signal(cpu::Warp& warp, int peer, const crossdockRemoteAction& signal) {
    const SymmetricMemory& memory = memory_of(signal.window);
    if (cpu::RemoteMemory* remote = way_to(memory, peer)) {
        remote->signal(peer, signal.offset, signal.value);
    } else {
        warp.signal(peer, reinterpret_cast<uint64_t*>(memory.peers.at(peer, signal.offset)), signal.value);
    }
}

}  // namespace

cpu::Warp* own_kernels_warp() { return KernelThread::current_or_null() == nullptr ? cpu::Warp::running() : nullptr; }

void post(cpu::Warp& warp, const crossdockPut& put) {
    if (put.target != nullptr) put_data(warp, put);
    // A put to another host is held back so that its last piece can carry the signal.
    if (put.remote.kind != crossdockNoSignal) raise_signal(warp, put.peer, put.remote);
}

}  // namespace crossdock::device_api
