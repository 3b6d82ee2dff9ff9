// SPDX-License-Identifier: Apache-2.0
#include "tools/common/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
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
    resolve(library, "ncclCommQueryProperties", nccl.comm_query_properties);
    return nccl;
}

}  // namespace

const NcclLibrary& nccl_library() {
    static const NcclLibrary nccl = open_nccl();
    return nccl;
}

int lsa_team_size(ncclComm_t comm, int num_ranks) {
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    int version = 0;
    check_nccl(nccl_library().get_version(&version), "ncclGetVersion");
    properties.version = static_cast<unsigned>(std::min(NCCL_VERSION_CODE, version));  // a newer one would be refused
    check_nccl(nccl_library().comm_query_properties(comm, &properties), "ncclCommQueryProperties");
    return num_ranks / std::max(properties.nLsaTeams, 1);
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
