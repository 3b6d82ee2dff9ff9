/* SPDX-License-Identifier: Apache-2.0
 *
 * crossdock/simulation.h: runs a program's ranks in a simulation, for tests. A seed chooses the schedule; ranks can be
 * killed and cut off. The conventions are those of crossdock.h.
 */
#ifndef CROSSDOCK_SIMULATION_H_
#define CROSSDOCK_SIMULATION_H_

#include "crossdock.h"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

typedef struct {
    unsigned int size;          /* sizeof(crossdockSimulationConfig_t) */
    unsigned int magic;         /* NCCL_EP_MAGIC */
    uint64_t seed;              /* chooses which warp runs next and when each asynchronous copy completes */
    uint64_t max_copy_delay_ns; /* in simulated time; 0: 20000 */
    int killed_rank;            /* -1: none. From killed_at_step on, this rank's writes are lost and its calls fail */
    int cut_rank;               /* -1: none. From cut_at_step on, nothing reaches this rank through the network, and
                                   nothing that it sends there arrives; its own LSA team still reaches it */
    uint64_t killed_at_step;    /* scheduler steps */
    uint64_t cut_at_step;       /* scheduler steps */
    /* The network between LSA teams, in groups that have several. Every put and every signal takes its own time, so
     * they overtake each other. A signal never overtakes the earlier puts of its rank to that peer. */
    uint64_t max_put_delay_ns; /* of a message, in simulated time; 0: 30000 */
    uint64_t put_ns_per_kib;   /* how long 1024 bytes occupy a rank's link; 0: 20 */
    /* 1: ranks behave as processes. Each starts at a time of its own and waits until all have joined, as
     * crossdockCommInitRank does. If a rank was killed before, this fails: then the program is called with comm NULL,
     * and crossdockGetLastError() says why. A rank that was killed, or whose program has returned, counts as an ended
     * process, so waits for it end at once.
     * 0: all ranks have joined before the programs begin. As on GPUs, ended ranks are not noticed: waits for a killed
     * rank time out. */
    int are_processes;
    uint64_t max_start_delay_ns; /* are_processes: how late a rank may start, in simulated time; 0: 100000 */
} crossdockSimulationConfig_t;

#define CROSSDOCK_SIMULATION_CONFIG_INIT \
    { sizeof(crossdockSimulationConfig_t), NCCL_EP_MAGIC, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0 }

/* One rank's program. It may use the communicator until it returns; it must not block outside the library. comm NULL:
 * the rank could not join (are_processes). */
typedef void (*crossdockRankProgram_t)(ncclComm_t comm, int rank, void* context);

/* Runs program once per rank, in simulated time. Every rank is a fiber of the calling thread, and one seed is one run,
 * bit for bit. Returns when all programs have returned. The communicators are made and destroyed here.
 *
 * config NULL: seed 0. num_steps, if not NULL, receives the number of scheduler steps (the range for killed_at_step).
 * InternalError: an invariant of the protocol was violated (each row once, no slot written before it is free, counts
 * add up); the message names the seed. */
ncclResult_t crossdockRunSimulation(int num_ranks, const crossdockSimulationConfig_t* config,
                                    crossdockRankProgram_t program, void* context, uint64_t* num_steps);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_SIMULATION_H_ */
