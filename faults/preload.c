/* Loaded before libc (LD_PRELOAD): fails writes below a folder as a full disk does, and sets the clock.

   FAULT_FOLDER        writes below this folder are counted, in each process by itself
   FAULT_WRITE=N       the N-th of them fails with ENOSPC
   FAULT_LASTS=1       and so do all after it
   FAULT_CLOCK=A,B,N   the clock is A seconds ahead, and B seconds after it was read N times */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *folder;
static long fatal, lasts, ahead, later, reads_before;
static atomic_long writes, reads;

__attribute__((constructor)) static void begin(void) {
    const char *number = getenv("FAULT_WRITE"), *clock = getenv("FAULT_CLOCK");
    folder = getenv("FAULT_FOLDER");
    fatal = number ? atol(number) : 0;
    lasts = getenv("FAULT_LASTS") != NULL;
    if (clock) sscanf(clock, "%ld,%ld,%ld", &ahead, &later, &reads_before);
}

static int is_full(int fd) {
    char link[64], path[PATH_MAX];
    if (!folder || !fatal) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder))) return 0;
    long number = ++writes;
    if (number != fatal && !(lasts && number > fatal)) return 0;
    errno = ENOSPC;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) { return is_full(fd) ? -1 : REAL(write)(fd, data, size); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return is_full(fd) ? -1 : REAL(writev)(fd, parts, count);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return is_full(fd) ? -1 : REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return is_full(fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}
int posix_fallocate(int fd, off_t at, off_t size) { return is_full(fd) ? ENOSPC : REAL(posix_fallocate)(fd, at, size); }

static long shift(void) { return ++reads > reads_before ? later : ahead; }

int clock_gettime(clockid_t which, struct timespec *found) {
    int status = REAL(clock_gettime)(which, found);
    if (which == CLOCK_REALTIME) found->tv_sec += shift();
    return status;
}
int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    int status = REAL(gettimeofday)(found, zone);
    found->tv_sec += shift();
    return status;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
