/* Preloaded into a program: its wall clock is $WRONG_BY seconds ahead (or behind), its monotonic clock is right. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t wrong_by(void) {
    const char *seconds = getenv("WRONG_BY");
    return seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += wrong_by();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec t;
    int failed = clock_gettime(CLOCK_REALTIME, &t);
    (void)zone;
    if (!failed) *now = (struct timeval){t.tv_sec, t.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}
