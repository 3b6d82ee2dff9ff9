// SPDX-License-Identifier: Apache-2.0
// A line that loaders look for in the file, to compare CUDA majors.
#include <cstdio>

#include "core/log.h"
#include "nccl_ep.h"

#define CROSSDOCK_STRING_OF(x) #x
#define CROSSDOCK_STRING(x) CROSSDOCK_STRING_OF(x)

namespace {

__attribute__((used)) const char kBanner[] = "NCCL EP version " CROSSDOCK_STRING(NCCL_EP_MAJOR) "." CROSSDOCK_STRING(
    NCCL_EP_MINOR) "." CROSSDOCK_STRING(NCCL_EP_PATCH) "+cuda" CROSSDOCK_CUDA_VERSION;

__attribute__((constructor)) void print_banner() {
    if (crossdock::debug_enabled()) std::fprintf(stderr, "%s\n", kBanner);
}

}  // namespace
