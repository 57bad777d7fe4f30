/* An emulated libnvidia-ml.so.1 for tests: the real pynvml runs on it.
 *
 * Its GPUs live in a shared file, so that several processes see the same ones: limits outlive processes, and load is
 * kept per process. Power follows the model of zeus_flows/gpu/simulated.py, energy is integrated exactly.
 * It proves the code that talks to NVML, not the physics of a GPU.
 *
 * Switches, read at every call:
 *   NVMLEMU_STATE          the shared file (required)
 *   NVMLEMU_GPUS           models to put into a fresh state, such as v100,v100,p100
 *   NVMLEMU_PERMISSION     allow, deny, or root (the default: as the effective user)
 *   NVMLEMU_NOT_SUPPORTED  functions that answer NOT_SUPPORTED
 *   NVMLEMU_FAIL           function:code:after[:gpu], comma separated: after so many calls answer with an NVML code;
 *                          function may be * for any
 *   NVMLEMU_UPDATE_MS      period of the counter and the power sensor; 0 for ideal ones
 *   NVMLEMU_NOISE_MW       greatest error of a power reading
 *   NVMLEMU_FROZEN         the energy counter never advances
 *   NVMLEMU_COUNTER_OFF    share by which the energy counter counts too much, such as 0.05
 *   NVMLEMU_LIMIT          ignored: limits are taken, told, and do nothing; stuck: they can be lowered, and not raised
 *   NVMLEMU_SET_MS         how long setting a limit takes
 *   NVMLEMU_MIG            index of a GPU in MIG mode
 *   NVMLEMU_CLOCK          virtual: time passes only by nvmlEmuAdvance
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_GPUS 8
#define MAX_LOADS 16
#define MAX_FUNCTIONS 64
#define CLOCK_STEP_MHZ 15
#define MAGIC 0x5a464e32u

typedef int Return;
enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN = 999 };
enum { ARCH_PASCAL = 4, ARCH_VOLTA = 5, ARCH_TURING = 6, ARCH_AMPERE = 7 };

typedef struct {
    const char *key, *name;
    unsigned arch, min_mw, max_mw, min_mhz, max_mhz, memory_mhz;
    double idle, active, knee, rise, slowest;
} Chip;

static const Chip CHIPS[] = {
    {"v100", "Tesla V100-PCIE-32GB", ARCH_VOLTA, 100000, 250000, 135, 1380, 877, 34.16, 77.03, .4116, .5382, .3612},
    {"a40", "NVIDIA A40", ARCH_AMPERE, 100000, 300000, 210, 1740, 7251, 79.39, 88.79, .719, .7577, .1721},
    {"p100", "Tesla P100-PCIE-16GB", ARCH_PASCAL, 125000, 250000, 544, 1328, 715, 32.79, 91.42, .4708, .9323, .3128},
    {"rtx6000", "Quadro RTX 6000", ARCH_TURING, 100000, 260000, 300, 2100, 7001, 52.38, 76.15, .7107, .487, .3265},
};

typedef struct { int pid; double seconds, full_power, active, clock_bound; } Load;

typedef struct {
    int chip;
    unsigned limit_mw, locked_mhz, persistence;
    Load loads[MAX_LOADS];
    double joules, settled;                               /* the exact integral, up to when */
    double shown_joules, shown_watts, shown_at;           /* what the sensors show */
} Gpu;

typedef struct {
    unsigned magic, count;
    pthread_mutex_t mutex;
    double virtual_now;
    char names[MAX_FUNCTIONS][48];
    unsigned long long calls[MAX_FUNCTIONS];
    Gpu gpus[MAX_GPUS];
} Shared;

static Shared *shared;
static int users;

/* ---- small things ---- */

static double number(const char *name) { const char *v = getenv(name); return v ? atof(v) : 0; }
static int is(const char *name, const char *value) { const char *v = getenv(name); return v && !strcmp(v, value); }
static void lock(void) {
    if (pthread_mutex_lock(&shared->mutex) == EOWNERDEAD) pthread_mutex_consistent(&shared->mutex);
}
static void unlock(void) { pthread_mutex_unlock(&shared->mutex); }

static double now(void) {
    if (is("NVMLEMU_CLOCK", "virtual")) return shared->virtual_now;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static unsigned long long *calls_of(const char *function) {
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        if (!shared->names[i][0]) strncpy(shared->names[i], function, sizeof shared->names[i] - 1);
        if (!strncmp(shared->names[i], function, sizeof shared->names[i] - 1)) return &shared->calls[i];
    }
    abort();
}

/* ---- the model ---- */

static double active_power(const Chip *c, const Load *l, double f) {
    double v = f <= c->knee ? 1 : 1 + c->rise * (f - c->knee) / (1 - c->knee);
    return c->active + (l->full_power - c->active) * f * v * v / ((1 + c->rise) * (1 + c->rise));
}

static double ceiling_of(const Gpu *g) {
    return g->locked_mhz ? fmin(1, (double)g->locked_mhz / CHIPS[g->chip].max_mhz) : 1;
}

static double clock_of(const Gpu *g, const Load *l) {
    const Chip *c = &CHIPS[g->chip];
    double low = c->slowest, high = ceiling_of(g);
    double limit = (is("NVMLEMU_LIMIT", "ignored") ? c->max_mw : g->limit_mw) / 1e3;
    if (high <= low || active_power(c, l, high) <= limit) return high;
    if (active_power(c, l, low) >= limit) return low;
    for (int i = 0; i < 50; i++) {
        double middle = (low + high) / 2;
        if (active_power(c, l, middle) > limit) high = middle; else low = middle;
    }
    return low;
}

static double epoch_seconds(const Gpu *g, const Load *l) {
    return l->seconds * (1 - l->clock_bound + l->clock_bound / clock_of(g, l));
}

/* Power drawn now. The load of a process that died is gone. */
static double watts(Gpu *g) {
    const Chip *c = &CHIPS[g->chip];
    double total = c->idle;
    for (Load *l = g->loads; l < g->loads + MAX_LOADS; l++) {
        if (!l->pid) continue;
        if (kill(l->pid, 0) && errno == ESRCH) { memset(l, 0, sizeof *l); continue; }
        double seconds = epoch_seconds(g, l), waiting = (1 - l->active) * l->seconds;
        double average = ((seconds - waiting) * active_power(c, l, clock_of(g, l)) + waiting * c->idle) / seconds;
        total += average - c->idle;
    }
    return total;
}

/* Integrate up to now. Called before anything changes, so power was constant since the last time. */
static void settle(Gpu *g) {
    double t = now(), w = watts(g), period = number("NVMLEMU_UPDATE_MS") / 1e3;
    double tick = period > 0 ? floor(t / period + 1e-9) * period : t;
    if (tick > g->shown_at) {
        g->shown_joules = g->joules + w * fmax(0, tick - g->settled);
        g->shown_watts = w;
        g->shown_at = tick;
    }
    g->joules += w * (t - g->settled);
    g->settled = t;
}

static unsigned shown_mw(const Gpu *g) {
    unsigned long long x = (unsigned long long)(g->shown_at * 1e4) * 0x9E3779B97F4A7C15ull;
    x ^= x >> 29; x *= 0xBF58476D1CE4E5B9ull; x ^= x >> 32;
    double mw = g->shown_watts * 1e3 + number("NVMLEMU_NOISE_MW") * (2.0 * (double)(x >> 11) / 9007199254740992.0 - 1);
    return mw > 0 ? (unsigned)lround(mw) : 0;
}

/* ---- state ---- */

static void fill(Shared *s) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&s->mutex, &attributes);
    shared = s;
    char models[256];
    snprintf(models, sizeof models, "%s", getenv("NVMLEMU_GPUS") ? getenv("NVMLEMU_GPUS") : "v100");
    for (char *key = strtok(models, ","); key && s->count < MAX_GPUS; key = strtok(NULL, ","))
        for (int i = 0; i < (int)(sizeof CHIPS / sizeof *CHIPS); i++)
            if (!strcmp(key, CHIPS[i].key)) {
                Gpu *g = &s->gpus[s->count++];
                *g = (Gpu){.chip = i, .limit_mw = CHIPS[i].max_mw, .joules = 1e3 * s->count, .settled = now()};
                g->shown_joules = g->joules;
                g->shown_watts = CHIPS[i].idle;
            }
    s->magic = MAGIC;
}

static Return attach(void) {
    const char *path = getenv("NVMLEMU_STATE");
    int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (file < 0) return DRIVER_NOT_LOADED;
    flock(file, LOCK_EX);
    Return result = UNKNOWN;
    if (!ftruncate(file, sizeof(Shared))) {
        Shared *s = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (s != MAP_FAILED) {
            if (s->magic != MAGIC) fill(s);
            shared = s;
            result = SUCCESS;
        }
    }
    flock(file, LOCK_UN); /* closing is not enough: the mapping keeps the file open */
    close(file);
    return result;
}

static int listed(const char *variable, const char *function) {
    char list[512];
    snprintf(list, sizeof list, "%s", getenv(variable) ? getenv(variable) : "");
    for (char *rest, *item = strtok_r(list, ",", &rest); item; item = strtok_r(NULL, ",", &rest))
        if (!strcmp(item, function)) return 1;
    return 0;
}

static Return failure(const char *function, unsigned gpu) {
    char list[512];
    snprintf(list, sizeof list, "%s", getenv("NVMLEMU_FAIL") ? getenv("NVMLEMU_FAIL") : "");
    for (char *rest, *item = strtok_r(list, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
        char name[64];
        int code = 0, after = 0, only = -1;
        if (sscanf(item, "%63[^:]:%d:%d:%d", name, &code, &after, &only) < 2) continue;
        if (strcmp(name, "*") && strcmp(name, function)) continue;
        if (*calls_of(name) > (unsigned long long)after && (only < 0 || only == (int)gpu)) return code;
    }
    return SUCCESS;
}

/* Begin a call on a GPU: count it, find the GPU, fail where the switches say so. Holds the lock on success. */
static Return enter(const char *function, void *handle, Gpu **g) {
    if (!users) return UNINITIALIZED;
    size_t i = (size_t)handle;
    if (i < 1 || i > shared->count) return INVALID_ARGUMENT;
    lock();
    ++*calls_of("*");
    ++*calls_of(function);
    Return result = listed("NVMLEMU_NOT_SUPPORTED", function) ? NOT_SUPPORTED : failure(function, (unsigned)i - 1);
    if (result) { unlock(); return result; }
    *g = &shared->gpus[i - 1];
    settle(*g);
    return SUCCESS;
}

static Return permission(void) {
    if (is("NVMLEMU_PERMISSION", "allow")) return SUCCESS;
    return is("NVMLEMU_PERMISSION", "deny") || geteuid() ? NO_PERMISSION : SUCCESS;
}

/* A function of a GPU: its body sees `g` and `c`, and sets `result` where it does not succeed. */
#define DEVICE_FUNCTION(name, parameters, ...)                        \
    API Return name parameters {                                      \
        Gpu *g;                                                       \
        Return result = enter(__func__, handle, &g);                  \
        if (result) return result;                                    \
        const Chip *c = &CHIPS[g->chip];                              \
        (void)c;                                                      \
        __VA_ARGS__;                                                  \
        unlock();                                                     \
        return result;                                                \
    }

/* ---- the library ---- */

API Return nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    Return result = shared ? SUCCESS : attach();
    if (!result) users++;
    return result;
}
API Return nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API Return nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    if (!--users) { munmap(shared, sizeof(Shared)); shared = NULL; }
    return SUCCESS;
}
API const char *nvmlErrorString(Return r) {
    switch (r) {
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    }
    return "Unknown Error";
}

static Return text(char *out, unsigned size, const char *value) {
    return snprintf(out, size, "%s", value) < (int)size ? SUCCESS : INSUFFICIENT_SIZE;
}
static void write_uuid(const char *prefix, unsigned i, char *out) {
    sprintf(out, "%s-5eed%04x-0000-4000-8000-%012x", prefix, i, i);
}
static Return handle_of(const char *prefix, const char *uuid, void **handle) {
    char mine[64];
    for (unsigned i = 0; users && i < shared->count; i++) {
        write_uuid(prefix, i, mine);
        if (!strcmp(mine, uuid)) { *handle = (void *)(size_t)(i + 1); return SUCCESS; }
    }
    return users ? NOT_FOUND : UNINITIALIZED;
}

API Return nvmlSystemGetDriverVersion(char *out, unsigned size) {
    return users ? text(out, size, "550.00.emulated") : UNINITIALIZED;
}
API Return nvmlDeviceGetCount_v2(unsigned *out) {
    if (!users) return UNINITIALIZED;
    *out = shared->count;
    return SUCCESS;
}
API Return nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) {
    if (!users) return UNINITIALIZED;
    if (i >= shared->count) return INVALID_ARGUMENT;
    *handle = (void *)(size_t)(i + 1);
    return SUCCESS;
}
/* Every GPU has one MIG slice, with an identifier of its own; its handle stands for its parent here. */
API Return nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    return handle_of(strncmp(uuid, "MIG", 3) ? "GPU" : "MIG", uuid, handle);
}
API Return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *mig, void **handle) { *handle = mig; return SUCCESS; }

DEVICE_FUNCTION(nvmlDeviceGetIndex, (void *handle, unsigned *out), *out = (unsigned)(size_t)handle - 1)
DEVICE_FUNCTION(nvmlDeviceGetUUID, (void *handle, char *out, unsigned size),
                char uuid[64]; write_uuid("GPU", (unsigned)(size_t)handle - 1, uuid); result = text(out, size, uuid))
// nvmlPciInfo_t ends with the bus id, after 16 characters and five numbers.
DEVICE_FUNCTION(nvmlDeviceGetPciInfo_v3, (void *handle, char *out), memset(out, 0, 68);
                snprintf(out + 36, 32, "00000000:%02X:00.0", 1 + 64 * ((unsigned)(size_t)handle - 1)))
DEVICE_FUNCTION(nvmlDeviceGetName, (void *handle, char *out, unsigned size), result = text(out, size, c->name))
DEVICE_FUNCTION(nvmlDeviceGetArchitecture, (void *handle, unsigned *out), *out = c->arch)
DEVICE_FUNCTION(nvmlDeviceGetPowerManagementLimitConstraints, (void *handle, unsigned *low, unsigned *high),
                *low = c->min_mw; *high = c->max_mw)
DEVICE_FUNCTION(nvmlDeviceGetPowerManagementDefaultLimit, (void *handle, unsigned *out), *out = c->max_mw)
DEVICE_FUNCTION(nvmlDeviceGetPowerManagementLimit, (void *handle, unsigned *out), *out = g->limit_mw)
DEVICE_FUNCTION(nvmlDeviceGetEnforcedPowerLimit, (void *handle, unsigned *out), *out = g->limit_mw)
DEVICE_FUNCTION(nvmlDeviceSetPowerManagementLimit, (void *handle, unsigned mw),
                if (!(result = permission()) && (mw < c->min_mw || mw > c->max_mw)) result = INVALID_ARGUMENT;
                if (!result && number("NVMLEMU_SET_MS") > 0) usleep((useconds_t)(number("NVMLEMU_SET_MS") * 1e3));
                if (!result && !(is("NVMLEMU_LIMIT", "stuck") && mw > g->limit_mw)) g->limit_mw = mw)
DEVICE_FUNCTION(nvmlDeviceGetPowerUsage, (void *handle, unsigned *out), *out = shown_mw(g))
DEVICE_FUNCTION(nvmlDeviceGetTotalEnergyConsumption, (void *handle, unsigned long long *out),
                if (c->arch < ARCH_VOLTA) result = NOT_SUPPORTED;
                *out = getenv("NVMLEMU_FROZEN") ? 1000 : (unsigned long long)(g->shown_joules * 1e3 * (1 + number("NVMLEMU_COUNTER_OFF"))))
DEVICE_FUNCTION(nvmlDeviceSetGpuLockedClocks, (void *handle, unsigned low, unsigned high),
                if (!(result = permission()) && (low > high || high < c->min_mhz)) result = INVALID_ARGUMENT;
                if (c->arch < ARCH_VOLTA) result = NOT_SUPPORTED;
                if (!result) g->locked_mhz = high)
DEVICE_FUNCTION(nvmlDeviceResetGpuLockedClocks, (void *handle),
                if (c->arch < ARCH_VOLTA) result = NOT_SUPPORTED;
                if (!result && !(result = permission())) g->locked_mhz = 0)
DEVICE_FUNCTION(nvmlDeviceGetSupportedMemoryClocks, (void *handle, unsigned *count, unsigned *out),
                if (!out || *count < 1) result = INSUFFICIENT_SIZE; else *out = c->memory_mhz;
                *count = 1)
DEVICE_FUNCTION(nvmlDeviceGetSupportedGraphicsClocks, (void *handle, unsigned memory, unsigned *count, unsigned *out),
                unsigned there = (c->max_mhz - c->min_mhz) / CLOCK_STEP_MHZ + 1;
                if (memory != c->memory_mhz) result = NOT_FOUND;
                else if (!out || *count < there) result = INSUFFICIENT_SIZE;
                else for (unsigned i = 0; i < there; i++) out[i] = c->max_mhz - i * CLOCK_STEP_MHZ;
                *count = there)
DEVICE_FUNCTION(nvmlDeviceGetClockInfo, (void *handle, unsigned kind, unsigned *out),
                double f = ceiling_of(g);
                for (Load *l = g->loads; l < g->loads + MAX_LOADS; l++) if (l->pid) f = fmin(f, clock_of(g, l));
                *out = kind == 2 ? c->memory_mhz : (unsigned)lround(f * c->max_mhz))
DEVICE_FUNCTION(nvmlDeviceGetUtilizationRates, (void *handle, unsigned *out), /* of the GPU, of its memory */
                double busy = 0;
                for (Load *l = g->loads; l < g->loads + MAX_LOADS; l++) if (l->pid) busy += l->active;
                out[0] = (unsigned)lround(100 * fmin(1, busy)); out[1] = out[0] / 2)
DEVICE_FUNCTION(nvmlDeviceGetPersistenceMode, (void *handle, unsigned *out), *out = g->persistence)
DEVICE_FUNCTION(nvmlDeviceSetPersistenceMode, (void *handle, unsigned mode),
                if (!(result = permission())) g->persistence = mode)
DEVICE_FUNCTION(nvmlDeviceGetMigMode, (void *handle, unsigned *current, unsigned *pending),
                if (c->arch < ARCH_AMPERE) result = NOT_SUPPORTED;
                *current = *pending = getenv("NVMLEMU_MIG") && number("NVMLEMU_MIG") == (double)(size_t)handle - 1)
DEVICE_FUNCTION(nvmlDeviceGetCurrentClocksThrottleReasons, (void *handle, unsigned long long *out),
                *out = 1; /* idle */
                for (Load *l = g->loads; l < g->loads + MAX_LOADS; l++)
                    if (l->pid) *out = clock_of(g, l) < ceiling_of(g) - 1e-3 ? 4 /* power cap */ : 0)

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;
DEVICE_FUNCTION(nvmlDeviceGetComputeRunningProcesses_v3, (void *handle, unsigned *count, Process *out),
                unsigned room = *count; *count = 0;
                for (Load *l = g->loads; l < g->loads + MAX_LOADS; l++) if (l->pid) {
                    if (out && *count < room) out[*count] = (Process){(unsigned)l->pid, 1 << 30, ~0u, ~0u};
                    ++*count;
                }
                if (*count > room) result = INSUFFICIENT_SIZE)

typedef struct {
    unsigned field, scope;
    long long time, latency;
    unsigned type, result;
    unsigned long long value;
} Field;
DEVICE_FUNCTION(nvmlDeviceGetFieldValues, (void *handle, int count, Field *fields),
                for (Field *f = fields; f < fields + count; f++) {
                    f->result = f->field == 186 && f->scope == 0 ? SUCCESS : NOT_SUPPORTED; /* instant power */
                    f->value = shown_mw(g);
                })

/* ---- what tests and fake workloads use ---- */

API double nvmlEmuNow(void) { return now(); }
API void nvmlEmuAdvance(double seconds) {
    lock();
    double period = number("NVMLEMU_UPDATE_MS") / 1e3, end = shared->virtual_now + seconds;
    while (shared->virtual_now < end) {
        double next = period > 0 ? (floor(shared->virtual_now / period + 1e-9) + 1) * period : end;
        shared->virtual_now = fmin(end, next);
        for (unsigned i = 0; i < shared->count; i++) settle(&shared->gpus[i]);
    }
    unlock();
}
/* Put this process's load on a GPU; 0 seconds take it away. */
API void nvmlEmuSetLoad(unsigned gpu, double seconds, double full_power, double active, double clock_bound) {
    Gpu *g = &shared->gpus[gpu];
    lock();
    settle(g);
    Load *mine = NULL;
    for (Load *l = g->loads; l < g->loads + MAX_LOADS; l++)
        if (l->pid == getpid() || (!mine && !l->pid)) mine = l;
    if (mine) *mine = seconds > 0 ? (Load){getpid(), seconds, full_power, active, clock_bound} : (Load){0};
    unlock();
}
API unsigned nvmlEmuLockedMhz(unsigned gpu) { return shared->gpus[gpu].locked_mhz; } /* which no driver tells */
API double nvmlEmuEpochSeconds(unsigned gpu) {
    double seconds = 0;
    lock();
    for (Load *l = shared->gpus[gpu].loads; l < shared->gpus[gpu].loads + MAX_LOADS; l++)
        if (l->pid == getpid()) seconds = epoch_seconds(&shared->gpus[gpu], l);
    unlock();
    return seconds;
}
/* The exact integral, which no sensor shows. */
API double nvmlEmuJoules(unsigned gpu) {
    lock();
    settle(&shared->gpus[gpu]);
    double joules = shared->gpus[gpu].joules;
    unlock();
    return joules;
}
API void nvmlEmuResetCounter(unsigned gpu) {
    lock();
    settle(&shared->gpus[gpu]);
    shared->gpus[gpu].joules = shared->gpus[gpu].shown_joules = 0;
    unlock();
}
API unsigned long long nvmlEmuCalls(const char *function) {
    lock();
    unsigned long long calls = *calls_of(function);
    unlock();
    return calls;
}
