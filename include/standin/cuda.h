// SPDX-License-Identifier: Apache-2.0
//
// Stand-in for CUDA's headers where no CUDA toolkit is installed: just the types and values that nccl_ep.h and its
// callers name. The spellings are CUDA's own, so that objects compiled with either link with each other. A program
// that uses CUDA itself puts the real header's folder first on the include path.
#ifndef CROSSDOCK_STANDIN_CUDA_H_
#define CROSSDOCK_STANDIN_CUDA_H_

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* CUstream;
typedef struct CUstream_st* cudaStream_t;

// The results that an allocator hook may return, with CUDA's values.
enum cudaError { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorUnknown = 999 };
typedef enum cudaError cudaError_t;

#ifdef __cplusplus
}
#endif

#endif  // CROSSDOCK_STANDIN_CUDA_H_
