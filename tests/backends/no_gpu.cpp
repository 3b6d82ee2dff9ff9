// SPDX-License-Identifier: Apache-2.0
// The GPU backends of a build without CUDA.
#include "internal.h"

namespace crossdock::testing {

std::string why_no_gpu() { return "this build has no CUDA"; }
void free_kept_communicators() {}
RunReport run_on_gpus(const BackendSpec&, int, const RankProgram&) { throw std::logic_error(why_no_gpu()); }

}  // namespace crossdock::testing
