// SPDX-License-Identifier: Apache-2.0
//
// Crossdock's C++ layer, part 2: communicators whose ranks are threads or processes of CPUs. C++11, header only.
#ifndef CROSSDOCK_COMMUNICATOR_HPP_
#define CROSSDOCK_COMMUNICATOR_HPP_

#include <cstddef>
#include <exception>
#include <future>
#include <utility>
#include <vector>

#include "crossdock/error.hpp"

namespace crossdock {
inline namespace cxx {

// Owns an id for ranks that are processes; move-only. For a process that starts ranks and is none itself: it keeps the
// id until all have joined.
class UniqueId {
  public:
    UniqueId() { check(crossdockGetUniqueId(&id_)); }
    UniqueId(UniqueId&& other) noexcept : id_(other.id_), is_owner_(other.is_owner_) { other.is_owner_ = false; }
    UniqueId& operator=(UniqueId&& other) noexcept {
        std::swap(id_, other.id_);
        std::swap(is_owner_, other.is_owner_);
        return *this;
    }
    ~UniqueId() {
        if (is_owner_) {
            crossdockReleaseUniqueId(id_);
        }
    }

    const ncclUniqueId& get() const { return id_; }

  private:
    ncclUniqueId id_;
    bool is_owner_ = true;
};

// Owns a CPU communicator; move-only. Its groups and windows must be gone before it is.
class Communicator {
  public:
    // All ranks as threads of this process, entry r for the thread of rank r.
    static std::vector<Communicator> threads(int num_ranks) {
        std::vector<ncclComm_t> raw(num_ranks > 0 ? static_cast<std::size_t>(num_ranks) : 1);
        check(crossdockCommInitAll(raw.data(), num_ranks));
        std::vector<Communicator> communicators;
        for (ncclComm_t comm : raw) {
            communicators.push_back(Communicator(comm));
        }
        return communicators;
    }

    // One process makes the id and hands it to the others. If it does not join itself, it should own a UniqueId.
    static ncclUniqueId unique_id() {
        ncclUniqueId id;
        check(crossdockGetUniqueId(&id));
        return id;
    }

    // This process becomes one rank. Collective: returns when all have joined.
    static Communicator join(const ncclUniqueId& id, int num_ranks, int rank) {
        ncclComm_t comm = nullptr;
        check(crossdockCommInitRank(&comm, num_ranks, id, rank));
        return Communicator(comm);
    }

    // The same with ranks on several hosts; rank 0 is at the address, "host:port".
    static Communicator join_hosts(const char* address, int num_ranks, int rank) {
        ncclComm_t comm = nullptr;
        check(crossdockCommInitHosts(&comm, num_ranks, rank, address));
        return Communicator(comm);
    }

    // The same as torchrun, mpirun or srun have started this process.
    static Communicator from_environment() {
        ncclComm_t comm = nullptr;
        check(crossdockCommInitFromEnvironment(&comm));
        return Communicator(comm);
    }

    Communicator(Communicator&& other) noexcept : comm_(other.comm_) { other.comm_ = nullptr; }
    Communicator& operator=(Communicator&& other) noexcept {
        std::swap(comm_, other.comm_);
        return *this;
    }
    ~Communicator() {
        if (comm_ != nullptr) {
            crossdockCommDestroy(comm_);
        }
    }

    ncclComm_t get() const { return comm_; }

    int rank() const {
        int rank = 0;
        check(crossdockCommUserRank(comm_, &rank));
        return rank;
    }

    int num_ranks() const {
        int num_ranks = 0;
        check(crossdockCommCount(comm_, &num_ranks));
        return num_ranks;
    }

    // Collective.
    void barrier() const { check(crossdockCommBarrier(comm_)); }

  private:
    explicit Communicator(ncclComm_t comm) : comm_(comm) {}

    ncclComm_t comm_;
};

// Calls function(const Communicator&) once per rank, each in a thread of its own, and returns when all have returned.
// Throws what the lowest rank that failed threw. An ncclRemoteError only reports the failure of another rank, so it is
// thrown only if there is nothing else. Ranks that wait for one that has failed do so up to their timeout.
template <class Function>
void run_threads(int num_ranks, const Function& function) {
    const std::vector<Communicator> ranks = Communicator::threads(num_ranks);
    std::vector<std::future<void>> running;
    for (const Communicator& rank : ranks) {
        running.push_back(std::async(std::launch::async, [&function, &rank] { function(rank); }));
    }
    std::exception_ptr cause;
    std::exception_ptr report;
    for (std::future<void>& each : running) {
        try {
            each.get();
        } catch (const Error& error) {
            std::exception_ptr& place = error.code() == ncclRemoteError ? report : cause;
            if (place == nullptr) place = std::current_exception();
        } catch (...) {
            if (cause == nullptr) cause = std::current_exception();
        }
    }
    if (cause == nullptr) cause = report;
    if (cause != nullptr) std::rethrow_exception(cause);
}

}  // namespace cxx
}  // namespace crossdock

#endif  // CROSSDOCK_COMMUNICATOR_HPP_
