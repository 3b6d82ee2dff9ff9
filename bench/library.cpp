// SPDX-License-Identifier: Apache-2.0
#include "bench/library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <stdexcept>

namespace crossdock::bench {
namespace {

template <class Function>
void resolve(void* library, const std::string& path, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
        throw std::runtime_error(fmt::format("--library: {} has no function {}", path, name));
    }
}

template <class Function>
void resolve_optional(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

void EpLibrary::check(ncclResult_t result, const char* call) const {
    if (result == ncclSuccess) {
        return;
    }
    const char* message = get_last_error != nullptr ? get_last_error() : "";
    throw std::runtime_error(
        fmt::format("{}: {} failed with {}{}{}", name, call, static_cast<int>(result), *message ? ": " : "", message));
}

EpLibrary own_library() {
    return {"crossdock",
            ncclEpGetVersion,
            ncclEpCreateGroup,
            ncclEpGroupDestroy,
            ncclEpInitHandle,
            ncclEpUpdateHandle,
            ncclEpHandleDestroy,
            ncclEpDispatch,
            ncclEpCombine,
            ncclEpComplete,
            crossdockGetLastError,
            crossdockCommInitAll,
            crossdockGetUniqueId,
            crossdockCommInitRank,
            crossdockCommDestroy,
            crossdockMemAlloc,
            crossdockMemFree,
            crossdockCommWindowRegister,
            crossdockCommWindowDeregister,
            crossdockGroupMemory,
            crossdockCreateGroup,
            crossdockHandleSetSums,
            crossdockElasticDispatch,
            crossdockElasticCombine};
}

EpLibrary open_library(const std::string& path) {
    void* opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) {
        throw std::runtime_error(fmt::format("--library: {}", dlerror()));
    }
    EpLibrary library{};
    library.name = path.substr(path.find_last_of('/') + 1);
    resolve(opened, path, "ncclEpGetVersion", library.get_version);
    resolve(opened, path, "ncclEpCreateGroup", library.create_group);
    resolve(opened, path, "ncclEpGroupDestroy", library.group_destroy);
    resolve(opened, path, "ncclEpInitHandle", library.init_handle);
    resolve(opened, path, "ncclEpUpdateHandle", library.update_handle);
    resolve(opened, path, "ncclEpHandleDestroy", library.handle_destroy);
    resolve(opened, path, "ncclEpDispatch", library.dispatch);
    resolve(opened, path, "ncclEpCombine", library.combine);
    resolve(opened, path, "ncclEpComplete", library.complete);
    resolve_optional(opened, "crossdockGetLastError", library.get_last_error);
    resolve_optional(opened, "crossdockCommInitAll", library.comm_init_all);
    resolve_optional(opened, "crossdockGetUniqueId", library.get_unique_id);
    resolve_optional(opened, "crossdockCommInitRank", library.comm_init_rank);
    resolve_optional(opened, "crossdockCommDestroy", library.comm_destroy);
    resolve_optional(opened, "crossdockMemAlloc", library.mem_alloc);
    resolve_optional(opened, "crossdockMemFree", library.mem_free);
    resolve_optional(opened, "crossdockCommWindowRegister", library.window_register);
    resolve_optional(opened, "crossdockCommWindowDeregister", library.window_deregister);
    resolve_optional(opened, "crossdockGroupMemory", library.group_memory);
    resolve_optional(opened, "crossdockCreateGroup", library.create_group_with_options);
    resolve_optional(opened, "crossdockHandleSetSums", library.set_sums);
    resolve_optional(opened, "crossdockElasticDispatch", library.elastic_dispatch);
    resolve_optional(opened, "crossdockElasticCombine", library.elastic_combine);
    return library;
}

}  // namespace crossdock::bench
