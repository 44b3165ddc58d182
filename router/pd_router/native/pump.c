/* Passes tokens from engines to clients without waking Python for each of them.
 *
 * One pump per event loop. A stream that is adopted has two sockets and two texts, `before` and `after`: what stands
 * around the letters of one token, as the stream's events have it. A read that is nothing but whole HTTP chunks, each
 * of them `before`, letters, `after`, is sent on as it came, and its letters are kept for whoever reads the answer at
 * its end. Any other read goes to Python untouched. So nothing is decided here: bytes pass that differ from bytes which
 * Python has judged in plain letters only.
 *
 * The sockets are duplicates: should the loop close one while it is adopted, its number can't come to mean another
 * connection. Not thread-safe. Nothing here blocks. The interface is plain C, so that it does not depend on a version
 * of Python; `pd_router.shell.pump` is its only user.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define BATCH 64           /* reads of one run */
#define READ_BYTES 16384   /* of one read */
#define MAX_DIGITS 4       /* of a chunk's size, in hex */

enum kind { DECLINED = 0, SHORT = 1, ENDED = 2 };

/* What Python is to do. DECLINED: `data` was read and is to be judged. SHORT: `data` is what the client did not take.
 * ENDED: there is nothing to read any more, or reading failed; the loop will find out which. `data` is good until the
 * next run. */
struct event {
    int32_t slot;
    int32_t kind;
    const char *data;
    size_t size;
};

/* What passed since it was last asked for: the letters, and the bytes of the reads. Good until the next call. */
struct taken {
    const char *letters;
    size_t size;
    size_t passed;
};

struct slot {
    int up, down;
    char *around; /* before, then after */
    size_t before, after;
    char *letters;
    size_t used, capacity;
    size_t passed;
    size_t room; /* bytes that may still pass */
    int live, fresh;
};

struct pump {
    struct event events[BATCH];
    struct taken taken;
    int epoll;
    struct slot *slots;
    int size;
    int free_from; /* no slot below it is free */
    char *arena;
};

/* Tells whether this was made from the source that is beside it: the interface changes with it. */
const char *pump_source(void)
{
    return SOURCE;
}

struct pump *pump_new(void)
{
    struct pump *pump = calloc(1, sizeof *pump);
    if (pump == NULL)
        return NULL;
    pump->arena = malloc((size_t)BATCH * READ_BYTES);
    pump->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (pump->arena == NULL || pump->epoll < 0) {
        if (pump->epoll >= 0)
            close(pump->epoll);
        free(pump->arena);
        free(pump);
        return NULL;
    }
    return pump;
}

int pump_fd(const struct pump *pump)
{
    return pump->epoll;
}

void pump_release(struct pump *pump, int at)
{
    struct slot *slot = &pump->slots[at];
    if (!slot->live)
        return;
    epoll_ctl(pump->epoll, EPOLL_CTL_DEL, slot->up, NULL);
    close(slot->up);
    close(slot->down);
    free(slot->around);
    free(slot->letters);
    memset(slot, 0, sizeof *slot);
    if (at < pump->free_from)
        pump->free_from = at;
}

void pump_free(struct pump *pump)
{
    for (int at = 0; at < pump->size; at++)
        pump_release(pump, at);
    free(pump->slots);
    free(pump->arena);
    close(pump->epoll);
    free(pump);
}

/* Other texts around the letters; where `before` is empty every read is declined. Returns 0 or a negative errno. */
int pump_tune(struct pump *pump, int at, const char *before, size_t before_size, const char *after, size_t after_size)
{
    struct slot *slot = &pump->slots[at];
    char *around = malloc(before_size + after_size + 1);
    if (around == NULL)
        return -ENOMEM;
    memcpy(around, before, before_size);
    memcpy(around + before_size, after, after_size);
    free(slot->around);
    slot->around = around;
    slot->before = before_size;
    slot->after = after_size;
    return 0;
}

static int free_slot(struct pump *pump)
{
    int at = pump->free_from;
    while (at < pump->size && pump->slots[at].live)
        at++;
    if (at == pump->size) {
        int size = pump->size ? pump->size * 2 : BATCH;
        struct slot *slots = realloc(pump->slots, (size_t)size * sizeof *slots);
        if (slots == NULL)
            return -ENOMEM;
        memset(slots + pump->size, 0, (size_t)(size - pump->size) * sizeof *slots);
        pump->slots = slots;
        pump->size = size;
    }
    pump->free_from = at;
    return at;
}

/* Take a stream over, of which at most `room` bytes are to pass. Returns its slot or a negative errno. */
int pump_adopt(struct pump *pump, int up, int down, size_t room)
{
    int at = free_slot(pump);
    if (at < 0)
        return at;
    struct slot *slot = &pump->slots[at];
    slot->up = fcntl(up, F_DUPFD_CLOEXEC, 0);
    slot->down = slot->up < 0 ? -1 : fcntl(down, F_DUPFD_CLOEXEC, 0);
    struct epoll_event wanted = {.events = EPOLLIN, .data.u32 = (uint32_t)at};
    if (slot->down < 0 || epoll_ctl(pump->epoll, EPOLL_CTL_ADD, slot->up, &wanted) < 0) {
        int code = errno;
        if (slot->up >= 0)
            close(slot->up);
        if (slot->down >= 0)
            close(slot->down);
        return -code;
    }
    slot->room = room;
    slot->live = 1;
    return at;
}

/* Hand out in `pump->taken` what passed since the last time. */
void pump_take(struct pump *pump, int at)
{
    struct slot *slot = &pump->slots[at];
    pump->taken.letters = slot->letters;
    pump->taken.size = slot->used;
    pump->taken.passed = slot->passed;
    slot->used = slot->passed = 0;
}

/* Whether anything passed since this was last asked. */
int pump_moved(struct pump *pump, int at)
{
    int fresh = pump->slots[at].fresh;
    pump->slots[at].fresh = 0;
    return fresh;
}

static int keep(struct slot *slot, const char *letters, size_t size)
{
    if (size == 0) /* there may be no room at all yet, and no memory to point to */
        return 1;
    if (slot->used + size > slot->capacity) {
        size_t capacity = slot->capacity ? slot->capacity * 2 : 512;
        while (capacity < slot->used + size)
            capacity *= 2;
        char *more = realloc(slot->letters, capacity);
        if (more == NULL)
            return 0;
        slot->letters = more;
        slot->capacity = capacity;
    }
    memcpy(slot->letters + slot->used, letters, size);
    slot->used += size;
    return 1;
}

/* The size that a chunk says it has, and in `line` how many bytes say so; 0 where it is not written as engines do. */
static size_t chunk_size(const char *at, const char *end, size_t *line)
{
    size_t size = 0;
    int digits = 0;
    for (; digits < MAX_DIGITS && at + digits < end; digits++) {
        char c = at[digits];
        if (c >= '0' && c <= '9')
            size = size * 16 + (size_t)(c - '0');
        else if (c >= 'a' && c <= 'f')
            size = size * 16 + (size_t)(c - 'a' + 10);
        else
            break;
    }
    if (digits == 0 || at[0] == '0' || end - at < digits + 2 || at[digits] != '\r' || at[digits + 1] != '\n')
        return 0;
    *line = (size_t)digits + 2;
    return size;
}

/* Whether a read is tokens and nothing else; keeps their letters if so, and nothing if not. */
static int passes(struct slot *slot, const char *at, size_t size)
{
    const char *end = at + size;
    const size_t used = slot->used;
    if (slot->before == 0 || size > slot->room)
        return 0;
    while (at < end) {
        size_t line = 0, said = chunk_size(at, end, &line);
        if (said < slot->before + slot->after || (size_t)(end - at) < line + said + 2)
            goto other;
        at += line;
        const char *letters = at + slot->before, *behind = at + said - slot->after;
        if (memcmp(at, slot->around, slot->before) != 0 ||
            memcmp(behind, slot->around + slot->before, slot->after) != 0 || at[said] != '\r' || at[said + 1] != '\n')
            goto other;
        for (const char *one = letters; one < behind; one++)
            if (*one == '"' || *one == '\\' || (unsigned char)*one < ' ')
                goto other;
        if (!keep(slot, letters, (size_t)(behind - letters)))
            goto other;
        at += said + 2;
    }
    return 1;
other:
    slot->used = used;
    return 0;
}

static void report(struct pump *pump, int *count, int slot, int kind, const char *data, size_t size)
{
    struct event *event = &pump->events[(*count)++];
    event->slot = slot;
    event->kind = kind;
    event->data = data;
    event->size = size;
}

/* One look at all sockets: read, judge, send. Returns how many of `pump->events` there are, at most one per slot. All
 * is read before anything is sent: clients that wait on one core are then woken once and not for each token. */
int pump_run(struct pump *pump)
{
    struct epoll_event ready[BATCH];
    struct { int slot; size_t size; char *data; } due[BATCH];
    int count = 0, dues = 0;
    int found = epoll_wait(pump->epoll, ready, BATCH, 0);
    for (int i = 0; i < found; i++) {
        int at = (int)ready[i].data.u32;
        struct slot *slot = &pump->slots[at];
        char *data = pump->arena + (size_t)i * READ_BYTES;
        ssize_t size = recv(slot->up, data, READ_BYTES, MSG_DONTWAIT);
        if (size < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (size <= 0)
            report(pump, &count, at, ENDED, NULL, 0);
        else if (passes(slot, data, (size_t)size)) {
            due[dues].slot = at;
            due[dues].size = (size_t)size;
            due[dues++].data = data;
        } else
            report(pump, &count, at, DECLINED, data, (size_t)size);
    }
    for (int i = 0; i < dues; i++) {
        struct slot *slot = &pump->slots[due[i].slot];
        slot->fresh = 1;
        slot->passed += due[i].size;
        slot->room -= due[i].size;
        ssize_t sent = send(slot->down, due[i].data, due[i].size, MSG_DONTWAIT | MSG_NOSIGNAL);
        size_t done = sent < 0 ? 0 : (size_t)sent; /* why it failed is for the loop to find out */
        if (done < due[i].size)
            report(pump, &count, due[i].slot, SHORT, due[i].data + done, due[i].size - done);
    }
    return count;
}
