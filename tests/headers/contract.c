// SPDX-License-Identifier: Apache-2.0
// The binary contract of nccl_ep.h in C: every size, offset, value and initialiser is what callers were compiled with.
#include "contract.h"

int main(void) { return report(check_initialisers()) || report(check_use()); }
