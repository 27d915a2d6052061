/* The threads of the CPU backend: one small pool for the process, made when it is first needed. */
#ifndef SMLA_POOL_H
#define SMLA_POOL_H

#include <stdint.h>

/* Runs body(context) on the calling thread and on up to `threads` - 1 others at the same time, and
 * returns when all have returned; body takes its work from a counter in the context. May be called
 * from any number of threads: while the pool serves one of them the others work alone. */
void smla_pool_run(void (*body)(void *context), void *context, int32_t threads);

#endif
