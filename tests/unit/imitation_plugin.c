/* SPDX-License-Identifier: Apache-2.0
 * A library with the network plugin's tables of functions, all of them empty; with COUNTS also what ours says of
 * itself: it has as many contexts as IMITATED_CONTEXTS says, and IMITATED_ERROR is its last error. TOLD_WORDS then has
 * the address and the bytes of the signal words that it was told. */
#include <stdio.h>
#include <stdlib.h>

extern const void* ncclRmaPlugin_v14[21];
const void* ncclRmaPlugin_v14[21];

#ifdef COUNTS
int crossdockRmaPluginContexts(void);
void crossdockRmaPluginLastError(char* message, size_t bytes);
int crossdockRmaPluginSignalWords(const void* words, size_t bytes);

static const char* value_of(const char* variable) {
    const char* value = getenv(variable);
    return value != NULL ? value : "";
}
int crossdockRmaPluginContexts(void) { return atoi(value_of("IMITATED_CONTEXTS")); }
void crossdockRmaPluginLastError(char* message, size_t bytes) {
    snprintf(message, bytes, "%s", value_of("IMITATED_ERROR"));
}
int crossdockRmaPluginSignalWords(const void* words, size_t bytes) {
    char text[64];
    snprintf(text, sizeof(text), "%p %zu", words, bytes);
    setenv("TOLD_WORDS", text, 1);
    return 1;
}
#endif
