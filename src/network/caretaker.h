// SPDX-License-Identifier: Apache-2.0
// A thread that progresses meshes that nobody else progresses: a rank that only receives may have no reason to call.
#pragma once

#include <memory>

namespace crossdock::network {

class Mesh;

class Caretaker {
  public:
    // From now until the registration is released the thread looks after the mesh.
    using Registration = std::shared_ptr<void>;
    static Registration look_after(Mesh& mesh);
};

}  // namespace crossdock::network
