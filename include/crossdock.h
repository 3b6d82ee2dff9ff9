/* SPDX-License-Identifier: Apache-2.0
 *
 * crossdock.h: what Crossdock adds to the NCCL EP API of nccl_ep.h, in C.
 *
 *   - communicators for CPUs, passed wherever nccl_ep.h expects an ncclComm_t;
 *   - symmetric memory and windows for them (what ncclMemAlloc and ncclCommWindowRegister are on GPUs);
 *   - the message that explains the last error, and a diagnosis of the last wait that expired;
 *   - options of groups and handles that NVIDIA's structs have no field for;
 *   - elastic operations: dispatch and combine with packed rows;
 *
 * Conventions. Every function returns an ncclResult_t unless said otherwise. It writes its outputs only on success, and
 * leaves a message for crossdockGetLastError() on failure. "InvalidUsage" stands for ncclInvalidUsage, and so on.
 * "Collective": every rank of the communicator calls it, in the same order. "Local": it does not communicate.
 *
 * fork(). As in nccl_ep.h: a child cannot use its parent's communicators either (InvalidUsage).
 *
 * Streams on CPUs. An operation on a CPU communicator has finished when the call returns. Of a send_only operation, the
 * send half has. The stream argument of nccl_ep.h's functions is ignored; pass NULL. "Device memory" is ordinary
 * memory.
 *
 * crossdock/simulation.h has simulated ranks, crossdock/a2sgd.h an average of gradients.
 */
#ifndef CROSSDOCK_H_
#define CROSSDOCK_H_

#include <stddef.h>
#include <stdint.h>

#include "nccl_ep.h"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* ---- Version ---- */

/* Crossdock's own version, major * 10000 + minor * 100 + patch: 300 is 0.3.0. ncclEpGetVersion gives that of NVIDIA's
 * interface. InvalidArgument: version NULL. */
ncclResult_t crossdockGetVersion(int* version);

/* ---- Errors ---- */

/* The message of the calling thread's last failed call of nccl_ep.h or crossdock.h: argument, value, allowed range.
 * Never NULL; empty before the first failure. Owned by the library; valid until the thread's next failed call.
 * Successful calls keep it. */
const char* crossdockGetLastError(void);

/* ---- Interrupting waits ---- */

/* Tells a waiting thread what to do: 0, go on waiting; any other number, end the wait. Called on the waiting thread,
 * and on several threads at once if several wait. It must not throw, and must not call this library. */
typedef int (*crossdockInterruptCheck_t)(void);

/* Sets the check of this process. Every thread calls it about every 50 ms while it waits for other ranks: while it
 * joins, in collective calls, in operations of CPU ranks, and while it destroys a group or communicator.
 *
 * When the check returns a number other than 0, the call ends with RemoteError, whose message says "interrupted". Calls
 * that destroy something go on without waiting, and succeed. A group whose operation was interrupted has failed: later
 * calls say so, and destroying it waits for nobody. Kernels on GPUs are not interrupted.
 *
 * NULL, the default: waits end only with their timeouts. Local. */
ncclResult_t crossdockSetInterruptCheck(crossdockInterruptCheck_t check);

/* ---- CPU communicators ---- */

/* All ranks as threads of this process: comms[0..num_ranks-1] receives one communicator per rank, each to be used by
 * one thread at a time. Local, returns at once. InvalidArgument: comms NULL, num_ranks not in 1..4096. */
ncclResult_t crossdockCommInitAll(ncclComm_t* comms, int num_ranks);

/* Ranks as processes of one host. One process makes the id and passes it to the others by any means, as with
 * ncclGetUniqueId. That process must live until all have joined. Nothing is left behind in the file system, however the
 * processes end.
 *
 * The id takes a file descriptor of this process until it has joined. If it does not join, the descriptor is freed when
 * it calls crossdockReleaseUniqueId, or makes another id after all have joined. */
ncclResult_t crossdockGetUniqueId(ncclUniqueId* id);

/* Frees what this process keeps for an id that it has made. Ranks that have not joined cannot join afterwards. Does
 * nothing if this process keeps nothing. Local. InvalidArgument: an id that was not made by crossdockGetUniqueId. */
ncclResult_t crossdockReleaseUniqueId(ncclUniqueId id);

/* Joins the communicator of the id as rank. Collective and blocking: returns when all num_ranks processes have joined.
 * RemoteError: ranks, which the message names, did not join within CROSSDOCK_JOIN_TIMEOUT_MS (60000). InvalidArgument:
 * rank not in 0..num_ranks-1, an id that was not made by crossdockGetUniqueId, a rank taken twice, num_ranks that
 * differ. */
ncclResult_t crossdockCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank);

/* Ranks as processes of one or several hosts. Ranks of a host share memory and are an LSA team. Others are reached over
 * TCP, or over RDMA if the hosts have UCX and RDMA. docs/deployment.md has more.
 *
 * address: "host:port" of rank 0, or "[...]:port" for an IPv6 address; the same on every rank. Rank 0 listens there
 * until all ranks have joined.
 *
 * Collective and blocking, bounded by CROSSDOCK_JOIN_TIMEOUT_MS like crossdockCommInitRank. Later waits for a rank are
 * bounded and name it, too. Ranks are numbered host by host, with the same number on each host.
 *
 * Environment:
 *   CROSSDOCK_SECRET  if it is set, ranks that do not know it are rejected
 *   CROSSDOCK_JOB     ranks with another value are rejected
 *   CROSSDOCK_HOST    ranks with different values act as if they ran on different hosts, to rehearse on one machine
 *
 * Errors:
 *   InvalidArgument  address is NULL or not "host:port", rank is not in 0..num_ranks-1, a rank is taken twice, or
 *                    num_ranks differ
 *   RemoteError      ranks did not come in time, or had another secret or job. Every rank that rank 0 has met names
 *                    those that never came
 *   SystemError      another process listens at rank 0's address. The message names it if it can be seen
 *   InvalidUsage     hosts have different numbers of ranks; this library was built without the headers of UCX or
 *                    OpenSSL 3; there is no libcrypto.so.3; CROSSDOCK_UCX_LIBRARY names no UCX */
ncclResult_t crossdockCommInitHosts(ncclComm_t* comm, int num_ranks, int rank, const char* address);

/* The same, with rank, number of ranks and address from the environment:
 *   by hand    CROSSDOCK_RANK, CROSSDOCK_NUM_RANKS
 *   torchrun   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT + 1
 *   mpirun     OMPI_COMM_WORLD_RANK and _SIZE, or PMI_RANK and PMI_SIZE
 *   srun       SLURM_PROCID, SLURM_NTASKS, SLURM_STEP_NODELIST
 * CROSSDOCK_ADDRESS is rank 0's host:port and overrides the launcher's. mpirun sets no address, and ranks of one host
 * need none. TORCHELASTIC_RUN_ID, PMIX_NAMESPACE, or SLURM_JOB_ID and SLURM_STEP_ID tell jobs apart, unless
 * CROSSDOCK_JOB is set. InvalidUsage: a variable is missing or contradicts another; the message has its name and
 * value. */
ncclResult_t crossdockCommInitFromEnvironment(ncclComm_t* comm);

/* Frees a CPU communicator. Destroy its groups and windows first; later calls on them fail. Local. */
ncclResult_t crossdockCommDestroy(ncclComm_t comm);

/* Rank and number of ranks; any communicator, CPU or NCCL. */
ncclResult_t crossdockCommUserRank(ncclComm_t comm, int* rank);
ncclResult_t crossdockCommCount(ncclComm_t comm, int* num_ranks);
/* 1 for a CPU communicator, 0 for one of NCCL. */
ncclResult_t crossdockCommIsCpu(ncclComm_t comm, int* is_cpu);

/* Host-side helpers on CPU communicators, for programs that need no other library. all_bytes[r*bytes ...] receives rank
 * r's bytes. Collective and blocking, bounded by CROSSDOCK_JOIN_TIMEOUT_MS: RemoteError names the ranks that did not
 * come. */
ncclResult_t crossdockCommAllGather(ncclComm_t comm, const void* own_bytes, void* all_bytes, size_t bytes);
ncclResult_t crossdockCommBarrier(ncclComm_t comm);

/* ---- Memory and windows of CPU communicators ---- */

/* Zeroed memory that can be registered as a window on every CPU backend, 4096-byte aligned. Local. size 0:
 * InvalidArgument. */
ncclResult_t crossdockMemAlloc(void** memory, size_t size);
ncclResult_t crossdockMemFree(void* memory);

/* Registers [memory, memory + size) as a window. Collective, the same size on every rank. flags: 0. Ranks as threads,
 * and simulated ranks, can register any memory. Processes can register memory within one crossdockMemAlloc allocation.
 * Deregister the window (collective) before you free the memory. InvalidUsage: an NCCL communicator, whose function is
 * ncclCommWindowRegister. */
ncclResult_t crossdockCommWindowRegister(ncclComm_t comm, void* memory, size_t size, ncclWindow_t* window, int flags);
ncclResult_t crossdockCommWindowDeregister(ncclComm_t comm, ncclWindow_t window);

/* ---- Groups and handles ---- */

/* What ncclEpGroupConfig_t has no field for. */
typedef struct {
    unsigned int size;  /* sizeof(crossdockGroupOptions_t) */
    unsigned int magic; /* NCCL_EP_MAGIC */
    int ht_masks;       /* 1: the HT group goes on without ranks that do not answer, see below. 0: it fails */
    int lsa_team_size;  /* ranks in a row that load and store each other's memory; they reach the others through the
                           network. 0: the communicator's LSA teams */
    int invariant;      /* 1: the bits of a combined token depend on its own rows only, see below. 0: they may not */
} crossdockGroupOptions_t;

#define CROSSDOCK_GROUP_OPTIONS_INIT \
    { sizeof(crossdockGroupOptions_t), NCCL_EP_MAGIC, 0, 0, 0 }

/* ncclEpCreateGroup with options; NULL: none. Collective, the same options on every rank.
 * InvalidArgument: group NULL, ht_masks or invariant not 0 or 1, lsa_team_size that does not divide the ranks of the
 * communicator's LSA team, and as ncclEpCreateGroup. InvalidUsage: options that differ between ranks; ht_masks with
 * several LSA teams, or in an LL group (which has config->enable_mask).
 *
 * LSA teams (nodes). With lsa_team_size n, ranks [0, n), [n, 2n), ... form one team each. Results are bitwise the same
 * for every n, except sums of HT: a team adds its rows for a token of another team, rounds the sum to the tokens' type,
 * and sends it as one row; with invariant they are the same, too. The environment's CROSSDOCK_LSA_TEAM_SIZE overrides
 * the option. On one host the network between teams is a copy, so every shape of a cluster can be rehearsed there: 8
 * ranks as 1 x 8, 2 x 4, 4 x 2, 8 x 1.
 *
 * Invariant results (invariant). ncclEpCombine adds up the rows of a token's choices 0 to K - 1 in fp32, in this order,
 * in LL each times its weight, and rounds once. The bits of the result therefore depend on the token's rows, weights
 * and their type, and on nothing else: not on the other tokens, the number of ranks or which of them has an expert, LSA
 * teams, the number of SMs, or GPU or CPU. LL with weights of 1 and HT give the same bits, except that a token which
 * names an expert twice has its row added twice in LL and once in HT. A choice whose row was dropped (budget) or lost
 * (masks) counts as zero, and which ones are does depend on other tokens and ranks. A dispatch copies rows, so the
 * gradient of a combine is invariant, and so is that of a dispatch, which is a combine.
 *   - Layout: expert-major. In flat and rank-major layouts the caller adds up a rank's rows of a token, in an order
 *     that the library does not see.
 *   - What it costs: the row of every choice travels. In LL, ncclEpCombine does that without this option, too
 *     (CROSSDOCK_SUMS_EXACT). In HT, and in elastic combines, a rank otherwise sends one row per token. With 8 choices
 * at random on 4 ranks there are 2.2 times as many rows, on 8 ranks 1.5 times. With top-8, HT's rings take up to 192
 * MiB on a GPU instead of 68. Set config->num_topk: without it they have room for the largest top-k, and take up to 450
 * MiB.
 *   - A combine that is not of this kind ends with InvalidUsage: another layout, the recipe MXFP8 in HT,
 *     CROSSDOCK_SUMS_SENDER.
 *   - An elastic combine (crossdockElasticCombine) adds up in this way, too, without weights, after the biases.
 *   - The environment's NCCL_EP_INVARIANT=1 has the same effect, and CROSSDOCK_SENDER_SUMS then has none.
 *
 * Masks in HT (ht_masks). If a rank is silent for the timeout while another rank waits for it, the waiting rank masks
 * it:
 *   - The asynchronous error becomes 1, and the operation continues. Nothing more is sent to the masked rank or awaited
 *     from it.
 *   - Its rows that an update has already counted read as zeros with weights 0.
 *   - A combine adds, for each token, the masked rank's whole row or nothing.
 *   - From the next update on it has no rows, and own tokens for its experts are dropped
 *     (crossdockHandleDroppedTokens).
 *   - It may still write into windows, if it stopped in the middle of an operation that does so and continues later.
 *     Where its operation reads other ranks' windows, it may read what these have written since, and return. Its next
 *     operation masks them.
 * ncclEpMaskQuery, ncclEpMaskUpdate, ncclEpMaskClean, ncclEpGetAsyncError and ncclEpErrorClear work as in LL groups.
 * The rank's own entry stays 1. After ncclEpMaskClean every handle must be updated before it is used again
 * (InvalidUsage). */
ncclResult_t crossdockCreateGroup(ncclEpGroup_t* group, ncclComm_t comm, const ncclEpGroupConfig_t* config,
                                  const crossdockGroupOptions_t* options);

/* The last wait that expired in this group on this rank. */
typedef struct {
    unsigned int size;     /* in: sizeof(crossdockDiagnosis_t) */
    unsigned int magic;    /* in: NCCL_EP_MAGIC */
    int valid;             /* 0: no wait of this group has expired; the rest is zero */
    int rank;              /* who waited */
    int peer;              /* for whom */
    const char* operation; /* "dispatch", "combine", ...; static storage */
    const char* step;      /* what was awaited, e.g. "row", "counts", "credit"; static storage */
    uint64_t handle;       /* number of the handle within its group, in order of creation, from 1; 0: none */
    uint64_t epoch;        /* the operation's number within the group */
    uint64_t expected;     /* the awaited value ... */
    uint64_t seen;         /* ... and the last one seen. Step "experts" (crossdockHandleSetOverlap): peer is rank; the
                              upper halves of expected and seen are the expert (rank-major: the source rank) and the
                              block. Steps "report" and "refused": the rank that waited for the peer,
                              or refused its number, and reported it. HT: numbers of operations; for rows, weights and
                              credits, numbers of packets in this operation, from 1 (0: none) */
    uint64_t elapsed_us;   /* from the operation's start on this rank */
} crossdockDiagnosis_t;

#define CROSSDOCK_DIAGNOSIS_INIT \
    { sizeof(crossdockDiagnosis_t), NCCL_EP_MAGIC, 0, 0, 0, "", "", 0, 0, 0, 0, 0 }

/* Local, never blocks, no device synchronisation. */
ncclResult_t crossdockGroupDiagnosis(ncclEpGroup_t group, crossdockDiagnosis_t* diagnosis);

/* Bytes that the library holds for this group on this rank: symmetric communication memory, and the rest. Handles' own
 * memory is not counted: see crossdockGroupMemoryUse. Local. Either pointer may be NULL. */
ncclResult_t crossdockGroupMemory(ncclEpGroup_t group, size_t* symmetric_bytes, size_t* local_bytes);

/* What a group and its handles hold on this rank, in bytes. */
typedef struct {
    unsigned int size;        /* in: sizeof(crossdockMemoryUse_t) */
    unsigned int magic;       /* in: NCCL_EP_MAGIC */
    uint64_t symmetric_bytes; /* communication buffers: windows, from NCCL or, on CPUs, from the library; where GPUs
                                 share the host's memory, this rank's part of that */
    uint64_t allocator_bytes; /* all other device memory: from config->alloc, where that is set */
    uint64_t handle_bytes;    /* of allocator_bytes, what handles have or have given back to the group */
    uint64_t host_bytes;      /* host memory that the device writes */
} crossdockMemoryUse_t;

#define CROSSDOCK_MEMORY_USE_INIT \
    { sizeof(crossdockMemoryUse_t), NCCL_EP_MAGIC, 0, 0, 0, 0 }

/* Local. The caller's handle_mem and NCCL's own memory are not counted. */
ncclResult_t crossdockGroupMemoryUse(ncclEpGroup_t group, crossdockMemoryUse_t* use);

/* What this rank's operations have sent in a group of several LSA teams, since the group was created. Rows that HT
 * reads in place, in windows, are not counted. */
typedef struct {
    unsigned int size;      /* in: sizeof(crossdockTraffic_t) */
    unsigned int magic;     /* in: NCCL_EP_MAGIC */
    int lsa_team_size;      /* ranks per LSA team; all ranks: there is one team, and the rest is zero */
    uint64_t rows_inside;   /* to ranks of the own LSA team, this one included ... */
    uint64_t bytes_inside;  /* ... with scales and headers */
    uint64_t rows_crossed;  /* to the other LSA teams ... */
    uint64_t bytes_crossed; /* ... with all that went there: scales, headers, counts, weights, 8 bytes per signal */
    uint64_t puts;          /* messages that carried bytes to other LSA teams, perhaps followed by a signal */
    uint64_t signals;       /* messages that only raised a signal there */
} crossdockTraffic_t;

#define CROSSDOCK_TRAFFIC_INIT \
    { sizeof(crossdockTraffic_t), NCCL_EP_MAGIC, 0, 0, 0, 0, 0, 0, 0 }

/* Local; waits for all issued operations. */
ncclResult_t crossdockGroupTraffic(ncclEpGroup_t group, crossdockTraffic_t* traffic);

/* How the LL expert-major combine sums. */
typedef enum {
    CROSSDOCK_SUMS_EXACT = 0, /* every (token, k) row travels; the source rank sums in k order, fp32, one rounding */
    CROSSDOCK_SUMS_SENDER =
        1 /* a rank first sums a token's weighted rows in fp32, rounds once, and sends one row; the source rank sums
             those in fp32 in order of each rank's first k and rounds once. With u the dtype's unit roundoff
             (bf16 2^-8, fp16 2^-11, fp32 2^-24), K choices and S = sum_k |w_k x_k|:
             |error| <= (2u + u^2 + (K + 1) 2^-24 (1 + u)^2) S, subnormal results aside. */
} crossdockSums_t;

/* Applies to combines issued from now on. Every rank sets the same. Handles start with SENDER if the environment has
 * CROSSDOCK_SENDER_SUMS=1 when the group is created, otherwise with EXACT. InvalidUsage: not an LL expert-major handle,
 * or SENDER between crossdockHandleRebind and the next dispatch. */
ncclResult_t crossdockHandleSetSums(ncclEpHandle_t handle, crossdockSums_t sums);

/* A number of the caller's that must be the same on all ranks for the operations issued from now on. It is for layers
 * whose calls can differ in things that the library does not see. A difference fails the operation on all ranks, before
 * an output is written, and the message has both numbers. Handles start with 0. In LL only elastic operations compare
 * it. The comparison takes no extra time. InvalidArgument: tag is above 1023. */
ncclResult_t crossdockHandleSetTag(ncclEpHandle_t handle, unsigned int tag);

/* Sets at which multiples of rows an expert's rows begin, in place of dispatch_output_per_expert_alignment of the
 * handle's config. It applies from the next ncclEpUpdateHandle on, which must come before any other operation. 0 and 1:
 * at any row. Other values need not be powers of two, and ranks may set different ones. InvalidArgument: more than the
 * config may have. InvalidUsage: not an HT expert-major handle, or one with memory of the caller (handle_mem). */
ncclResult_t crossdockHandleSetAlignment(ncclEpHandle_t handle, unsigned int alignment);

/* How many SMs the updates, dispatches and combines take that are issued from now on, so that other kernels can have
 * the rest. 0, with which handles start, stands for the group's settings, or the layout's defaults. In LL any other
 * number is a further limit. In HT it may be above the group's, and is lowered to what the operation can use:
 *   - what config->max_num_sms, the operation's own field or the environment allows, if one is set;
 *   - the SMs of a device, divided by the ranks that share it, on the rank that has fewest;
 *   - as many as the group's memory has rings for, at least the layouts' defaults;
 *   - in groups with masks or several LSA teams, the largest default.
 * On CPUs an operation takes a rank's one thread.
 *
 * HT: every rank sets the same number before a dispatch, and the same before a combine; these two may differ. If the
 * lowered numbers differ between ranks, the operation fails on all of them before an output is written, and the message
 * has both numbers. LL: each rank sets what it likes. Results are bitwise the same for every number. A captured
 * operation keeps its number. */
ncclResult_t crossdockHandleSetSms(ncclEpHandle_t handle, unsigned int num_sms);

/* How many SMs the handle's next update, dispatch and combine take: the lowered number of crossdockHandleSetSms, or the
 * group's. A combine with NCCL_EP_COMB_QUANT_MXFP8 has a default of its own, which may be more. On GPUs that place a
 * kernel's first blocks on SMs of one TPC, up to 8 further blocks start and return at once. Local. Pointers may be
 * NULL. InvalidUsage: an LL handle. */
ncclResult_t crossdockHandleSms(ncclEpHandle_t handle, unsigned int* update, unsigned int* dispatch,
                                unsigned int* combine);

/* Writes to *count, device memory of 8 bytes, how many pairs of an own token and a masked rank the handle's current
 * routing has dropped. In such a pair the token has experts on the rank, and the rank was masked when
 * ncclEpUpdateHandle ended. Other ranks still get the token. The number is 0 in groups without masks. Rows dropped by
 * overflow_policy are not counted; there are recv_total_counter minus the budget of them. Enqueued on the stream, after
 * the update; capturable. InvalidArgument: count NULL. InvalidUsage: an LL handle, or one without routing. */
ncclResult_t crossdockHandleDroppedTokens(ncclEpHandle_t handle, uint64_t* count, cudaStream_t stream);

/* Where the rows of an LL expert-major handle's last dispatch came from. Both tensors are written:
 *   tokens [L, R*M] int32  for row i of expert l, the token's number on its source rank. Elements past an expert's
 *                          count are not written
 *   ranges [L, R] int64    expert l's rows from source rank r: their number in the lower 32 bits, the first row in the
 *                          upper 32 bits
 * Local; enqueued on the stream, after the dispatch (after send_only: its receive half); capturable. Nothing is
 * computed unless this is called. InvalidArgument: a tensor missing or of other shape or type. InvalidUsage: an HT or
 * rank-major handle, or one without a finished dispatch. */
ncclResult_t crossdockHandleSources(ncclEpHandle_t handle, const ncclEpTensor_t* tokens, const ncclEpTensor_t* ranges,
                                    cudaStream_t stream);

/* Writes the routing of an LL expert-major handle's last dispatch to topk_idx [B, K] int32: expert ids as dispatched,
 * and -1 for dropped choices. The memory that ncclEpUpdateHandle has bound may have changed since. Local; enqueued on
 * the stream, after the dispatch (its send half is enough); capturable. InvalidArgument: topk_idx missing or of other
 * shape or type. InvalidUsage: an HT or rank-major handle, or nothing dispatched. */
ncclResult_t crossdockHandleRouting(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx, cudaStream_t stream);

/* Binds other memory with the same routing, between an LL expert-major handle's dispatch and its combines. These, and
 * later dispatches, read topk_idx [B, K] instead of the memory that ncclEpUpdateHandle has bound. It is borrowed in the
 * same way. Each element is as it was dispatched, or -1: a combine leaves that choice out of its sum, and its row may
 * hold anything. Local; enqueues nothing. InvalidArgument: topk_idx missing, not int32 or int64, or of other extents
 * than dispatched. InvalidUsage: an HT or rank-major handle, sender's sums, a pending send_only operation, nothing
 * dispatched, or other routing bound since. */
ncclResult_t crossdockHandleRebind(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx);

/* ---- Experts that start while rows arrive, and whose rows are sent while others are computed ---- */

/* Counters between a handle's operations and the experts' kernel, which runs beside them on another stream (CPUs:
 * another thread). Rows are counted by blocks of block_rows rows of a zone: an expert of this rank (expert-major) or a
 * source rank (LL rank-major). crossdock/overlap.hpp has the kernel's side for CUDA and C++, crossdock.triton the one
 * for Triton. */
typedef struct {
    unsigned int size;            /* sizeof(crossdockOverlap_t) */
    unsigned int magic;           /* NCCL_EP_MAGIC */
    unsigned int block_rows;      /* 1 .. 2^20, or more for whole zones; usually the rows of a tile of the experts'
                                     GEMM */
    unsigned int done_value;      /* what a block's counter of done reaches once its rows are computed; 0: combines do
                                     not wait. HT: 0 */
    const ncclEpTensor_t* memory; /* [crossdockOverlapWords] int32 or uint32, device memory of the caller's; NULL:
                                     dispatches publish nothing, and `done` has counters */
    const ncclEpTensor_t* done;   /* counters of the caller's own, [zones, blocks] or [zones * blocks] int32 or uint32,
                                     blocks = slots / block_rows rounded up, slots being the second extent of
                                     dispatch's outputs->tokens. The caller clears them before each combine. NULL: those
                                     in memory, which nobody has to clear. HT: NULL */
} crossdockOverlap_t;

#define CROSSDOCK_OVERLAP_INIT \
    { sizeof(crossdockOverlap_t), NCCL_EP_MAGIC, 1, 0, 0, 0 }

/* The words that crossdockOverlap_t::memory needs for this handle. Local. InvalidArgument: block_rows is 0, words NULL.
 * InvalidUsage: an HT handle of layout FLAT. */
ncclResult_t crossdockOverlapWords(ncclEpHandle_t handle, unsigned int block_rows, size_t* words);

/* Applies to the operations of this handle that are issued from now on; NULL ends it. Local; captured operations keep
 * what they have.
 *
 * A dispatch with memory publishes a zone's number of rows as soon as it is known, and each block when all its rows are
 * in place, with scales, weights and ids. A combine with done_value sends a block's rows when its counter has reached
 * the value, and may start before any row is computed. Blocks may finish in any order (rows that are quantised, summed
 * by the sender, or longer than 32 KiB are sent in a fixed order). If a counter does not come within seven eighths of
 * the timeout, the group fails, and the message names the expert, the block, the value expected and the one seen; the
 * rest of the timeout is for the peers, who wait for the rows.
 *
 * HT handles (EXPERT_MAJOR): a dispatch, forward or backward, publishes all counts at its beginning, since
 * ncclEpUpdateHandle has counted the rows, and each block when its rows and scales are in place. Weights, and the zeros
 * between zones, are complete when the dispatch ends. Rows that outputs->tokens has no room for are not counted. Zones
 * follow one another: OverlapConsumer::wait_first_row tells where one begins. Combines do not wait.
 *
 * Memory: one per handle. The caller clears it before its first use, and again before a use with another block_rows or
 * after a dispatch or a consumer that did not run to its end. From then on, for each dispatch, the consumer runs
 * exactly once (OverlapConsumer::leave ends a run). The next dispatch must be ordered after it, and after the combine,
 * as any kernel that rewrites outputs->tokens. A second combine of the same dispatch finds the counters of the first,
 * and waits for nothing.
 *
 * GPUs: kernels that wait for each other must all fit. Launch the dispatch before the kernel that waits for its rows.
 * Launch the combine before the kernel whose blocks it sends, on another stream, and let that kernel leave the
 * combine's SMs free: a block of a combine needs a whole SM. crossdockHandleSetSms limits what this handle's operations
 * take. A combine that waits takes 24 SMs where nothing is set; if it is send_only, its receive half takes as many as
 * any other. Without room the operation ends with its timeout.
 *
 * Not with elastic operations (InvalidUsage from them), and memory not in groups with masks. InvalidArgument: a field
 * out of range, a tensor of other type or extent, neither memory nor done, done without done_value. InvalidUsage: an HT
 * handle of layout FLAT, or one with done or done_value; from ncclEpCombine: it would wait for counters in memory in
 * which the last dispatch did not publish. */
ncclResult_t crossdockHandleSetOverlap(ncclEpHandle_t handle, const crossdockOverlap_t* overlap);

/* ---- Elastic operations: packed rows, with all that their receiver wants to know of them ---- */

/* A dispatch whose outputs have as many rows as arrive (or more), in the order of source rank, token and choice, with
 * their origin and the counts that grouped GEMMs want: what DeepEP's ElasticBuffer returns, written by the kernel that
 * receives the rows. It goes along the handle's routing (ncclEpUpdateHandle), in groups of either algorithm.
 *
 * T own tokens with K choices each; R ranks; L experts of a rank; N tokens that have an expert on this rank. An expert
 * that a token names twice has one row of it.
 *   By rank (handles of layout RANK_MAJOR or FLAT): row n is the n-th of the N tokens.
 *   By expert (EXPERT_MAJOR): row for row, the tokens of expert 0, then those of expert 1, ...; each expert's rows
 *   begin at a multiple of the alignment.
 * Outputs may have more rows than arrive; what is beyond is undefined, unless said below. Arrays are dense and
 * row-major unless strides are given; optional ones may be NULL, also where others are not. */
typedef struct {
    unsigned int size;  /* sizeof(crossdockElasticDispatch_t) */
    unsigned int magic; /* NCCL_EP_MAGIC */
    /* In. */
    const ncclEpTensor_t* tokens;       /* [T, H]; any type that dispatch carries; rows of a multiple of 16 bytes */
    const ncclEpTensor_t* scales;       /* [T, S] of 4-byte elements, copied bit by bit; NULL: S is 0 */
    int64_t scale_strides[2];           /* in elements, from token to token and from column to column; 0, 0: dense */
    const ncclEpTensor_t* topk_weights; /* [T, K] fp32; NULL: none travel. All ranks pass it, or none */
    unsigned int alignment;             /* of an expert's rows and counts; 0 and 1: none. HT expert-major: the handle's
                                           (dispatch_output_per_expert_alignment), or 0 */
    unsigned int origin_stride;         /* sources count tokens so: source rank * origin_stride + token */
    int zero_padding;                   /* by expert. 1: the rows between the experts' are zeros in all outputs */
    /* Out. */
    const ncclEpTensor_t* out_tokens;       /* [rows, H] */
    const ncclEpTensor_t* out_scales;       /* [rows, S], with scales */
    int64_t out_scale_strides[2];           /* as scale_strides */
    const ncclEpTensor_t* out_topk_idx;     /* optional, by rank: [rows, K] int32 or int64: expert ids as this rank
                                               numbers its own, -1 for those of other ranks; -1 beyond N */
    const ncclEpTensor_t* out_topk_weights; /* optional, with topk_weights. By rank: [rows, K], all of the token's, or
                                               see own_weights_only. By expert: [rows], of this choice, the sum where a
                                               token names it twice */
    const ncclEpTensor_t* sources;          /* optional, [N or more, K + 2] int32. Of token n: its source rank *
                                               origin_stride + token; n; by expert, the row of each choice; -1 for
                                               choices on other ranks, and by rank */
    const ncclEpTensor_t* rank_ends;        /* optional, [R] int32: tokens from ranks 0 .. r */
    const ncclEpTensor_t* expert_counts;    /* optional, [L] int32: tokens of each expert */
    const ncclEpTensor_t* expert_ends;      /* optional, [L] int32. By rank: sums of the counts of experts 0 .. l, each
                                               rounded up to the alignment. By expert: the end of expert l's rows */
    const ncclEpTensor_t* statistics;       /* optional, [L] int32: the counts are added */
    const ncclEpTensor_t* topk_idx_copy;    /* optional, LL: [T, K] of the type of ncclEpUpdateHandle's topk_idx, which
                                               is copied there, and read there from now on. HT: NULL, the update has
                                               copied it */
    /* In. */
    int own_weights_only; /* by rank. 1: out_topk_weights is 0 where out_topk_idx is -1, for choices of other ranks */
} crossdockElasticDispatch_t;

#define CROSSDOCK_ELASTIC_DISPATCH_INIT                                                                              \
    {                                                                                                                \
        sizeof(crossdockElasticDispatch_t), NCCL_EP_MAGIC, 0, 0, {0, 0}, 0, 0, 0, 0, 0, 0, {0, 0}, 0, 0, 0, 0, 0, 0, \
            0, 0, 0                                                                                                  \
    }

/* One kernel, enqueued on the stream; capturable. More rows than the outputs have fail the group
 * (crossdockGroupDiagnosis and the message tell how many); none is written beyond them. Ranks that differ in K, in the
 * type or bytes of rows or scales fail with a message on all. May be repeated along the same routing, and runs in
 * between other operations of the group; a later combine goes by the last one. InvalidArgument: a struct or tensor that
 * is missing or of other type or shape than above, alignment 0x80000000 or more, or not the handle's. InvalidUsage: no
 * routing, a group with masks; LL: one with zero_copy on or several LSA teams, more than 64 ranks, 32767 experts or
 * 65535 tokens per rank. */
ncclResult_t crossdockElasticDispatch(ncclEpHandle_t handle, const crossdockElasticDispatch_t* call,
                                      cudaStream_t stream);

/* Returns the rows of the handle's last elastic dispatch and adds them up: out_tokens[t] = bias[0][t] + bias[1][t] +
 * the sum over ranks of their row of t. In fp32, in this order, ranks ascending, rounded once. By expert, a rank first
 * sums its rows of t in fp32 in the order of t's choices, and rounds the sum once (one row alone stays as it is).
 * Between LSA teams (HT), the rows of another team are added in the same way, and their rounded sum takes their place.
 * In an invariant group (crossdockGroupOptions_t) there are no such partial sums: out_tokens[t] = the biases + the row
 * of each of t's choices, in the order of choices, in fp32, rounded once. An expert that t names twice counts once, at
 * its first choice. */
typedef struct {
    unsigned int size;  /* sizeof(crossdockElasticCombine_t) */
    unsigned int magic; /* NCCL_EP_MAGIC */
    /* In. */
    const ncclEpTensor_t* tokens;       /* [rows, H] bf16, fp16 or fp32, placed as the dispatch's out_tokens, of which
                                           it has as many rows. H may differ from the dispatch's */
    const ncclEpTensor_t* topk_weights; /* fp32, as out_topk_weights: [rows, K], or by expert [rows]. They return
                                           unchanged, nothing is multiplied. NULL: none. All ranks pass it, or none */
    const ncclEpTensor_t* bias[2];      /* [T, H] of the type of tokens, or NULL */
    /* Out. */
    const ncclEpTensor_t* out_tokens;       /* [T, H] of the type of tokens */
    const ncclEpTensor_t* out_topk_weights; /* [T, K] fp32, with topk_weights: of each choice, what its rank passed; 0
                                               for choices of no expert */
} crossdockElasticCombine_t;

#define CROSSDOCK_ELASTIC_COMBINE_INIT \
    { sizeof(crossdockElasticCombine_t), NCCL_EP_MAGIC, 0, 0, {0, 0}, 0, 0 }

/* One kernel, enqueued on the stream; capturable; may be repeated. Ranks that differ in K, in the type or bytes of
 * rows, or in whether weights return, fail with a message on all; in LL, a rank that has no tokens at the one that
 * differs may get it from its next dispatch. InvalidArgument, InvalidUsage: as the dispatch, and InvalidUsage without
 * an elastic dispatch before, and in an invariant group for rows by rank, which the caller has summed. */
ncclResult_t crossdockElasticCombine(ncclEpHandle_t handle, const crossdockElasticCombine_t* call, cudaStream_t stream);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_H_ */
