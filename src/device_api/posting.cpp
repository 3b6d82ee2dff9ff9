// SPDX-License-Identifier: Apache-2.0
#include "device_api/posting.h"

#include "core/error.h"
#include "device/cpu/remote_memory.h"

namespace crossdock::device_api {

bool is_remote(const DeviceComm& comm, int peer) { return comm.remote() != nullptr && comm.remote()->is_remote(peer); }

void post(KernelThread& thread, const DeviceComm& comm, int context, int peer, const Descriptor& descriptor,
          const Caller& caller) {
    Outbox& outbox = *comm.outbox;
    try {
        if (outbox.try_post(context, peer, descriptor)) return;
    } catch (const Error& error) {
        fail(error.code(), "{}: {}", caller, error.what());
    }
    thread.wait(
        [&] {
            outbox.progress(context);
            return outbox.try_post(context, peer, descriptor);
        },
        [&] {
            return fmt::format("room in the proxy's queue to rank {} for the {} at {}{}", peer, caller.what,
                               RaceDetector::name(caller.where), outbox.state(context));
        });
}

void wait_until_read(KernelThread& thread, const DeviceComm& comm, int context, int peer, uint64_t number,
                     crossdockWhere where) {
    Outbox& outbox = *comm.outbox;
    if (outbox.has_read(context, peer, number)) return;
    thread.wait(
        [&] {
            outbox.progress(context);
            return outbox.has_read(context, peer, number);
        },
        [&] {
            return fmt::format("the sources of {} puts to rank {} of context {}, to be read for the flush at {}{}",
                               number, peer, context, RaceDetector::name(where), outbox.state(context));
        });
}

}  // namespace crossdock::device_api
