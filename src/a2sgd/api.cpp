// SPDX-License-Identifier: Apache-2.0
// The functions of crossdock/a2sgd.h.
#include "a2sgd/a2sgd.h"

#include "core/boundary.h"
#include "core/registry.h"
#include "core/structs.h"

using namespace crossdock;

namespace {

Registry<A2sgd>& objects() {
    static auto* const registry = new Registry<A2sgd>("a2sgd");
    return *registry;
}
const MadeAtLoad a2sgd_objects_made_at_load(objects);

}  // namespace

ncclResult_t crossdockA2sgdCreate(crossdockA2sgd_t* a2sgd, ncclComm_t comm, const crossdockA2sgdPiece_t* pieces,
                                  size_t num_pieces, const crossdockA2sgdConfig_t* config) {
    return boundary([&] {
        require(a2sgd != nullptr, ncclInvalidArgument, "a2sgd is NULL");
        auto made = A2sgd::create(communicator_of(comm), pieces, num_pieces, config);
        *a2sgd = static_cast<crossdockA2sgd_t>(objects().add(std::move(made)));
    });
}

ncclResult_t crossdockA2sgdSetPieces(crossdockA2sgd_t a2sgd, const crossdockA2sgdPiece_t* pieces, size_t num_pieces) {
    return boundary([&] { objects().find(a2sgd)->set_pieces(pieces, num_pieces); });
}

ncclResult_t crossdockA2sgdBegin(crossdockA2sgd_t a2sgd, cudaStream_t stream) {
    return boundary([&] { objects().find(a2sgd)->begin(stream); });
}

ncclResult_t crossdockA2sgdEnd(crossdockA2sgd_t a2sgd, cudaStream_t stream) {
    return boundary([&] { objects().find(a2sgd)->end(stream); });
}

ncclResult_t crossdockA2sgdReport(crossdockA2sgd_t a2sgd, crossdockA2sgdReport_t* report) {
    return boundary([&] {
        const auto found = objects().find(a2sgd);
        mandatory_struct(report, sizeof(crossdockA2sgdReport_t), "report");
        *report = found->report();
    });
}

ncclResult_t crossdockA2sgdDestroy(crossdockA2sgd_t a2sgd) {
    return boundary([&] {
        if (a2sgd != nullptr) objects().remove(a2sgd)->destroy();
    });
}
