// A wall clock that does not jump: the time at the start of the program plus the monotonic clock.
// Preloaded into Postgres by scripts/steady-postgres.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/time.h>
#include <time.h>

#define SECOND 1000000000L

static int (*clock_of_libc)(clockid_t, struct timespec *);
static long long offset;

static long long nanoseconds(clockid_t clock) {
    struct timespec now;
    clock_of_libc(clock, &now);
    return now.tv_sec * (long long)SECOND + now.tv_nsec;
}

// The processes that Postgres forks inherit the offset.
__attribute__((constructor)) static void begin(void) {
    clock_of_libc = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    offset = nanoseconds(CLOCK_REALTIME) - nanoseconds(CLOCK_MONOTONIC);
}

int clock_gettime(clockid_t clock, struct timespec *result) {
    if (!clock_of_libc) begin();
    if (clock != CLOCK_REALTIME) return clock_of_libc(clock, result);
    long long now = nanoseconds(CLOCK_MONOTONIC) + offset;
    result->tv_sec = now / SECOND;
    result->tv_nsec = now % SECOND;
    return 0;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    result->tv_sec = now.tv_sec;
    result->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
