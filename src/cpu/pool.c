/* A pool of detached threads that wait on one condition variable. It never holds up a caller: a
 * thread that cannot be made, or is late, is simply not there, and the work is taken from a
 * counter by whoever came. After a fork the child has no threads and starts a pool of its own. */
#define _GNU_SOURCE
#include "pool.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "cpu.h"

enum { MOST_THREADS = 1024 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake; /* `wanted` has grown */
    pthread_cond_t idle; /* `working` has become 0 */
    void (*body)(void *context);
    void *context;
    int32_t threads; /* made so far, none of them the caller's */
    int32_t wanted;  /* may still begin to work on the body above */
    int32_t working;
    bool busy; /* some caller's from its first step to its last */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .idle = PTHREAD_COND_INITIALIZER};

static void *serve(void *nothing)
{
    (void)nothing;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.wanted == 0) pthread_cond_wait(&pool.wake, &pool.lock);
        void (*body)(void *) = pool.body;
        void *context = pool.context;
        pool.wanted--;
        pool.working++;
        pthread_mutex_unlock(&pool.lock);
        body(context);
        pthread_mutex_lock(&pool.lock);
        if (--pool.working == 0) pthread_cond_signal(&pool.idle);
    }
    return NULL;
}

/* The lock may have been held by a thread that the child does not have. */
static void start_over(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.idle, NULL);
    pool.threads = pool.wanted = pool.working = 0;
    pool.busy = false;
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, start_over);
}

/* With the lock held. Signals are for the threads of the program, not for these. */
static void grow(int32_t threads)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.threads < threads) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, NULL)) break;
        pthread_setname_np(thread, "sparse_mla");
        pthread_detach(thread);
        pool.threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* The caller may have set its thread to flush subnormal numbers, as torch.set_flush_denormal does,
 * or to round otherwise: its share of the work must be the same as another thread's. */
static void run_share(void (*body)(void *context), void *context)
{
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    body(context);
    fesetenv(&callers);
}

void smla_pool_run(void (*body)(void *context), void *context, int32_t threads)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);

    bool ours = false;
    if (threads > 1) {
        pthread_mutex_lock(&pool.lock);
        if (!pool.busy) {
            ours = pool.busy = true;
            grow(threads - 1);
            pool.body = body;
            pool.context = context;
            pool.wanted = pool.threads < threads - 1 ? pool.threads : threads - 1;
            if (pool.wanted == 1)
                pthread_cond_signal(&pool.wake);
            else
                pthread_cond_broadcast(&pool.wake);
        }
        pthread_mutex_unlock(&pool.lock);
    }
    run_share(body, context);
    if (ours) {
        pthread_mutex_lock(&pool.lock);
        pool.wanted = 0;
        while (pool.working) pthread_cond_wait(&pool.idle, &pool.lock);
        pool.busy = false;
        pthread_mutex_unlock(&pool.lock);
    }
}

/* -------------------------------------------------------------------------- how many */

static int32_t thread_count;

static void count_threads(void)
{
    const char *text = getenv("SPARSE_MLA_NUM_THREADS");
    if (text && *text) {
        char *end;
        const long number = strtol(text, &end, 10);
        if (*end == '\0' && number >= 1 && number <= MOST_THREADS) {
            thread_count = (int32_t)number;
            return;
        }
    }
    cpu_set_t set;
    long cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                            : sysconf(_SC_NPROCESSORS_ONLN);
    thread_count = cpus < 1 ? 1 : cpus > MOST_THREADS ? MOST_THREADS : (int32_t)cpus;
}

int32_t smla_cpu_threads(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, count_threads);
    return thread_count;
}
