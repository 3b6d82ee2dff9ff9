// SPDX-License-Identifier: Apache-2.0
#include "network/ucx_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <type_traits>

#include "core/error.h"

namespace crossdock::network {
namespace {

constexpr const char* kVariable = "CROSSDOCK_UCX_LIBRARY";
constexpr const char* kName = "libucp.so.0";

// Silences UCX's warnings, which it also prints without a problem for us; errors are returned as a status. Not if the
// user has set UCX_LOG_LEVEL, nor for a UCX that the program itself has loaded.
void silence(void* library) {
    if (std::getenv("UCX_LOG_LEVEL") != nullptr) return;
    const auto set = reinterpret_cast<ucs_status_t (*)(const char* name, const char* value)>(
        dlsym(library, "ucs_global_opts_set_value"));
    if (set != nullptr) (void)set("LOG_LEVEL", "fatal");
}

UcxLibrary open_library() {
    const char* named = std::getenv(kVariable);
    const bool is_named = named != nullptr && *named != '\0';
    const char* file = is_named ? named : kName;
    void* loaded = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    const bool is_the_programs = loaded != nullptr;
    void* library = is_the_programs ? loaded : dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = dlerror();
        fail(ncclInvalidUsage, "cannot open UCX: {} is {} ({}): install UCX 1.13 or newer (Debian: libucx0)", kVariable,
             is_named ? named : "not set (so libucp.so.0)", reason != nullptr ? reason : "no reason given");
    }
    UcxLibrary found;
    // dlsym also searches UCX's other libraries, which are dependencies of this one.
    const auto resolve = [&](auto& function, const char* name) {
        void* symbol = dlsym(library, name);
        require(symbol != nullptr, ncclInvalidUsage, "{} lacks {}: UCX 1.13 or newer is needed", file, name);
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
#define CROSSDOCK_UCX_RESOLVE(name) resolve(found.name, #name);
    CROSSDOCK_UCX_FUNCTIONS(CROSSDOCK_UCX_RESOLVE)
#undef CROSSDOCK_UCX_RESOLVE
    if (!is_the_programs) silence(library);
    return found;
}

}  // namespace

const UcxLibrary& ucx() {
    static const UcxLibrary library = open_library();
    return library;
}

}  // namespace crossdock::network
