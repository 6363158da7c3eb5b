//go:build cuda

// The symbols of the CUDA driver without the driver: each jumps to where dlopen found it, and
// answers an error until then. Package cu ends the process where cuInit fails, so ours never
// does; what really happened is kept for cudashim_status.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "symbols.h"

static int missing(void) { return 500; } // CUDA_ERROR_NOT_FOUND

#define SLOT(n) void *cudashim_p_##n = (void *)missing;
SYMBOLS(SLOT)

#if defined(__x86_64__)
#define JUMP(n) \
  __asm__(".text\n.globl " #n "\n.type " #n ",@function\n" #n ":\n movq cudashim_p_" #n "@GOTPCREL(%rip),%r11\n jmp *(%r11)\n.size " #n ",.-" #n "\n");
#elif defined(__aarch64__)
#define JUMP(n) \
  __asm__(".text\n.globl " #n "\n.type " #n ",@function\n" #n ":\n adrp x16,:got:cudashim_p_" #n "\n ldr x16,[x16,:got_lo12:cudashim_p_" #n "]\n ldr x16,[x16]\n br x16\n.size " #n ",.-" #n "\n");
#else
#error "the CUDA build is for amd64 and arm64"
#endif
SYMBOLS(JUMP)

static void *library;
static int status = -1;
static char message[512];

int cudashim_status(void) { return status; }
const char *cudashim_message(void) { return message; }
void *cudashim_symbol(const char *name) { return library ? dlsym(library, name) : 0; }

int cuInit(unsigned flags) {
  const char *path = getenv("MEANDER_LIBCUDA");
  library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    const char *e = dlerror();
    strncpy(message, e ? e : "dlopen failed", sizeof message - 1);
    return 0;
  }
#define RESOLVE(n) \
  { \
    void *p = dlsym(library, #n); \
    if (p) cudashim_p_##n = p; \
  }
  SYMBOLS(RESOLVE)
  int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
  status = init ? init(flags) : 500;
  return 0;
}
