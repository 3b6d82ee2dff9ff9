// SPDX-License-Identifier: Apache-2.0
// Kernels written against NCCL's Device API, drawn from the input: in the simulator correct ones end as the model says
// and without a report, and calls with any arguments end without a crash. The simulator has no queues, so some correct
// ones run over threads and the proxy, too.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "random_kernel.h"
#include "ways.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace random_kernel;
    if (size < 2) return 0;
    const uint64_t seed = data[0];
    Random random(seed, data + 2, size - 2);
    const bool is_wild = data[1] % 2 == 0;
    const Program program = is_wild ? draw_wild(random) : draw(random);
    std::string failure = in_simulation(setup_of(program), seed, body_of(program));
    if (!is_wild && failure.empty() && data[1] % 4 == 1) {
        failure = on({"threads", "2"}, setup_of(program), body_of(program));
    }
    if (!is_wild && !failure.empty()) {
        std::fprintf(stderr, "FAILED: %s\n", failure.c_str());
        std::abort();
    }
    return 0;
}
