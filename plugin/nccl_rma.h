// SPDX-License-Identifier: Apache-2.0
// The function tables that NCCL looks up in a plugin for remote memory access, by its binary interface: version 14
// (NCCL 2.30.7 and newer) and version 13 (2.30.3 and newer). NCCL installs no header for them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl.h"

namespace crossdock::plugin {

inline constexpr size_t kHandleBytes = 128;
inline constexpr int kPointerHost = 1;
inline constexpr int kPointerCuda = 2;
inline constexpr uint64_t kFlagOrdered = 1;     // signals live here
inline constexpr uint64_t kFlagNeverReset = 2;  // and only signals write them
inline constexpr uint32_t kSignalIncrement = 1;
inline constexpr uint32_t kSignalAdd = 2;
inline constexpr int kDeviceTypeGinProxy = 2;
inline constexpr int kLogWarn = 2;
inline constexpr int kLogInfo = 3;
inline constexpr unsigned long kLogNetwork = 0x10;

using LogFunction = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

struct NetProperties {
    const char* name;
    const char* pci_path;
    uint64_t guid;
    int pointer_support;
    int registration_is_global;
    int force_flush;
    int speed;  // in Mb/s
    int port;
    float latency;
    int max_comms;
    int max_receives;  // 32 times this many requests of a context and peer may be open
    int device_type;
    int device_version;
    int num_devices;
    int devices[8];
    size_t max_p2p_bytes;
    size_t max_collective_bytes;
    int max_multi_request;
    int16_t rail;
    int16_t plane;
};
static_assert(sizeof(NetProperties) == 128);

struct Config14 {
    int num_contexts;
    int traffic_class;  // newer NCCL versions append fields, which the plugin does not read
};

struct Config13 {
    int num_signals;
    int num_counters;
    int num_contexts;
    int queue_depth;
    int traffic_class;
};

struct DeviceHandle {
    int type;
    int version;
    void* handle;
    size_t size;
    int needs_progress;
};

// Functions with the same arguments in both versions.
using Init = ncclResult_t (*)(void** context, uint64_t comm_id, LogFunction log);
using Devices = ncclResult_t (*)(int* count);
using GetProperties = ncclResult_t (*)(int device, NetProperties* properties);
using Listen = ncclResult_t (*)(void* context, int device, void* handle, void** listener);
using Connect = ncclResult_t (*)(void* context, void* handles[], int num_ranks, int rank, void* listener, void** comm);
using Destroy = ncclResult_t (*)(void* object);
using Deregister = ncclResult_t (*)(void* comm, void* memory);
using Put = ncclResult_t (*)(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                             uint64_t target_offset, void* target, uint32_t rank, void** request);
using Get = ncclResult_t (*)(void* contexts, int context, uint64_t remote_offset, void* remote, size_t bytes,
                             uint64_t local_offset, void* local, uint32_t rank, void** request);
using Flush = ncclResult_t (*)(void* contexts, int context, void* memory, uint32_t rank, void** request);
using Test = ncclResult_t (*)(void* comm, void* request, int* done);
using Progress = ncclResult_t (*)(void* contexts);
using QueryLastError = ncclResult_t (*)(void* contexts, bool* has_error);

struct Rma14 {
    const char* name;
    Init init;
    Devices devices;
    GetProperties get_properties;
    Listen listen;
    Connect connect;
    ncclResult_t (*create_context)(void* comm, Config14* config, void** contexts);
    ncclResult_t (*register_memory)(void* comm, void* data, size_t bytes, int type, uint64_t flags, void** memory);
    ncclResult_t (*register_dma_buf)(void* comm, void* data, size_t bytes, int type, uint64_t offset, int fd,
                                     uint64_t flags, void** memory);
    Deregister deregister_memory;
    Destroy destroy_context;
    Destroy close_comm;
    Destroy close_listen;
    Put put;
    ncclResult_t (*put_signal)(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                               uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                               void* signal_memory, uint64_t value, uint32_t operation, bool is_strong, void** request);
    Get get;
    Flush flush;
    Test test;
    Progress progress;
    QueryLastError query_last_error;
    Destroy finalize;
};

struct Rma13 {
    const char* name;
    Init init;
    Devices devices;
    GetProperties get_properties;
    Listen listen;
    Connect connect;
    ncclResult_t (*create_context)(void* comm, Config13* config, void** contexts, DeviceHandle** device);
    ncclResult_t (*register_memory)(void* comm, void* data, size_t bytes, int type, uint64_t flags, void** memory,
                                    void** device_memory);
    ncclResult_t (*register_dma_buf)(void* comm, void* data, size_t bytes, int type, uint64_t offset, int fd,
                                     uint64_t flags, void** memory, void** device_memory);
    Deregister deregister_memory;
    Destroy destroy_context;
    Destroy close_comm;
    Destroy close_listen;
    Put put;
    ncclResult_t (*put_signal)(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                               uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                               void* signal_memory, uint64_t value, uint32_t operation, void** request);
    Get get;
    Flush flush;
    Test test;
    Progress progress;
    QueryLastError query_last_error;
    Destroy finalize;
};

}  // namespace crossdock::plugin

// The plugin's exports.
extern "C" {
extern const crossdock::plugin::Rma14 ncclRmaPlugin_v14 __attribute__((visibility("default")));
extern const crossdock::plugin::Rma13 ncclRmaPlugin_v13 __attribute__((visibility("default")));
// Number of blocks of contexts that NCCL has created with this plugin in this process and not destroyed. 0 after
// ncclDevCommCreate means that NCCL uses another network.
__attribute__((visibility("default"))) int crossdockRmaPluginContexts(void);
// Copies the last warning of this process, truncated to `bytes` including its 0; empty: none.
__attribute__((visibility("default"))) void crossdockRmaPluginLastError(char* message, size_t bytes);
// The caller promises that from now on only signals write these words of device memory, and that all signals to one
// word come from one rank. So the plugin keeps the values, and a signal need not wait until a word is read. Returns the
// number of communicators of this process that have registered the words. The promise ends when the memory is
// deregistered.
__attribute__((visibility("default"))) int crossdockRmaPluginSignalWords(const void* words, size_t bytes);
}
