/* SPDX-License-Identifier: Apache-2.0 */
/* Nothing of its own: whoever opens nccl_ep_home/lib/libnccl_ep.so finds the functions of libnccl_ep.so.0, which it
   needs. A wheel has no links, and TransformerEngine opens this name below NCCL_EP_HOME, by its full path. */
typedef int crossdock_nccl_ep_home;
