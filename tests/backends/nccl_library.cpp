// SPDX-License-Identifier: Apache-2.0
#include "nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace crossdock::testing {
namespace {

NcclLibrary open_library() {
    const char* named = std::getenv("CROSSDOCK_NCCL_LIBRARY");
    const char* file = named != nullptr && *named != '\0' ? named : "libnccl.so.2";
    // Global, so that the library under test finds the same NCCL.
    void* library = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    const auto resolve = [&](auto& function, const char* name) {
        void* symbol = dlsym(library, name);
        if (symbol == nullptr) throw std::runtime_error(std::string(file) + " has no " + name);
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    NcclLibrary nccl;
    resolve(nccl.get_unique_id, "ncclGetUniqueId");
    resolve(nccl.comm_init_rank, "ncclCommInitRank");
    resolve(nccl.comm_destroy, "ncclCommDestroy");
    resolve(nccl.mem_alloc, "ncclMemAlloc");
    resolve(nccl.mem_free, "ncclMemFree");
    resolve(nccl.window_register, "ncclCommWindowRegister");
    resolve(nccl.window_deregister, "ncclCommWindowDeregister");
    resolve(nccl.get_last_error, "ncclGetLastError");
    return nccl;
}

}  // namespace

const NcclLibrary& nccl_library() {
    static const NcclLibrary instance = open_library();
    return instance;
}

}  // namespace crossdock::testing
