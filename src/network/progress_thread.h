// SPDX-License-Identifier: Apache-2.0
// A background thread that progresses meshes whose owner does not call progress(): a rank that only receives may never
// call.
#pragma once

#include <memory>

namespace crossdock::network {

class Mesh;

class ProgressThread {
  public:
    // The thread progresses the mesh until the registration is released.
    using Registration = std::shared_ptr<void>;
    static Registration add(Mesh& mesh);
};

}  // namespace crossdock::network
