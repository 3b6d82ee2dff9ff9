// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/nccl_api.h"

#include <dlfcn.h>

#include <cstdlib>

namespace crossdock {
namespace {

constexpr const char* kLibraryVariable = "CROSSDOCK_NCCL_LIBRARY";
constexpr const char* kLibraryName = "libnccl.so.2";

void* open_library() {
    if (dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr) return RTLD_DEFAULT;
    // Loaded, but with local scope, as Python's extension modules are.
    if (void* library = dlopen(kLibraryName, RTLD_NOW | RTLD_NOLOAD)) return library;
    const char* named = std::getenv(kLibraryVariable);
    const bool is_named = named != nullptr && *named != '\0';
    void* library = dlopen(is_named ? named : kLibraryName, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = dlerror();
        fail(ncclInvalidUsage,
             "no NCCL: none is loaded in this process, {} is {}, and opening it failed ({}). A communicator that is "
             "not of crossdock.h needs NCCL {} or newer",
             kLibraryVariable, is_named ? named : "not set (so libnccl.so.2)",
             reason != nullptr ? reason : "no reason given", nccl_version_text(kMinNcclVersion));
    }
    return library;
}

NcclApi load() {
    void* library = open_library();
    NcclApi api;
    api.file = "a library of unknown name";
    const auto resolve = [&](auto& function, const char* name) {
        void* symbol = dlsym(library, name);
        require(symbol != nullptr, ncclInvalidUsage, "{} lacks {}: it is no NCCL {} or newer", api.file, name,
                nccl_version_text(kMinNcclVersion));
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };

    // Check the version first: in older libraries, functions of the same name take other structs.
    resolve(api.ncclGetVersion, "ncclGetVersion");
    Dl_info info = {};
    const int found = dladdr(reinterpret_cast<void*>(api.ncclGetVersion), &info);
    if (found != 0 && info.dli_fname != nullptr) api.file = info.dli_fname;
    const ncclResult_t result = api.ncclGetVersion(&api.version);
    require(result == ncclSuccess, ncclInvalidUsage, "{}: ncclGetVersion failed with code {}", api.file, int{result});
    require(api.version >= kMinNcclVersion, ncclInvalidUsage,
            "NCCL {} ({}) is too old, {} or newer is needed: install it, and make the program load it "
            "(LD_LIBRARY_PATH, or the file's name in {})",
            nccl_version_text(api.version), api.file, nccl_version_text(kMinNcclVersion), kLibraryVariable);

#define CROSSDOCK_RESOLVE(name) resolve(api.name, #name);
    CROSSDOCK_NCCL_FUNCTIONS(CROSSDOCK_RESOLVE)
#undef CROSSDOCK_RESOLVE
    return api;
}

}  // namespace

const NcclApi& nccl_api() {
    static const NcclApi api = load();
    return api;
}

void NcclApi::check(ncclResult_t result, ncclComm_t comm, const char* call) const {
    if (result == ncclSuccess) return;
    const char* detail = ncclGetLastError(comm);
    const bool has_detail = detail != nullptr && *detail != '\0';
    fail(result, "{} failed: {}{}{}", call, ncclGetErrorString(result), has_detail ? ": " : "",
         has_detail ? detail : "");
}

void NcclApi::complete(ncclResult_t result, ncclComm_t comm, const char* call, Deadline deadline) const {
    while (result == ncclInProgress && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        check(ncclCommGetAsyncError(comm, &result), comm, "ncclCommGetAsyncError");
    }
    check(result, comm, call);
}

std::string nccl_version_text(int version) {
    // Up to 2.8 the code had one digit for the minor version.
    if (version < 10000) return fmt::format("{}.{}.{}", version / 1000, version / 100 % 10, version % 100);
    return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace crossdock
