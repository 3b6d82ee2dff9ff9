// SPDX-License-Identifier: Apache-2.0
// The functions of NCCL's library that the programs call, to link them where the library is not installed. Nothing here
// is ever called: the programs load the real library.
#define CROSSDOCK_NAME(name) \
    extern "C" void name() {}
CROSSDOCK_NAME(ncclGetUniqueId)
CROSSDOCK_NAME(ncclCommInitRank)
CROSSDOCK_NAME(ncclCommDestroy)
CROSSDOCK_NAME(ncclMemAlloc)
CROSSDOCK_NAME(ncclMemFree)
CROSSDOCK_NAME(ncclCommWindowRegister)
CROSSDOCK_NAME(ncclCommWindowDeregister)
CROSSDOCK_NAME(ncclDevCommCreate)
CROSSDOCK_NAME(ncclDevCommDestroy)
CROSSDOCK_NAME(ncclCommQueryProperties)
CROSSDOCK_NAME(ncclGetLastError)
