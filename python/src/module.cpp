// SPDX-License-Identifier: Apache-2.0
//
// crossdock._core: the C API for Python. crossdock/__init__.py says what of it is public.
#include "a2sgd.h"
#include "arguments.h"
#include "communicator.h"
#include "configs.h"
#include "deep_ep_calls.h"
#include "elastic.h"
#include "error.h"
#include "forms.h"
#include "group.h"
#include "group_masks.h"
#include "handle.h"
#include "interrupt.h"
#include "routing.h"
#include "stream.h"
#include "tensor.h"
#include "torch_maker.h"
#include "torch_view.h"
#include "turn.h"
#include "window.h"

NB_MODULE(_core, module) {
    using namespace crossdock::python;
    module.doc() = "The C API of Crossdock.";
    // Objects that are not closed stay until the process ends, as peers may write there; a ResourceWarning reports
    // them.
    nanobind::set_leak_warnings(false);
    bind_errors(module);
    bind_interrupts(module);
    bind_enums(module);
    bind_configs(module);
    bind_windows(module);
    bind_tensor(module);
    bind_communicator(module);
    bind_arguments(module);
    bind_diagnosis(module);
    bind_handle(module);
    bind_group(module);
    bind_a2sgd(module);
    bind_forms(module);
    bind_torch_makers(module);
    bind_torch_views(module);
    bind_turns(module);
    bind_deep_ep_calls(module);
    bind_elastic(module);
    bind_routing(module);
    bind_streams(module);
    module.def(
        "get_version",
        [] {
            int version = 0;
            check(ncclEpGetVersion(&version));
            return version;
        },
        "NCCL_EP_VERSION_CODE of the library: major * 10000 + minor * 100 + patch.");
#if defined(CROSSDOCK_WITH_CUDA)
    module.attr("has_cuda") = true;
    module.attr("gpu_architectures") = CROSSDOCK_BUILT_ARCHITECTURES;
#else
    module.attr("has_cuda") = false;
    module.attr("gpu_architectures") = nanobind::none();
#endif
}
