// SPDX-License-Identifier: Apache-2.0
#include "communicator.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <vector>

#include "interrupt.h"
#include "window.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

nb::list create_threads(int num_ranks) {
    if (num_ranks < 1) invalid_argument("num_ranks is " + std::to_string(num_ranks) + ", allowed: 1..4096");
    std::vector<ncclComm_t> comms(static_cast<size_t>(num_ranks < 4096 ? num_ranks : 4097));
    check(crossdockCommInitAll(comms.data(), num_ranks));
    nb::list communicators;
    for (ncclComm_t comm : comms) {
        communicators.append(nb::cast(Communicator{std::make_shared<CommunicatorState>(comm, true, true)}));
    }
    return communicators;
}

nb::bytes unique_id() {
    ncclUniqueId id;
    check(crossdockGetUniqueId(&id));
    return nb::bytes(id.internal, sizeof(id.internal));
}

ncclUniqueId id_from(const nb::bytes& id_bytes) {
    ncclUniqueId id;
    if (id_bytes.size() != sizeof(id.internal)) {
        invalid_argument("unique_id has " + std::to_string(id_bytes.size()) + " bytes, expected " +
                         std::to_string(sizeof(id.internal)) + ": pass what Communicator.unique_id() returned");
    }
    std::memcpy(id.internal, id_bytes.data(), sizeof(id.internal));
    return id;
}

void release_unique_id(const nb::bytes& id_bytes) { check(crossdockReleaseUniqueId(id_from(id_bytes))); }

Communicator join(int num_ranks, int rank, const nb::bytes& id_bytes) {
    const ncclUniqueId id = id_from(id_bytes);
    ncclComm_t comm = nullptr;
    {
        const ReleasedGil unlocked;
        check(crossdockCommInitRank(&comm, num_ranks, id, rank));
    }
    return Communicator{std::make_shared<CommunicatorState>(comm, true, true)};
}

Communicator join_hosts(int num_ranks, int rank, const std::string& address) {
    ncclComm_t comm = nullptr;
    {
        const ReleasedGil unlocked;
        check(crossdockCommInitHosts(&comm, num_ranks, rank, address.c_str()));
    }
    return Communicator{std::make_shared<CommunicatorState>(comm, true, true)};
}

Communicator from_environment() {
    ncclComm_t comm = nullptr;
    {
        const ReleasedGil unlocked;
        check(crossdockCommInitFromEnvironment(&comm));
    }
    return Communicator{std::make_shared<CommunicatorState>(comm, true, true)};
}

std::shared_ptr<CommunicatorState> adopt_address(intptr_t pointer) {
    if (pointer == 0) invalid_argument("comm is 0, expected the address of an ncclComm_t");
    auto* const comm = reinterpret_cast<ncclComm_t>(pointer);
    int is_cpu = 0;
    check(crossdockCommIsCpu(comm, &is_cpu));
    return std::make_shared<CommunicatorState>(comm, false, is_cpu != 0);
}

nb::list all_gather(Communicator& self, const nb::bytes& own) {
    CommunicatorState& state = *self.state;
    const size_t bytes = own.size();
    std::vector<char> all(bytes * static_cast<size_t>(state.num_ranks()));
    const void* source = own.data();
    expect_waits_go_on();
    state.call([&] { check(crossdockCommAllGather(state.get(), source, all.data(), bytes)); });
    nb::list parts;
    for (int rank = 0; rank < state.num_ranks(); ++rank) {
        parts.append(nb::bytes(all.data() + static_cast<size_t>(rank) * bytes, bytes));
    }
    return parts;
}

}  // namespace

CommunicatorState::CommunicatorState(ncclComm_t comm, bool is_owned, bool is_cpu)
    : comm_(comm), is_owned_(is_owned), is_cpu_(is_cpu) {
    check(crossdockCommUserRank(comm_, &rank_));
    check(crossdockCommCount(comm_, &num_ranks_));
}

CommunicatorState::~CommunicatorState() {
    if (is_owned_ && !is_closed_ && !fork_guard_.is_foreign()) crossdockCommDestroy(comm_);
}

void CommunicatorState::expect_open() const {
    if (is_closed_) invalid_usage("the communicator is closed");
}

void CommunicatorState::close() {
    if (is_closed_) return;
    expect_no_handler();
    fork_guard_.expect_own_process("communicator");
    const ReleasedGil unlocked;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_) return;
    if (num_users_ > 0) {
        invalid_usage("the communicator has open groups or windows (" + std::to_string(num_users_) +
                      "): close them first");
    }
    if (is_owned_) check(crossdockCommDestroy(comm_));
    is_closed_ = true;
}

std::shared_ptr<CommunicatorState> communicator_from(nb::handle object) {
    if (nb::isinstance<Communicator>(object)) return nb::cast<Communicator&>(object).state;
    nb::object address = nb::borrow(object);
    if (!PyLong_Check(object.ptr())) {
        const nb::object in_object = find_attribute(object, "ptr");
        if (in_object.is_valid()) address = in_object;
    }
    if (!PyLong_Check(address.ptr())) {
        invalid_argument(
            std::string("comm is of type ") + Py_TYPE(object.ptr())->tp_name +
            ", allowed: Communicator, an object with the address of an ncclComm_t in ptr, or that address");
    }
    intptr_t pointer = 0;
    if (!nb::try_cast<intptr_t>(address, pointer)) {
        invalid_argument("comm is " + shown(address) + ", expected the address of an ncclComm_t");
    }
    return adopt_address(pointer);
}

void bind_communicator(nb::module_& module) {
    nb::class_<Communicator>(module, "Communicator", R"(The ranks that take part.

- CPU ranks: create_threads (threads of this process), join (processes of one host), join_hosts and from_environment
  (processes of several hosts).
- GPU ranks: adopt takes an ncclComm_t that another library made. crossdock.nccl makes one, and
  crossdock.torch.communicator_of returns that of a process group.

Use it as a context manager, or close() it. Close its groups and windows first.
Only one thread at a time may use a rank's communicator. Calls that wait for other ranks release the GIL.)")
        .def_static("create_threads", &create_threads, "num_ranks"_a,
                    nb::sig("def create_threads(num_ranks: int) -> list[Communicator]"),
                    "Returns a communicator for each of 1..4096 ranks, which are threads of this process. Local.")
        .def_static("unique_id", &unique_id,
                    "Makes the 128 bytes that join takes. One process makes them and sends them to the others. It must "
                    "live until all have joined.")
        .def_static("release_unique_id", &release_unique_id, "unique_id"_a,
                    "Frees what this process keeps for an id that it has made. For a process that does not join. Ranks "
                    "that have not joined yet can no longer join.")
        .def_static("join", &join, "num_ranks"_a, "rank"_a, "unique_id"_a,
                    "Joins the processes that have the same unique_id, as the given rank. Collective. After "
                    "CROSSDOCK_JOIN_TIMEOUT_MS (60000) it raises a RemoteError that names the missing ranks.")
        .def_static("join_hosts", &join_hosts, "num_ranks"_a, "rank"_a, "address"_a,
                    "Joins processes of several hosts. address is the \"host:port\" where rank 0 listens. Ranks of one "
                    "host share memory, and reach the others over the network. Ranks are numbered host by host. "
                    "Collective, with the timeout of join.")
        .def_static("from_environment", &from_environment,
                    "As join_hosts, with what torchrun, mpirun or srun have set, or with CROSSDOCK_RANK, "
                    "CROSSDOCK_NUM_RANKS and CROSSDOCK_ADDRESS. InvalidUsage names the variable that is missing or "
                    "contradicts another.")
        .def_static(
            "adopt", [](nb::handle comm) { return Communicator{communicator_from(comm)}; }, "comm"_a.none(),
            nb::sig("def adopt(comm: object) -> Communicator"),
            "Returns a Communicator for an ncclComm_t that was made elsewhere, by NCCL or for CPU ranks. comm is its "
            "address, or an object that has the address in ptr, as nccl4py's has. The ncclComm_t is borrowed: it must "
            "outlive the groups, and close() does not destroy it.")
        .def_prop_ro(
            "rank", [](const Communicator& self) { return self.state->rank(); }, "This rank's number.")
        .def_prop_ro(
            "num_ranks", [](const Communicator& self) { return self.state->num_ranks(); }, "How many ranks there are.")
        .def_prop_ro(
            "nranks", [](const Communicator& self) { return self.state->num_ranks(); },
            "The same as num_ranks, as nccl4py spells it.")
        .def_prop_ro(
            "is_cpu", [](const Communicator& self) { return self.state->is_cpu(); },
            "Whether these are CPU ranks. Their arrays are in host memory, and their calls are complete when they "
            "return.")
        .def_prop_ro(
            "ptr", [](const Communicator& self) { return reinterpret_cast<intptr_t>(self.state->get()); },
            "The ncclComm_t for C code, as an intptr_t: that of a CPU communicator can be negative.")
        .def(
            "barrier",
            [](Communicator& self) {
                expect_waits_go_on();
                self.state->call([&] { check(crossdockCommBarrier(self.state->get())); });
            },
            "Waits for all ranks; CPU communicators only. RemoteError after CROSSDOCK_JOIN_TIMEOUT_MS.")
        .def("all_gather", &all_gather, "own"_a, nb::sig("def all_gather(self, own: bytes) -> list[bytes]"),
             "Returns the bytes of all ranks, in the order of ranks. All pass equally many. CPU communicators only.")
        .def("register_window", &register_window, "memory"_a, nb::rv_policy::move,
             "Registers an array or Memory as a window, into which peers write results directly. Collective, with the "
             "same size on all ranks. CPU communicators only; on GPUs, windows are NCCL's. If ranks are processes, the "
             "memory must be a Memory.")
        .def(
            "close", [](Communicator& self) { self.state->close(); },
            "Frees the communicator. InvalidUsage if it still has groups or windows. May be called again.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __enter__(self) -> Communicator"))
        .def(
            "__exit__",
            [](Communicator& self, const nb::args& exception) {
                close_at_exit(exception, [&] { self.state->close(); });
            },
            nb::sig("def __exit__(self, *exception: object) -> None"))
        .def("__repr__", [](const Communicator& self) {
            return nb::str("<crossdock.Communicator rank {} of {}, {}>")
                .format(self.state->rank(), self.state->num_ranks(), self.state->is_cpu() ? "CPU" : "NCCL");
        });
}

}  // namespace crossdock::python
