// SPDX-License-Identifier: Apache-2.0
//
// For LD_PRELOAD: operations that return at once after crossdock_leave_out(1), so that what is left of a call's time is
// its caller's. deep_ep_host_cost.py uses it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#include "nccl_ep.h"

static int is_left_out = 0;

void crossdock_leave_out(int leave_out) { is_left_out = leave_out; }

// Python loads the library for itself alone, so that RTLD_NEXT would not find it.
static void find(const char* name, void* function) {
    void* library = dlopen("libnccl_ep.so.0", RTLD_LAZY | RTLD_NOLOAD);
    *(void**)function = library == NULL ? NULL : dlsym(library, name);
}

#define OPERATION(name, parameters, arguments)                    \
    ncclResult_t name parameters {                                \
        static ncclResult_t(*real) parameters = NULL;             \
        if (is_left_out) return ncclSuccess;                      \
        if (real == NULL) find(#name, &real);                     \
        return real == NULL ? ncclInternalError : real arguments; \
    }

OPERATION(ncclEpUpdateHandle,
          (ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* info, cudaStream_t stream),
          (handle, topk_idx, info, stream))
OPERATION(ncclEpDispatch,
          (ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs, const ncclEpDispatchOutputs_t* outputs,
           const ncclEpLayoutInfo_t* info, const ncclEpDispatchConfig_t* config, cudaStream_t stream),
          (handle, inputs, outputs, info, config, stream))
OPERATION(ncclEpCombine,
          (ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs, const ncclEpCombineOutputs_t* outputs,
           const ncclEpCombineConfig_t* config, cudaStream_t stream),
          (handle, inputs, outputs, config, stream))
OPERATION(ncclEpComplete, (ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config, cudaStream_t stream),
          (handle, config, stream))
