// What the ranks of one machine do together, through memory that they share: sums, gathering, a barrier.
// A plain C interface, loaded with ctypes; servelite/kernels/cpu/shared_collective.py mirrors it.
//
// The memory holds a line of words for each rank, then two slots for each rank. An operation is one or more
// rounds, numbered from 1: in round k a rank puts its payload into its own slot k % 2, stores k in its own
// sequence word, waits until every other rank's word has reached k, and reads their slots k % 2. A payload
// larger than a slot goes in pieces, a round each. All ranks call the same operations in the same order.
//
// Why nobody overwrites a slot that another still reads, and nobody reads one that is not yet written:
// - A word is stored with release and awaited with acquire (seq_cst is both). Whoever has seen that rank s
//   stored k sees all that s wrote before: its slot of round k.
// - Rank r next writes its slot k % 2 in round k + 2, after it has seen k + 1 (or more) in every other word.
//   Rank s stores k + 1 after it has read what it wanted of round k, so those reads are over by then. For
//   the same reason no rank's word is more than one round ahead of another's, and 32 bits may wrap around.
// - `what` of a line, which says what a rank believes the round to be, has two places and the same argument.
//
// Why no wake is lost: a sleeper adds itself to `sleepers`, then reads `sequence`; the publisher stores
// `sequence`, then reads `sleepers`. All four are seq_cst, so in their one order either the sleeper sees the
// new number or the publisher sees the sleeper; and the kernel compares the word again under its own lock
// before it lets a thread sleep. The time-out is only a belt: it would make a lost wake a pause.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "vectors.h"

extern "C" {

// One rank's view of its group.
struct servelite_group {
    void *memory;  // servelite_collective_bytes(size) bytes, zero when the first rank begins
    int32_t rank;
    int32_t size;
    int64_t spin_ns;  // how long a rank may spin in a round before it sleeps
};

enum { SERVELITE_DONE = 0, SERVELITE_IMPOSSIBLE = 1, SERVELITE_RANKS_DIFFER = 2 };
enum { SERVELITE_SUM_FLOAT32 = 0, SERVELITE_SUM_BFLOAT16 = 1 };
}

namespace {

constexpr int32_t kMaxSize = 64;
constexpr int64_t kSlotBytes = 512 << 10;  // a round costs more than what leaves the second-level cache
constexpr int64_t kLineBytes = 128;  // two cache lines: the prefetcher fetches them in pairs
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kTimeoutNs = 100'000'000;

struct alignas(kLineBytes) Line {
    uint32_t sequence;  // the last round that the rank has published; written by it alone
    uint32_t sleepers;  // threads that sleep until it changes
    uint64_t what[2];   // by round % 2: the operation and its size, to notice ranks that diverge
};

constexpr int64_t header_bytes(int32_t size) {
    return (size * kLineBytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

inline Line *line(const servelite_group *group, int32_t rank) { return (Line *)group->memory + rank; }

inline char *slot(const servelite_group *group, int32_t rank, uint32_t round) {
    return (char *)group->memory + header_bytes(group->size) + (2 * rank + round % 2) * kSlotBytes;
}

inline bool valid(const servelite_group *group) {
    return group && group->memory && group->size >= 1 && group->size <= kMaxSize && group->rank >= 0 &&
           group->rank < group->size;
}

// The round that this rank is about to enter.
inline uint32_t next_round(const servelite_group *group) {
    return __atomic_load_n(&line(group, group->rank)->sequence, __ATOMIC_RELAXED) + 1;
}

inline bool reached(uint32_t sequence, uint32_t round) { return (int32_t)(sequence - round) >= 0; }

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

void sleep_until_changed(Line *other, uint32_t round) {
    __atomic_add_fetch(&other->sleepers, 1, __ATOMIC_SEQ_CST);
    const uint32_t seen = __atomic_load_n(&other->sequence, __ATOMIC_SEQ_CST);
    if (!reached(seen, round)) {
        const timespec timeout = {0, kTimeoutNs};
        syscall(SYS_futex, &other->sequence, FUTEX_WAIT, seen, &timeout, nullptr, 0);  // between processes
    }
    __atomic_sub_fetch(&other->sleepers, 1, __ATOMIC_SEQ_CST);
}

// Returns when the other rank has published `round`. Spins until `*deadline`, set by who first has to wait.
void await(Line *other, uint32_t round, int64_t spin_ns, int64_t *deadline) {
    for (;;) {
        for (int i = 0; i < 16; ++i) {
            if (reached(__atomic_load_n(&other->sequence, __ATOMIC_ACQUIRE), round)) return;
            if (!spin_ns) break;
            relax();
        }
        if (spin_ns && !*deadline) *deadline = now_ns() + spin_ns;
        if (!spin_ns || now_ns() >= *deadline) sleep_until_changed(other, round);
    }
}

// Publishes this rank's round and waits for the others': after it their slots may be read.
int exchange(const servelite_group *group, uint32_t round, uint64_t what) {
    Line *own = line(group, group->rank);
    own->what[round % 2] = what;
    __atomic_store_n(&own->sequence, round, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &own->sequence, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    int64_t deadline = 0;
    for (int32_t rank = 0; rank < group->size; ++rank) {
        if (rank == group->rank) continue;
        await(line(group, rank), round, group->spin_ns, &deadline);
        if (line(group, rank)->what[round % 2] != what) return SERVELITE_RANKS_DIFFER;
    }
    return SERVELITE_DONE;
}

// Operations by what they are (never 0) and how many values: the same on every rank.
enum Operation : uint64_t { kBarrier = 1, kGather = 2, kSum = 3 /* and 4: by dtype */ };

inline uint64_t what_is(uint64_t operation, int64_t values) { return operation << 56 | (uint64_t)values; }

// The ranks' slots added in rank order, in float32, rounded once.
template <typename T>
void add_slots(const servelite_group *group, uint32_t round, T *out, int64_t count) {
    constexpr int64_t kBlock = 1024;  // sums that stay in the first cache while the ranks' parts pass
    alignas(64) float sums[kBlock];
    for (int64_t at = 0; at < count; at += kBlock) {
        const int64_t n = count - at < kBlock ? count - at : kBlock;
        const T *first = (const T *)slot(group, 0, round) + at;
        for (int64_t i = 0; i < n; ++i) sums[i] = to_float(first[i]);
        for (int32_t rank = 1; rank < group->size; ++rank) {
            const T *part = (const T *)slot(group, rank, round) + at;
            for (int64_t i = 0; i < n; ++i) sums[i] += to_float(part[i]);
        }
        for (int64_t i = 0; i < n; ++i) from_float(sums[i], out[at + i]);
    }
}

template <typename T>
int all_reduce(const servelite_group *group, T *data, int64_t count, uint64_t what) {
    constexpr int64_t kPiece = kSlotBytes / sizeof(T);
    for (int64_t at = 0; at < count; at += kPiece) {
        const int64_t n = count - at < kPiece ? count - at : kPiece;
        const uint32_t round = next_round(group);
        memcpy(slot(group, group->rank, round), data + at, n * sizeof(T));
        if (const int failed = exchange(group, round, what)) return failed;
        add_slots(group, round, data + at, n);
    }
    return SERVELITE_DONE;
}

// Words [at, at + n) of one rank's [rows, columns] to their places in [rows, size * columns].
void scatter(const servelite_group *group, int32_t rank, const uint32_t *from, uint32_t *out, int64_t columns,
             int64_t at, int64_t n) {
    int64_t row = at / columns, column = at % columns;
    while (n > 0) {
        const int64_t run = n < columns - column ? n : columns - column;
        memcpy(out + (row * group->size + rank) * columns + column, from, run * 4);
        from += run;
        n -= run;
        column = 0;
        ++row;
    }
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// How much memory a group of `size` ranks shares; 0 where there can be no such group.
EXPORTED int64_t servelite_collective_bytes(int32_t size) {
    if (size < 1 || size > kMaxSize) return 0;
    return header_bytes(size) + 2 * size * kSlotBytes;
}

// `data` [count] of every rank becomes their sum.
EXPORTED int servelite_all_reduce(const servelite_group *group, void *data, int64_t count, int32_t dtype) {
    if (!valid(group) || count < 0 || count >> 56 || (count && !data)) return SERVELITE_IMPOSSIBLE;
    const uint64_t what = what_is(kSum + (uint64_t)dtype, count);
    if (dtype == SERVELITE_SUM_FLOAT32) return all_reduce(group, (float *)data, count, what);
    if (dtype == SERVELITE_SUM_BFLOAT16) return all_reduce(group, (bfloat16 *)data, count, what);
    return SERVELITE_IMPOSSIBLE;
}

// `data` [rows, columns] words of every rank to `out` [rows, size * columns], which is none of theirs.
EXPORTED int servelite_all_gather(const servelite_group *group, const void *data, void *out, int64_t rows,
                                  int64_t columns) {
    int64_t count, all;
    if (!valid(group) || rows < 0 || columns < 0 || __builtin_mul_overflow(rows, columns, &count) ||
        __builtin_mul_overflow(count, (int64_t)group->size * 4, &all) || count >> 56 ||
        (count && (!data || !out)))
        return SERVELITE_IMPOSSIBLE;
    constexpr int64_t kPiece = kSlotBytes / 4;
    const uint64_t what = what_is(kGather, count);
    for (int64_t at = 0; at < count; at += kPiece) {
        const int64_t n = count - at < kPiece ? count - at : kPiece;
        const uint32_t round = next_round(group);
        memcpy(slot(group, group->rank, round), (const uint32_t *)data + at, n * 4);
        if (const int failed = exchange(group, round, what)) return failed;
        for (int32_t rank = 0; rank < group->size; ++rank)
            scatter(group, rank, (const uint32_t *)slot(group, rank, round), (uint32_t *)out, columns, at, n);
    }
    return SERVELITE_DONE;
}

// Returns when every rank has come here.
EXPORTED int servelite_barrier(const servelite_group *group) {
    if (!valid(group)) return SERVELITE_IMPOSSIBLE;
    return exchange(group, next_round(group), what_is(kBarrier, 0));
}
}
