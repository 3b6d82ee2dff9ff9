// SPDX-License-Identifier: Apache-2.0
// One rank's part of A2SGD: the pieces of its gradient, the memory of a step, and the two halves of a step.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "a2sgd/kernels/arguments.h"
#include "core/error.h"
#include "core/failure_watch.h"
#include "core/memory.h"
#include "core/team_view.h"
#include "crossdock/a2sgd.h"

namespace crossdock {

// A checked piece of the caller's gradient.
struct A2sgdPiece {
    std::byte* data;
    uint64_t count;
    DType dtype;
    std::string name;

    bool operator==(const A2sgdPiece&) const = default;
};

class A2sgd {
  public:
    // Collective. config may be null.
    static std::shared_ptr<A2sgd> create(std::shared_ptr<Communicator> communicator,
                                         const crossdockA2sgdPiece_t* pieces, size_t num_pieces,
                                         const crossdockA2sgdConfig_t* config);
    ~A2sgd();

    // Collective; waits no longer than the timeout.
    void destroy() noexcept;

    void set_pieces(const crossdockA2sgdPiece_t* pieces, size_t num_pieces);
    void begin(cudaStream_t stream);
    void end(cudaStream_t stream);
    crossdockA2sgdReport_t report();

  private:
    struct Settings {
        bool sums_in_fp64 = false;
        bool skips_nonfinite = false;
        uint64_t timeout_ns = 0;
        uint32_t lsa_team_size = 0;
        bool is_quiet = false;
    };
    static Settings resolve(Communicator& communicator, const crossdockA2sgdConfig_t* caller);

    A2sgd(std::shared_ptr<Communicator> communicator, const Settings& settings, std::vector<A2sgdPiece> pieces);
    void expect_equal_on_all_ranks() const;
    void expect_working() const;
    crossdockDiagnosis_t diagnosis() const;
    std::optional<Error> failure() const;      // the reason if the object has failed
    void use(std::vector<A2sgdPiece> pieces);  // builds the chunks
    A2sgdArgs args() const;
    LaunchShape pass_shape(uint64_t turns, size_t shared_bytes) const;
    Runtime& runtime() const { return communicator_->runtime(); }

    std::shared_ptr<Communicator> communicator_;
    Settings settings_;
    std::vector<A2sgdPiece> pieces_;
    uint64_t count_ = 0;
    uint64_t num_chunks_ = 0;
    bool is_between_halves_ = false;
    bool is_destroyed_ = false;

    HostVisibleStatus* status_ = nullptr;
    A2sgdReport* report_ = nullptr;  // host-visible
    DeviceMemory state_;             // A2sgdState, then WaitControl
    DeviceMemory chunks_;
    DeviceMemory partials_;
    std::unique_ptr<SymmetricMemory> memory_;
    std::unique_ptr<TeamView> team_;
    std::unique_ptr<StreamOrder> order_;
    FailureWatch::Registration watch_;  // as a group's
};

}  // namespace crossdock
