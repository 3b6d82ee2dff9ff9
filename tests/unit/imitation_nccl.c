/* SPDX-License-Identifier: Apache-2.0
 * A library that claims to be an NCCL of version IMITATED_VERSION and has nothing else. */
int ncclGetVersion(int* version);

int ncclGetVersion(int* version) {
    *version = IMITATED_VERSION;
    return 0;
}
