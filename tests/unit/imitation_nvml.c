/* SPDX-License-Identifier: Apache-2.0
 * A library like NVML, for GPUs whose UUID ends in the digits 0 to 7: links all of even numbers by NVLink, and those of
 * odd numbers. IMITATED_NVML_CODE is what starting it returns. */
#include <stdlib.h>
#include <string.h>

#ifndef WITHOUT_LINKS
int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByUUID(const char* uuid, const char** device);
int nvmlDeviceGetP2PStatus(const char* first, const char* second, unsigned capability, unsigned* status);

enum { kSuccess = 0, kNotFound = 6, kOk = 0, kNotSupported = 5, kNvlink = 2 };
static const char kDigits[] = "01234567";

int nvmlInit_v2(void) {
    const char* code = getenv("IMITATED_NVML_CODE");
    return code != NULL ? atoi(code) : kSuccess;
}
int nvmlShutdown(void) { return kSuccess; }
int nvmlDeviceGetHandleByUUID(const char* uuid, const char** device) {
    static const char kFormat[] = "GPU-00112233-4455-6677-8899-aabbccddee0";
    const size_t length = sizeof(kFormat) - 1;
    if (strncmp(uuid, kFormat, length) != 0) return kNotFound;
    const char* digit = strchr(kDigits, uuid[length]);
    if (digit == NULL || *digit == '\0') return kNotFound;
    *device = digit;
    return kSuccess;
}
int nvmlDeviceGetP2PStatus(const char* first, const char* second, unsigned capability, unsigned* status) {
    *status = capability == kNvlink && (first - second) % 2 == 0 ? kOk : kNotSupported;
    return kSuccess;
}
#else
int nvmlInit(void);
int nvmlInit(void) { return 0; }
#endif
