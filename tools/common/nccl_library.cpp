// SPDX-License-Identifier: Apache-2.0
#include "tools/common/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <stdexcept>

namespace crossdock::tools {
namespace {

template <class Function>
void resolve(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
        throw std::runtime_error(fmt::format("the NCCL found here has no {}: 2.30.4 or newer is needed", name));
    }
}

NcclLibrary open_nccl() {
    const char* named = std::getenv("CROSSDOCK_NCCL_LIBRARY");
    const char* path = named != nullptr && *named != '\0' ? named : "libnccl.so.2";
    void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
        throw std::runtime_error(
            fmt::format("NCCL cannot be opened: {} (CROSSDOCK_NCCL_LIBRARY may name it)", dlerror()));
    }
    NcclLibrary nccl{};
    resolve(library, "ncclGetErrorString", nccl.get_error_string);
    resolve(library, "ncclGetVersion", nccl.get_version);
    resolve(library, "ncclGetUniqueId", nccl.get_unique_id);
    resolve(library, "ncclCommInitRank", nccl.comm_init_rank);
    resolve(library, "ncclCommDestroy", nccl.comm_destroy);
    resolve(library, "ncclMemAlloc", nccl.mem_alloc);
    resolve(library, "ncclMemFree", nccl.mem_free);
    resolve(library, "ncclCommWindowRegister", nccl.window_register);
    resolve(library, "ncclCommWindowDeregister", nccl.window_deregister);
    resolve(library, "ncclGetLsaDevicePointer", nccl.get_lsa_device_pointer);
    return nccl;
}

}  // namespace

const NcclLibrary& nccl_library() {
    static const NcclLibrary nccl = open_nccl();
    return nccl;
}

void check_nccl(ncclResult_t result, const char* call) {
    if (result != ncclSuccess) {
        throw std::runtime_error(fmt::format("{} failed: {}", call, nccl_library().get_error_string(result)));
    }
}

void check_cuda(cudaError_t result, const char* call) {
    if (result != cudaSuccess) {
        throw std::runtime_error(fmt::format("{} failed: {}", call, cudaGetErrorString(result)));
    }
}

}  // namespace crossdock::tools
