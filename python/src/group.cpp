// SPDX-License-Identifier: Apache-2.0
#include "group.h"

#include "arguments.h"
#include "configs.h"
#include "group_masks.h"
#include "handle.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

size_t handle_mem_size(Group& self, ncclEpLayout_t layout, nb::handle topk, nb::handle config,
                       const nb::kwargs& fields) {
    const int num_topk = topk_of(topk);
    const auto resolved = config_from<ncclEpHandleConfig_t>(config, fields);
    size_t size = 0;
    GroupState& state = *self.state();
    state.call([&] { check(ncclEpHandleMemSize(state.get(), layout, &resolved, &size, num_topk)); });
    return size;
}

nb::object traffic(Group& self) {
    crossdockTraffic_t found = CROSSDOCK_TRAFFIC_INIT;
    GroupState& state = *self.state();
    state.call([&] { check(crossdockGroupTraffic(state.get(), &found)); });
    return nb::cast(found);
}

nb::tuple memory(Group& self) {
    size_t symmetric_bytes = 0;
    size_t local_bytes = 0;
    GroupState& state = *self.state();
    state.call([&] { check(crossdockGroupMemory(state.get(), &symmetric_bytes, &local_bytes)); });
    return nb::make_tuple(symmetric_bytes, local_bytes);
}

nb::object memory_use(Group& self) {
    crossdockMemoryUse_t found = CROSSDOCK_MEMORY_USE_INIT;
    GroupState& state = *self.state();
    state.call([&] { check(crossdockGroupMemoryUse(state.get(), &found)); });
    return nb::cast(found);
}

}  // namespace

void GroupState::expect_open() const {
    if (is_closed_) invalid_usage("the group is closed");
}

void GroupState::bury() {
    if (!has_doomed_) return;
    std::vector<Doomed> doomed;
    {
        const std::lock_guard<std::mutex> lock(doomed_mutex_);
        doomed.swap(doomed_);
    }
    // Without that mutex, for which others wait with the GIL: a cancelled half may wait for ranks.
    for (const Doomed& each : doomed) ncclEpHandleDestroy(each.handle);
    const std::lock_guard<std::mutex> lock(doomed_mutex_);
    for (Doomed& each : doomed) buried_.push_back(std::move(each.arrays));
}

// Releasing an array may call this again.
void GroupState::let_go_of_arrays() {
    if (!has_doomed_) return;
    std::vector<std::vector<Array>> buried;
    const std::lock_guard<std::mutex> lock(doomed_mutex_);
    buried.swap(buried_);
    has_doomed_ = !doomed_.empty();
}

void GroupState::close() {
    expect_no_handler();
    fork_guard_.expect_own_process("group");
    {
        const ReleasedGil unlocked;
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_closed_) return;
    }
    call_with_communicator([this] {
        check(ncclEpGroupDestroy(group_));
        is_closed_ = true;
        communicator_->remove_user();
    });
}

void GroupState::destroy(ncclEpHandle_t handle, std::vector<Array> arrays) {
    if (handle == nullptr || is_foreign()) return;
    {
        const ReleasedGil unlocked;
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (lock.owns_lock()) {
            ncclEpHandleDestroy(handle);
            handle = nullptr;
        }
    }
    if (handle != nullptr) destroy_later(handle, std::move(arrays));
}

void GroupState::destroy_later(ncclEpHandle_t handle, std::vector<Array> arrays) {
    if (handle == nullptr || is_foreign()) return;
    const std::lock_guard<std::mutex> lock(doomed_mutex_);
    doomed_.push_back({handle, std::move(arrays)});
    has_doomed_ = true;
}

Group::Group(nb::handle comm, nb::handle config, const nb::kwargs& fields) {
    crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
    unsigned int api_version = NCCL_EP_API_VERSION;
    nb::kwargs of_config;
    for (const auto& [name, value] : fields) {
        if (shown(name) == "ht_masks") {
            options.ht_masks = as<bool>(value, "ht_masks", "True, False") ? 1 : 0;
        } else if (shown(name) == "invariant") {
            options.invariant = as<bool>(value, "invariant", "True, False") ? 1 : 0;
        } else if (shown(name) == "lsa_team_size") {
            options.lsa_team_size = as<int>(value, "lsa_team_size", "the number of ranks of an LSA team");
        } else if (shown(name) == "api_version") {
            api_version = as<unsigned int>(value, "api_version", "1, 2, 3");
        } else {
            of_config[name] = value;
        }
    }
    auto resolved = config_from<ncclEpGroupConfig_t>(config, of_config);
    resolved.version = api_version;
    const std::shared_ptr<CommunicatorState> communicator = communicator_from(comm);
    ncclEpGroup_t group = nullptr;
    expect_waits_go_on();
    communicator->call([&] { check(crossdockCreateGroup(&group, communicator->get(), &resolved, &options)); });
    communicator->add_user();
    state_ = std::make_shared<GroupState>(communicator, group, resolved.algorithm == NCCL_EP_ALGO_LOW_LATENCY);
}

Group::~Group() {
    if (state_ == nullptr || state_->is_closed() || state_->is_foreign()) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyErr_WarnEx(PyExc_ResourceWarning,
                     "a crossdock.Group was not closed: its memory stays until the process ends; use `with`", 1) != 0) {
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
    // Nothing may free what peers can still write into.
    new std::shared_ptr<GroupState>(state_);
}

void bind_traffic(nb::module_& module) {
    using Traffic = crossdockTraffic_t;
    nb::class_<Traffic>(module, "Traffic", "What this rank sent, by LSA team: crossdockTraffic_t.")
        .def_ro("lsa_team_size", &Traffic::lsa_team_size, "Ranks per LSA team; all ranks: one team, the rest is zero.")
        .def_ro("rows_inside", &Traffic::rows_inside, "To ranks of the own LSA team, this one included.")
        .def_ro("bytes_inside", &Traffic::bytes_inside, "With scales and headers.")
        .def_ro("rows_crossed", &Traffic::rows_crossed, "To the other LSA teams.")
        .def_ro("bytes_crossed", &Traffic::bytes_crossed, "With all that went there.")
        .def_ro("puts", &Traffic::puts, "Messages that carried bytes to other LSA teams.")
        .def_ro("signals", &Traffic::signals, "Messages that only raised a signal there.");
}

void bind_memory_use(nb::module_& module) {
    using Use = crossdockMemoryUse_t;
    nb::class_<Use>(module, "MemoryUse", "Bytes that a group and its handles hold on this rank: crossdockMemoryUse_t.")
        .def_ro("symmetric_bytes", &Use::symmetric_bytes, "Communication buffers: windows, from NCCL.")
        .def_ro("allocator_bytes", &Use::allocator_bytes, "All other device memory: from alloc, where that is set.")
        .def_ro("handle_bytes", &Use::handle_bytes, "Of allocator_bytes, that of handles.")
        .def_ro("host_bytes", &Use::host_bytes, "Host memory that the device writes.");
}

void bind_group(nb::module_& module) {
    bind_traffic(module);
    bind_memory_use(module);
    nb::class_<Group> group(module, "Group", R"(Experts spread over the ranks of a communicator: expert e on rank e / L.

All ranks make and close their groups together, in the same order. Use it as a context manager. All ranks make the
operations of a group in the same order. Threads that share a Group wait for each other.

The configuration is a GroupConfig, or its fields by keyword, or both; then keywords override. Further keywords:

- ht_masks=True: a high-throughput group goes on without ranks that do not answer.
- lsa_team_size=n: LSA teams have n ranks.
- invariant=True: the bits of a combined token depend on its own rows and weights only, not on the number of ranks, LSA
  teams, the mode, GPU or CPU (crossdockCreateGroup in crossdock.h). Layouts: expert-major.
- api_version=1: FP8 scales have the layout of nccl_ep.h's first version.)");
    group
        .def(
            "__init__",
            [](Group* self, nb::handle comm, nb::handle config, const nb::kwargs& fields) {
                new (self) Group(comm, config, fields);
            },
            "comm"_a.none(), "config"_a.none() = nb::none(), "fields"_a,
            nb::sig(
                "def __init__(self, comm: object, config: GroupConfig | None = None, **fields: typing.Any) -> None"))
        .def_static(
            "create",
            [](nb::handle comm, nb::handle config, const nb::kwargs& fields) {
                return nb::type<Group>()(comm, config, **fields);
            },
            "comm"_a.none(), "config"_a.none() = nb::none(), "fields"_a,
            nb::sig("def create(comm: object, config: GroupConfig | None = None, **fields: typing.Any) -> Group"),
            "The same as Group(comm, config, **fields), as nccl.ep spells it.")
        .def(
            "create_handle", &create_handle, "layout"_a, "topk_idx"_a.none(), nb::kw_only(),
            "layout_info"_a.none() = nb::none(), "config"_a.none() = nb::none(), "stream"_a.none() = nb::none(),
            "fields"_a, nb::rv_policy::take_ownership,
            nb::sig("def create_handle(self, layout: Layout, topk_idx: object, *, layout_info: LayoutInfo | None = "
                    "None, config: HandleConfig | None = None, stream: object = None, **fields: typing.Any) -> Handle"),
            "Makes a handle with this routing: init_handle, then Handle.update. topk_idx is [B, K] int32 or int64.")
        .def("init_handle", &init_handle, "layout"_a, "num_topk"_a.none(), nb::kw_only(),
             "config"_a.none() = nb::none(), "handle_mem"_a.none() = nb::none(), "fields"_a,
             nb::rv_policy::take_ownership,
             nb::sig("def init_handle(self, layout: Layout, num_topk: int, *, config: HandleConfig | None = None, "
                     "handle_mem: object = None, **fields: typing.Any) -> Handle"),
             "Makes a handle without routing, for K = num_topk choices per token. handle_mem: a uint8 array of "
             "handle_mem_size bytes for the handle. In high throughput, a second handle over the same memory uses the "
             "routing of the first.")
        .def("handle_mem_size", &handle_mem_size, "layout"_a, "num_topk"_a.none(), "config"_a.none() = nb::none(),
             "fields"_a,
             nb::sig("def handle_mem_size(self, layout: Layout, num_topk: int, config: HandleConfig | None = None, "
                     "**fields: typing.Any) -> int"),
             "Bytes that a handle needs.")
        .def("traffic", &traffic, nb::sig("def traffic(self) -> Traffic"),
             "Counts what this rank has sent within its LSA team and to others. Waits until operations are complete.")
        .def("memory", &memory, nb::sig("def memory(self) -> tuple[int, int]"),
             "Returns (symmetric, other): the bytes that the library holds for this group on this rank, without those "
             "of handles.")
        .def("memory_use", &memory_use, nb::sig("def memory_use(self) -> MemoryUse"),
             "Returns how much memory the group and its handles hold on this rank, and who allocated it.")
        .def_prop_ro("rank", [](const Group& self) { return self.state()->communicator().rank(); })
        .def_prop_ro("num_ranks", [](const Group& self) { return self.state()->communicator().num_ranks(); })
        .def_prop_ro("is_cpu", [](const Group& self) { return self.state()->communicator().is_cpu(); })
        .def_prop_ro("is_closed", [](const Group& self) { return self.state()->is_closed(); })
        .def_prop_ro(
            "ptr", [](const Group& self) { return reinterpret_cast<size_t>(self.state()->get()); },
            "The address of the ncclEpGroup_t, for C code.")
        .def(
            "close", [](Group& self) { self.state()->close(); },
            "Destroys the group. Collective: waits for the other ranks, at most for the timeout. May be called again.")
        .def(
            "destroy", [](Group& self) { self.state()->close(); }, "The same as close.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Group"))
        .def(
            "__exit__",
            [](Group& self, const nb::args& exception) { close_at_exit(exception, [&] { self.state()->close(); }); },
            nb::sig("def __exit__(self, *exception: object) -> None"));
    bind_masks(group);
}

}  // namespace crossdock::python
