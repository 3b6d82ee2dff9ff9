/* SPDX-License-Identifier: Apache-2.0
 * The smallest program on an installed tree: the library answers, and it is the one that the header belongs to. */
#include <crossdock.h>
#include <nccl_ep.h>

int main(void) {
    int version = 0;
    if (ncclEpGetVersion(&version) != ncclSuccess || version != NCCL_EP_VERSION_CODE) return 1;
    if (crossdockGetVersion(&version) != ncclSuccess || version < 300) return 1;
    if (ncclEpGetVersion(NULL) != ncclInvalidArgument || crossdockGetLastError()[0] == '\0') return 1;
    return 0;
}
