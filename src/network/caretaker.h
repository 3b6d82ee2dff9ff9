// SPDX-License-Identifier: Apache-2.0
// A thread that progresses meshes that nobody else progresses: a rank that only receives may have no reason to call.
#pragma once

#include <memory>

namespace crossdock::network {

class Mesh;

class Caretaker {
  public:
    // From now until the place is given up the thread looks after the mesh.
    using Place = std::shared_ptr<void>;
    static Place look_after(Mesh& mesh);
};

}  // namespace crossdock::network
