/* A stand-in for NVIDIA's libnvidia-ml.so.1: answers what the state file says, so that the real nvidia-ml-py works without a GPU.
 *
 * The file named by GOODRUN_SIMULATED_GPUS is a log of settings, one a line; the newest that holds wins, so a fault is one appended line:
 *   gpus=4                          how many devices there were at the start
 *   2.uuid=GPU-…   2.name=…         who device 2 is
 *   2.temperature=91                what a query answers
 *   2.field.230=1                   a field value; a field that is not set is not supported
 *   2.gone=1 until 1234.5           it holds until that second of the monotonic clock
 *   2.returns=15                    every query about device 2 fails with that code
 *   2.DeviceGetTemperature.hangs=1  this query never returns; `2.hangs=1` is all of them
 *   2.mig=2   2.mig.0.uuid=MIG-…    it is cut into two instances
 *   xid=2,79                        device 2 reports XID 79: an event, told to every set that was registered before
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15 };
enum { MOST_GPUS = 512, MOST_INSTANCES = 7 };

typedef struct { int number, instance; } Device; /* its number in the file, whatever its index is now; and, if it is a MIG instance, which, from 1 */
typedef struct { size_t told; } EventSet; /* how many of the file's XIDs it has told */
typedef struct { Device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } EventData;
typedef struct {
    unsigned id, scope;
    long long stamp, latency;
    unsigned type;
    int result;
    union { double d; unsigned ui; unsigned long long ull; } value;
} FieldValue;

static Device devices[MOST_GPUS], instances[MOST_GPUS][MOST_INSTANCES];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The file as it is now. Another process appends to it at any time: its size is its version. */
static const char *state(void) {
    static char *text;
    static off_t size = -1;
    const char *path = getenv("GOODRUN_SIMULATED_GPUS");
    struct stat file;
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0 || fstat(fd, &file) != 0) file.st_size = 0;
    if (file.st_size != size) {
        free(text);
        text = calloc(1, (size_t)file.st_size + 1);
        size = fd < 0 ? 0 : read(fd, text, (size_t)file.st_size);
    }
    if (fd >= 0) close(fd);
    return text;
}

static const char *next_line(const char *line) {
    line = strchr(line, '\n');
    return line ? line + 1 : NULL;
}

/* The newest setting of `key` that holds; 0 if there is none. */
static int lookup(const char *key, char *value, size_t room) {
    size_t length = strlen(key);
    int found = 0;
    for (const char *line = state(); line; line = next_line(line)) {
        if (strncmp(line, key, length) != 0 || line[length] != '=') continue;
        char setting[256];
        snprintf(setting, sizeof setting, "%.*s", (int)strcspn(line, "\n"), line);
        char *until = strstr(setting, " until ");
        if (until && now() >= atof(until + strlen(" until "))) continue;
        if (until) *until = 0;
        snprintf(value, room, "%s", setting + length + 1);
        found = 1;
    }
    return found;
}

static long long number(const Device *d, const char *what, long long otherwise) {
    char key[128], value[64];
    snprintf(key, sizeof key, "%d.%s", d->number, what);
    return lookup(key, value, sizeof value) ? atoll(value) : otherwise;
}

static long long common(const char *key, long long otherwise) {
    char value[64];
    return lookup(key, value, sizeof value) ? atoll(value) : otherwise;
}

static void word(const Device *d, const char *what, char *into, unsigned room) {
    char key[128];
    snprintf(key, sizeof key, "%d.%s", d->number, what);
    if (!lookup(key, into, room)) snprintf(into, room, "%s-of-simulated-%d", what, d->number);
}

/* Every query about a device passes here: it may hang, fail, or find the device gone. */
static int ask(const Device *d, const char *function) {
    char key[128];
    snprintf(key, sizeof key, "%s.hangs", function);
    while (number(d, "hangs", 0) || number(d, key, 0)) usleep(20000);
    if (number(d, "gone", 0)) return GPU_IS_LOST;
    snprintf(key, sizeof key, "%s.returns", function);
    return (int)number(d, key, number(d, "returns", SUCCESS));
}

static int count(void) {
    int gpus = (int)common("gpus", 0), n;
    if (gpus > MOST_GPUS) gpus = MOST_GPUS;
    for (n = 0; n < gpus; n++) devices[n].number = n;
    return gpus;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)common("Init.returns", SUCCESS); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int result) {
    switch (result) {
        case SUCCESS: return "Success";
        case NOT_SUPPORTED: return "Not Supported";
        case NOT_FOUND: return "Not Found";
        case 9: return "Driver Not Loaded";
        case TIMEOUT: return "Timeout";
        case GPU_IS_LOST: return "GPU is lost";
        case 16: return "GPU requires reset";
        case 18: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned room) {
    snprintf(version, room, "simulated");
    return (int)common("SystemGetDriverVersion.returns", SUCCESS);
}

/* A device that is gone is not counted, and those behind it move up: as after a new start of the driver. */
int nvmlDeviceGetCount_v2(unsigned *counted) {
    int n, gpus = count();
    *counted = 0;
    for (n = 0; n < gpus; n++) *counted += !number(&devices[n], "gone", 0);
    return (int)common("DeviceGetCount.returns", SUCCESS);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    int n, gpus = count();
    for (n = 0; n < gpus; n++)
        if (!number(&devices[n], "gone", 0) && index-- == 0) {
            *device = &devices[n];
            return (int)number(*device, "DeviceGetHandleByIndex.returns", SUCCESS);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *wanted, Device **device) {
    int n, gpus = count();
    char uuid[96];
    for (n = 0; n < gpus; n++) {
        word(&devices[n], "uuid", uuid, sizeof uuid);
        if (strcmp(uuid, wanted) != 0 || number(&devices[n], "gone", 0)) continue;
        *device = &devices[n];
        return (int)number(*device, "DeviceGetHandleByUUID.returns", SUCCESS);
    }
    return NOT_FOUND;
}

/* Who a device is does not fail or hang with the rest of it: the driver keeps that in memory. */
int nvmlDeviceGetUUID(Device *d, char *uuid, unsigned room) {
    char what[32] = "uuid";
    if (d->instance) snprintf(what, sizeof what, "mig.%d.uuid", d->instance - 1);
    word(d, what, uuid, room);
    return SUCCESS;
}

int nvmlDeviceGetName(Device *d, char *name, unsigned room) { word(d, "name", name, room); return SUCCESS; }

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *most) {
    *most = MOST_INSTANCES;
    return number(d, "mig", 0) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **instance) {
    if (index >= number(d, "mig", 0)) return NOT_FOUND;
    instances[d->number][index] = (Device){.number = d->number, .instance = (int)index + 1};
    *instance = &instances[d->number][index];
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *d, int uncorrected, int aggregate, unsigned long long *errors) {
    (void)aggregate;
    *errors = (unsigned long long)number(d, uncorrected ? "ecc_uncorrected" : "ecc_corrected", 0);
    return ask(d, "DeviceGetTotalEccErrors");
}

int nvmlDeviceGetRemappedRows(Device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure) {
    *corrected = (unsigned)number(d, "remap_corrected", 0);
    *uncorrected = (unsigned)number(d, "remap_uncorrected", 0);
    *pending = (unsigned)number(d, "remap_pending", 0);
    *failure = (unsigned)number(d, "remap_failure", 0);
    return ask(d, "DeviceGetRemappedRows");
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *d, unsigned long long *reasons) {
    *reasons = (unsigned long long)number(d, "clock_reasons", 0);
    return ask(d, "DeviceGetCurrentClocksEventReasons");
}

typedef struct { unsigned long long total, free, used; } Memory;

int nvmlDeviceGetMemoryInfo(Device *d, Memory *memory) {
    memory->total = (unsigned long long)number(d, "memory", 80LL << 30);
    memory->used = (unsigned long long)number(d, "memory_used", 512LL << 20);
    memory->free = memory->total - memory->used;
    return ask(d, "DeviceGetMemoryInfo");
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } ProcessInfo;

int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *many, ProcessInfo *processes) {
    unsigned room = *many, pid = (unsigned)number(d, "memory_pid", 0);
    *many = pid != 0;
    if (pid && !room) return INSUFFICIENT_SIZE;
    if (pid) processes[0] = (ProcessInfo){.pid = pid, .used = (unsigned long long)number(d, "memory_used", 512LL << 20)};
    return ask(d, "DeviceGetComputeRunningProcesses");
}

int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned *celsius) {
    (void)sensor;
    *celsius = (unsigned)number(d, "temperature", 40);
    return ask(d, "DeviceGetTemperature");
}

int nvmlDeviceGetTemperatureThreshold(Device *d, int which, unsigned *celsius) {
    (void)which;
    *celsius = (unsigned)number(d, "temperature_limit", 87);
    return ask(d, "DeviceGetTemperatureThreshold");
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } PciInfo;

int nvmlDeviceGetPciInfo_v3(Device *d, PciInfo *info) {
    memset(info, 0, sizeof *info);
    info->bus = (unsigned)d->number + 1; /* bus 1 is that of device 0 */
    return ask(d, "DeviceGetPciInfo");
}

int nvmlDeviceGetClockInfo(Device *d, int which, unsigned *mhz) {
    (void)which;
    *mhz = (unsigned)number(d, "sm_clock", 1980);
    return ask(d, "DeviceGetClockInfo");
}

int nvmlDeviceGetMaxClockInfo(Device *d, int which, unsigned *mhz) {
    (void)which;
    *mhz = (unsigned)number(d, "sm_clock_max", 1980);
    return ask(d, "DeviceGetMaxClockInfo");
}

int nvmlDeviceGetPcieReplayCounter(Device *d, unsigned *replays) {
    *replays = (unsigned)number(d, "pcie_replays", 0);
    return ask(d, "DeviceGetPcieReplayCounter");
}

int nvmlDeviceGetNvLinkState(Device *d, unsigned link, unsigned *active) {
    char what[32];
    snprintf(what, sizeof what, "nvlink.%u", link);
    *active = (unsigned)number(d, what, 1);
    return ask(d, "DeviceGetNvLinkState");
}

int nvmlDeviceGetFieldValues(Device *d, int many, FieldValue *fields) {
    int i;
    char what[32];
    for (i = 0; i < many; i++) {
        snprintf(what, sizeof what, "field.%u", fields[i].id);
        long long value = number(d, what, -1);
        fields[i].type = 1; /* unsigned int */
        fields[i].result = value < 0 ? NOT_SUPPORTED : SUCCESS;
        fields[i].value.ull = value < 0 ? 0 : (unsigned long long)value;
    }
    return ask(d, "DeviceGetFieldValues");
}

typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique, state, health_mask; } FabricInfo;

int nvmlDeviceGetGpuFabricInfoV(Device *d, FabricInfo *info) {
    info->state = (unsigned)number(d, "fabric_state", 0); /* 0: there is no fabric; 3: complete */
    info->health_mask = (unsigned)number(d, "fabric_mask", 0);
    return ask(d, "DeviceGetGpuFabricInfoV");
}

int nvmlEventSetCreate(EventSet **set) { *set = calloc(1, sizeof **set); return SUCCESS; }
int nvmlEventSetFree(EventSet *set) { free(set); return SUCCESS; }

/* The `nth` XID of the file; 0 if there are fewer. `nth` past the last counts them. */
static size_t nth_xid(size_t nth, int *device, long long *xid) {
    size_t seen = 0;
    for (const char *line = state(); line && seen <= nth; line = next_line(line)) seen += sscanf(line, "xid=%d,%lld", device, xid) == 2;
    return seen;
}

int nvmlDeviceRegisterEvents(Device *d, unsigned long long types, EventSet *set) {
    int device;
    long long xid;
    (void)types;
    set->told = nth_xid((size_t)-2, &device, &xid); /* what was before the registration is not told */
    return ask(d, "DeviceRegisterEvents");
}

int nvmlEventSetWait_v2(EventSet *set, EventData *data, unsigned wait_ms) {
    double end = now() + wait_ms / 1000.0;
    for (;;) {
        int device;
        long long xid;
        if (common("EventSetWait.returns", SUCCESS)) return (int)common("EventSetWait.returns", SUCCESS);
        if (nth_xid(set->told, &device, &xid) > set->told) {
            set->told++;
            if (device < 0 || device >= count()) continue;
            *data = (EventData){.device = &devices[device], .type = 8, .data = (unsigned long long)xid};
            return SUCCESS;
        }
        if (now() >= end) return TIMEOUT;
        usleep(5000); /* the state is a file: nothing announces a new line to a C library without threads */
    }
}
