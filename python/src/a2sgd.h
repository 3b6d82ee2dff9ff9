// SPDX-License-Identifier: Apache-2.0
//
// crossdock.A2sgd.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "array.h"
#include "communicator.h"
#include "crossdock/a2sgd.h"

namespace crossdock::python {

class A2sgd {
  public:
    A2sgd(nanobind::handle comm, nanobind::handle pieces, nanobind::handle names, const std::string& sums,
          bool skip_nonfinite, double timeout_s, int lsa_team_size);
    // Destroyed by all ranks together: one that was not closed stays until the process ends, and a ResourceWarning says
    // so.
    ~A2sgd();
    A2sgd(const A2sgd&) = delete;
    A2sgd& operator=(const A2sgd&) = delete;

    void set_pieces(nanobind::handle pieces);
    void begin(nanobind::handle stream);
    void end(nanobind::handle stream);
    crossdockA2sgdReport_t report();
    void close();
    CommunicatorState& communicator() const { return *communicator_; }

  private:
    struct Pieces {
        std::vector<Array> arrays;
        std::vector<crossdockA2sgdPiece_t> described;
    };
    Pieces read(nanobind::handle pieces) const;
    void expect_open() const;

    std::shared_ptr<CommunicatorState> communicator_;
    std::vector<std::string> names_;
    Pieces pieces_;
    crossdockA2sgd_t a2sgd_ = nullptr;
};

void bind_a2sgd(nanobind::module_& module);

}  // namespace crossdock::python
