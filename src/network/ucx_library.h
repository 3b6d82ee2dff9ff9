// SPDX-License-Identifier: Apache-2.0
// UCX's functions, resolved at run time, so that one binary runs with and without UCX.
#pragma once

#include <ucp/api/ucp.h>

namespace crossdock::network {

#define CROSSDOCK_UCX_FUNCTIONS(of)                                                                             \
    of(ucp_config_read) of(ucp_config_release) of(ucp_config_modify) of(ucp_init_version) of(ucp_cleanup)       \
        of(ucp_context_print_info) of(ucp_worker_create) of(ucp_worker_destroy) of(ucp_worker_get_address)      \
            of(ucp_worker_release_address) of(ucp_worker_progress) of(ucp_worker_set_am_recv_handler)           \
                of(ucp_am_send_nbx) of(ucp_am_recv_data_nbx) of(ucp_am_data_release) of(ucp_ep_create)          \
                    of(ucp_ep_flush_nbx) of(ucp_ep_close_nbx) of(ucp_request_check_status) of(ucp_request_free) \
                        of(ucs_status_string)

struct UcxLibrary {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declared name has none
#define CROSSDOCK_UCX_MEMBER(name) decltype(&::name) name = nullptr;
    CROSSDOCK_UCX_FUNCTIONS(CROSSDOCK_UCX_MEMBER)
#undef CROSSDOCK_UCX_MEMBER
};

// Loads UCX at the first call: the file that CROSSDOCK_UCX_LIBRARY names, else libucp.so.0. Throws ncclInvalidUsage
// with the loader's message if there is none.
const UcxLibrary& ucx();

}  // namespace crossdock::network
