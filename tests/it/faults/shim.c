/* Injects faults of the machine: this library is loaded before libc and intercepts the real binary's calls on files.
 *
 * A page of memory that the test shares with it says which call on which file fails, how, and when. Only files whose
 * name contains the name in FAULTS_FILE are affected. FAULTS_PAGE names the file of the page. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum call { SYNC = 1, WRITE = 2, OPEN = 3 };
enum file { WAL = 1, DATABASE = 2, ANY = 3 };
enum fault { NONE = 0, FAIL = 1, KILL_BEFORE = 2, KILL_AFTER = 3, DELAY = 4 };

/* The same fields, in the same order, as in faults.rs. */
struct page {
    _Atomic int64_t fault;
    _Atomic int64_t call;
    _Atomic int64_t file;
    /* The fault strikes when this many calls, counted down, have matched. */
    _Atomic int64_t countdown;
    /* It strikes again at every later call. */
    _Atomic int64_t lasts;
    /* The error number of FAIL, microseconds of DELAY. */
    _Atomic int64_t argument;
    _Atomic int64_t struck;
    /* Seconds that the wall clock is off. */
    _Atomic int64_t wall_clock_offset;
};

static struct page *page;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("FAULTS_PAGE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) page = mapped;
    close(file);
}

/* Whether a file is one of the database's, and which. */
static int matches(const char *path, int64_t wanted) {
    const char *name = getenv("FAULTS_FILE");
    if (!name || !strstr(path, name)) return 0;
    size_t length = strlen(path);
    int is_wal = length > 4 && !strcmp(path + length - 4, "-wal");
    int is_database = length > 3 && !strcmp(path + length - 3, ".db");
    /* Copies that have no name yet. */
    if (length > 8 && !strcmp(path + length - 8, ".partial")) is_database = 1;
    return wanted == ANY ? (is_wal || is_database) : wanted == WAL ? is_wal : is_database;
}

static int matches_descriptor(int descriptor, int64_t wanted) {
    char link[32] = "/proc/self/fd/", path[4096];
    char digits[12];
    int count = 0;
    for (int rest = descriptor; count == 0 || rest; rest /= 10) digits[count++] = (char)('0' + rest % 10);
    size_t end = strlen(link);
    while (count) link[end++] = digits[--count];
    link[end] = 0;
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return matches(path, wanted);
}

/* What is to be done about a call that matches: a fault, or nothing. */
static enum fault strike(enum call call) {
    if (!page || atomic_load(&page->fault) == NONE || atomic_load(&page->call) != (int64_t)call) return NONE;
    int64_t left = atomic_fetch_sub(&page->countdown, 1) - 1;
    if (left > 0 || (left < 0 && !atomic_load(&page->lasts))) return NONE;
    atomic_fetch_add(&page->struck, 1);
    return (enum fault)atomic_load(&page->fault);
}

static enum fault strike_descriptor(enum call call, int descriptor) {
    if (!page || atomic_load(&page->fault) == NONE || atomic_load(&page->call) != (int64_t)call) return NONE;
    return matches_descriptor(descriptor, atomic_load(&page->file)) ? strike(call) : NONE;
}

/* Strikes before the call; whether the call fails instead of being made. */
static int before(enum fault fault) {
    if (fault == KILL_BEFORE) kill(getpid(), SIGKILL);
    if (fault == DELAY) {
        int64_t micros = atomic_load(&page->argument);
        struct timespec pause = {micros / 1000000, micros % 1000000 * 1000};
        nanosleep(&pause, NULL);
    }
    if (fault != FAIL) return 0;
    errno = (int)atomic_load(&page->argument);
    return 1;
}

static void after(enum fault fault) {
    if (fault == KILL_AFTER) kill(getpid(), SIGKILL);
}

#define REAL(name) ((__typeof__(&name))real(&real_##name, #name))
static void *real(void *_Atomic *slot, const char *name) {
    void *found = atomic_load(slot);
    if (!found) atomic_store(slot, found = dlsym(RTLD_NEXT, name));
    return found;
}

#define FORWARD(kind, result, name, parameters, arguments)                  \
    static void *_Atomic real_##name;                                       \
    result name parameters {                                                \
        enum fault fault = strike_descriptor(kind, descriptor);             \
        if (before(fault)) return -1;                                       \
        result answer = REAL(name) arguments;                               \
        after(fault);                                                       \
        return answer;                                                      \
    }

FORWARD(SYNC, int, fsync, (int descriptor), (descriptor))
FORWARD(SYNC, int, fdatasync, (int descriptor), (descriptor))
FORWARD(WRITE, ssize_t, write, (int descriptor, const void *bytes, size_t count), (descriptor, bytes, count))
FORWARD(WRITE, ssize_t, pwrite, (int descriptor, const void *bytes, size_t count, off_t at), (descriptor, bytes, count, at))
FORWARD(WRITE, ssize_t, pwrite64, (int descriptor, const void *bytes, size_t count, off64_t at), (descriptor, bytes, count, at))

static int open_with(void *_Atomic *slot, const char *name, const char *path, int flags, mode_t mode) {
    int counts = (flags & O_ACCMODE) != O_RDONLY && page && matches(path, atomic_load(&page->file));
    enum fault fault = counts ? strike(OPEN) : NONE;
    if (before(fault)) return -1;
    int (*made)(const char *, int, ...) = (int (*)(const char *, int, ...))real(slot, name);
    int descriptor = made(path, flags, mode);
    after(fault);
    return descriptor;
}

static void *_Atomic real_open;
int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open_with(&real_open, "open", path, flags, mode);
}

static void *_Atomic real_open64;
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open_with(&real_open64, "open64", path, flags, mode);
}

static void *_Atomic real_clock_gettime;
int clock_gettime(clockid_t clock, struct timespec *time) {
    int answer = REAL(clock_gettime)(clock, time);
    if (!answer && page && clock == CLOCK_REALTIME) time->tv_sec += atomic_load(&page->wall_clock_offset);
    return answer;
}

static void *_Atomic real_gettimeofday;
int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    int answer = REAL(gettimeofday)(time, zone);
    if (!answer && page) time->tv_sec += atomic_load(&page->wall_clock_offset);
    return answer;
}
