/* Injects faults of the machine: this library is loaded before libc and intercepts the real binary's calls on files.
 *
 * A page of memory that the test shares with it says which call on which file fails, how, and when. Only files whose
 * name contains the name in FAULTS_FILE are affected. FAULTS_PAGE names the file of the page.
 *
 * FAULTS_WHILE names a file, and faults strike only while it exists: a disk is full until the file is removed.
 *
 * FAULTS_RECORD names a file to which every change of those files is appended, and every sync of them, of the folder
 * FAULTS_FOLDER, and of folders in it. Tests make of it what a power cut could have left. */
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
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum call { SYNC = 1, WRITE = 2, OPEN = 3 };
enum file { WAL = 1, DATABASE = 2, ANY = 3, SEGMENT = 4 };
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

/* The file of the recording, or -1. */
static int record_file = -1;

__attribute__((constructor)) static void attach(void) {
    const char *record_path = getenv("FAULTS_RECORD");
    if (record_path) record_file = open(record_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
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
    int is_segment = length > 8 && !strcmp(path + length - 8, ".segment");
    if (wanted == ANY) return is_wal || is_database || is_segment;
    return wanted == WAL ? is_wal : wanted == SEGMENT ? is_segment : is_database;
}

/* Writes the path of an open file; whether there is one. */
static int path_of(int descriptor, char *path, size_t size) {
    char link[32] = "/proc/self/fd/";
    char digits[12];
    int count = 0;
    for (int rest = descriptor; count == 0 || rest; rest /= 10) digits[count++] = (char)('0' + rest % 10);
    size_t end = strlen(link);
    while (count) link[end++] = digits[--count];
    link[end] = 0;
    ssize_t length = readlink(link, path, size - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static int matches_descriptor(int descriptor, int64_t wanted) {
    char path[4096];
    return path_of(descriptor, path, sizeof path) && matches(path, wanted);
}

/* What a record says. The same numbers are in power.rs. */
enum event { WRITTEN = 1, SYNC_BEGUN = 2, SYNC_DONE = 3, TRUNCATED = 4, CREATED = 5, REMOVED = 6, RENAMED = 7, FOLDER_MADE = 8 };

/* A record: this, the name of the file in its folder (of the folder itself: none), and the bytes. */
struct record {
    uint32_t event;
    uint32_t thread;
    uint32_t name_length;
    uint32_t count;
    uint64_t at;
};

/* The name in its folder of a file that is recorded, or NULL. The shared memory of SQLite does not survive a power cut. */
static const char *recorded_name(const char *path) {
    const char *wanted = getenv("FAULTS_FILE"), *folder = getenv("FAULTS_FOLDER");
    if (folder && !strcmp(path, folder)) return "";
    if (!wanted || !strstr(path, wanted)) return NULL;
    size_t length = strlen(path);
    if (length > 4 && !strcmp(path + length - 4, "-shm")) return NULL;
    size_t outer = folder ? strlen(folder) : 0;
    if (outer && !strncmp(path, folder, outer) && path[outer] == '/') return path + outer + 1;
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Appends a record. One call of writev appends it whole, whatever other threads append. */
static void record(enum event event, const char *path, uint64_t at, const void *bytes, size_t count) {
    int kept = errno;
    const char *name = record_file < 0 ? NULL : recorded_name(path);
    if (name) {
        struct record head = {event, (uint32_t)syscall(SYS_gettid), (uint32_t)strlen(name), (uint32_t)count, at};
        struct iovec parts[] = {{&head, sizeof head}, {(void *)name, strlen(name)}, {(void *)bytes, count}};
        if (writev(record_file, parts, 3) != (ssize_t)(sizeof head + strlen(name) + count)) abort();
    }
    errno = kept;
}

static void record_descriptor(enum event event, int descriptor, uint64_t at, const void *bytes, size_t count) {
    char path[4096];
    if (record_file >= 0 && path_of(descriptor, path, sizeof path)) record(event, path, at, bytes, count);
}

/* What is to be done about a call that matches: a fault, or nothing. */
static enum fault strike(enum call call) {
    if (!page || atomic_load(&page->fault) == NONE || atomic_load(&page->call) != (int64_t)call) return NONE;
    const char *condition = getenv("FAULTS_WHILE");
    if (condition && access(condition, F_OK)) return NONE;
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

#define FORWARD(kind, result, name, parameters, arguments, begun, done)     \
    static void *_Atomic real_##name;                                       \
    result name parameters {                                                \
        enum fault fault = strike_descriptor(kind, descriptor);             \
        if (before(fault)) return -1;                                       \
        begun;                                                              \
        result answer = REAL(name) arguments;                               \
        if (answer >= 0) done;                                              \
        after(fault);                                                       \
        return answer;                                                      \
    }

#define SYNCS(event) record_descriptor(event, descriptor, 0, NULL, 0)
#define WROTE(at) record_descriptor(WRITTEN, descriptor, (uint64_t)(at), bytes, (size_t)answer)

FORWARD(SYNC, int, fsync, (int descriptor), (descriptor), SYNCS(SYNC_BEGUN), SYNCS(SYNC_DONE))
FORWARD(SYNC, int, fdatasync, (int descriptor), (descriptor), SYNCS(SYNC_BEGUN), SYNCS(SYNC_DONE))
FORWARD(WRITE, ssize_t, write, (int descriptor, const void *bytes, size_t count), (descriptor, bytes, count), ,
        WROTE(record_file < 0 ? 0 : lseek(descriptor, 0, SEEK_CUR) - answer))
FORWARD(WRITE, ssize_t, pwrite, (int descriptor, const void *bytes, size_t count, off_t at), (descriptor, bytes, count, at), ,
        WROTE(at))
FORWARD(WRITE, ssize_t, pwrite64, (int descriptor, const void *bytes, size_t count, off64_t at), (descriptor, bytes, count, at), ,
        WROTE(at))

static void *_Atomic real_writev;
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    /* The recorder itself calls this. */
    if (descriptor == record_file) return REAL(writev)(descriptor, parts, count);
    enum fault fault = strike_descriptor(WRITE, descriptor);
    if (before(fault)) return -1;
    ssize_t answer = REAL(writev)(descriptor, parts, count);
    if (answer > 0 && record_file >= 0) {
        uint64_t at = (uint64_t)(lseek(descriptor, 0, SEEK_CUR) - answer);
        size_t left = (size_t)answer;
        for (int part = 0; part < count && left; part++) {
            size_t bytes = parts[part].iov_len < left ? parts[part].iov_len : left;
            if (bytes) record_descriptor(WRITTEN, descriptor, at, parts[part].iov_base, bytes);
            at += bytes;
            left -= bytes;
        }
    }
    after(fault);
    return answer;
}

static void *_Atomic real_mkdir;
int mkdir(const char *path, mode_t mode) {
    int answer = REAL(mkdir)(path, mode);
    if (!answer) record(FOLDER_MADE, path, 0, NULL, 0);
    return answer;
}

static void *_Atomic real_ftruncate;
int ftruncate(int descriptor, off_t length) {
    int answer = REAL(ftruncate)(descriptor, length);
    if (!answer) record_descriptor(TRUNCATED, descriptor, (uint64_t)length, NULL, 0);
    return answer;
}

static void *_Atomic real_ftruncate64;
int ftruncate64(int descriptor, off64_t length) {
    int answer = REAL(ftruncate64)(descriptor, length);
    if (!answer) record_descriptor(TRUNCATED, descriptor, (uint64_t)length, NULL, 0);
    return answer;
}

/* A recording would be wrong without what these do, so a program that calls them cannot be recorded. */
static void *_Atomic real_posix_fallocate64;
int posix_fallocate64(int descriptor, off64_t at, off64_t length) {
    char path[4096];
    if (record_file >= 0 && path_of(descriptor, path, sizeof path) && recorded_name(path)) abort();
    return REAL(posix_fallocate64)(descriptor, at, length);
}

static void *_Atomic real_unlink;
int unlink(const char *path) {
    int answer = REAL(unlink)(path);
    if (!answer) record(REMOVED, path, 0, NULL, 0);
    return answer;
}

static void *_Atomic real_rename;
int rename(const char *from, const char *to) {
    int answer = REAL(rename)(from, to);
    const char *name = record_file < 0 ? NULL : recorded_name(to);
    if (!answer && name) record(RENAMED, from, 0, name, strlen(name));
    return answer;
}

static int open_with(void *_Atomic *slot, const char *name, const char *path, int flags, mode_t mode) {
    int counts = (flags & O_ACCMODE) != O_RDONLY && page && matches(path, atomic_load(&page->file));
    enum fault fault = counts ? strike(OPEN) : NONE;
    if (before(fault)) return -1;
    int (*made)(const char *, int, ...) = (int (*)(const char *, int, ...))real(slot, name);
    int is_new = record_file >= 0 && (flags & O_CREAT) && access(path, F_OK) != 0;
    int is_emptied = record_file >= 0 && (flags & O_TRUNC) && !is_new;
    int descriptor = made(path, flags, mode);
    if (descriptor >= 0 && is_new) record(CREATED, path, 0, NULL, 0);
    if (descriptor >= 0 && is_emptied) record(TRUNCATED, path, 0, NULL, 0);
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
