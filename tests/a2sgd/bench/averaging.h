// SPDX-License-Identifier: Apache-2.0
// Ways to average the gradients of data-parallel ranks, behind one interface, in CPU memory. Plain implementations for
// comparing what they send and what comes out; only A2SGD's is the library's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "crossdock/a2sgd.h"
#include "tests/a2sgd/bench/wire.h"

namespace crossdock::bench {

// One rank's end. All ranks call average in turn with gradients of the same size.
class Averaging {
  public:
    virtual ~Averaging() = default;
    virtual std::string name() const = 0;

    // Replaces the rank's gradient by what its optimizer is to step with.
    virtual void average(std::vector<float>& gradient) = 0;

    // What this rank has sent so far: every copy counts that goes to another rank.
    virtual uint64_t bytes_sent() const = 0;

    // What says how large one rank's message of a step is, however it is spread.
    virtual uint64_t message_bits(size_t entries) const = 0;
};

// Means of all entries, by a ring: sums of a part go round once, the finished parts once more.
std::unique_ptr<Averaging> make_dense(Wire& wire, int rank);

// The entries of largest magnitude, `part` of all and at least one, with their places; the rest is kept and added to
// the next gradient (error feedback).
std::unique_ptr<Averaging> make_top_k(Wire& wire, int rank, double part);

// QSGD (Alistarh and others, 2017): entries in buckets of 512, each a multiple of a 1/levels of its bucket's largest
// magnitude, rounded at random so that its mean is right. Four bits per entry and an fp32 number per bucket.
std::unique_ptr<Averaging> make_qsgd(Wire& wire, int rank, uint64_t seed);

// The library's. comm: this rank's communicator.
std::unique_ptr<Averaging> make_a2sgd(ncclComm_t comm);

}  // namespace crossdock::bench
