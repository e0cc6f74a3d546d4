// The measured ceiling of an all-reduce on one host: float32 sums through shared memory, written for nothing but speed
// and compiled when the benchmark runs. No errors, no fairness, no progress beside it, a rank that dies hangs the
// others: what a library can be held against, not what one could be. ceiling.py loads it.
//
// Tensors are private. A rank copies its block into one of its slots in shared memory, which stay in the cache, and
// the others add straight out of it. Two ranks, and small buffers: everybody adds everybody's blocks (fold). More:
// each rank adds one piece of a block and the others copy the result (reduce-scatter and all-gather). Several blocks
// are under way at once.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kMaxRanks = 16;
constexpr std::size_t kDepth = 4;                    // slots of each rank
constexpr std::size_t kSlotFloats = 256 * 1024 / 4;  // the size of a slot
constexpr std::size_t kFoldFloats = 32 * 1024 / 4;   // of the whole buffer, with more than two ranks
constexpr std::size_t kAlign = 16;                   // pieces begin at multiples of it
constexpr int kSpins = 2000;                         // looks before the core is given away

struct alignas(128) Counter {
  std::atomic<uint64_t> value{0};
};

struct alignas(4096) Rank {
  Counter given;  // blocks copied into slots
  Counter added;  // blocks of which this rank's part is summed
  Counter taken;  // blocks of which it has everything
  alignas(4096) float slot[kDepth][kSlotFloats];
  alignas(4096) float sum[kDepth][kSlotFloats];
};

struct Shared {
  Rank rank[kMaxRanks];
};

struct Ceiling {
  Shared* shared;
  int rank;
  int ranks;
  uint64_t blocks = 0;  // of all calls so far
  bool crowded;         // more ranks than cores
};

uint64_t now(const Counter& counter) { return counter.value.load(std::memory_order_acquire); }
void set(Counter& counter, uint64_t value) { counter.value.store(value, std::memory_order_release); }

template <class Reached>
bool all(const Ceiling& self, Reached reached) {
  for (int other = 0; other < self.ranks; ++other)
    if (other != self.rank && !reached(self.shared->rank[other])) return false;
  return true;
}

// Spins while nothing moves, then lets another rank have the core.
struct Patience {
  explicit Patience(bool crowded) : limit(crowded ? 20 : kSpins) {}
  void wait(bool moved) {
    if (moved) {
      spins = 0;
    } else if (++spins > limit) {
      sched_yield();
      spins = 0;
    } else {
      __builtin_ia32_pause();
    }
  }
  int limit;
  int spins = 0;
};

void add_all(Ceiling& self, float* out, const float* own, std::size_t slot, std::size_t from, std::size_t count) {
  // In rank order, cut so that the partial sums stay in the first-level cache.
  constexpr std::size_t kCut = 2048;
  for (std::size_t at = 0; at < count; at += kCut) {
    std::size_t length = std::min(kCut, count - at);
    auto source = [&](int r) { return r == self.rank ? own + at : self.shared->rank[r].slot[slot] + from + at; };
    const float* a = source(0);
    const float* b = source(1);
    float* to = out + at;
    for (std::size_t i = 0; i < length; ++i) to[i] = a[i] + b[i];
    for (int r = 2; r < self.ranks; ++r) {
      const float* c = source(r);
      for (std::size_t i = 0; i < length; ++i) to[i] += c[i];
    }
  }
}

void fold(Ceiling& self, float* data, std::size_t count) {
  Rank& own = self.shared->rank[self.rank];
  uint64_t first = self.blocks, blocks = (count + kSlotFloats - 1) / kSlotFloats, last = first + blocks;
  auto place = [&](uint64_t block) { return (block - first) * kSlotFloats; };
  auto length = [&](uint64_t block) { return std::min(kSlotFloats, count - place(block)); };
  Patience patience(self.crowded);
  uint64_t given = first, taken = first;
  while (taken < last) {
    bool moved = false;
    if (given < last && given - taken < kDepth &&
        all(self, [&](const Rank& r) { return now(r.taken) + kDepth > given; })) {
      std::memcpy(own.slot[given % kDepth], data + place(given), length(given) * 4);
      set(own.given, ++given);
      moved = true;
    }
    if (taken < given && all(self, [&](const Rank& r) { return now(r.given) > taken; })) {
      float* x = data + place(taken);
      // With more than two ranks this rank's own values must last until they are added: they are in its slot.
      if (self.ranks == 2)
        add_all(self, x, x, taken % kDepth, 0, length(taken));
      else
        add_all(self, x, own.slot[taken % kDepth], taken % kDepth, 0, length(taken));
      set(own.added, taken + 1);
      set(own.taken, ++taken);
      moved = true;
    }
    patience.wait(moved);
  }
  self.blocks = last;
}

void scatter_and_gather(Ceiling& self, float* data, std::size_t count) {
  Rank& own = self.shared->rank[self.rank];
  // A block is cut into a piece for each rank.
  std::size_t ranks = static_cast<std::size_t>(self.ranks), me = static_cast<std::size_t>(self.rank);
  std::size_t block_floats = kSlotFloats / (kAlign * ranks) * kAlign * ranks;
  uint64_t first = self.blocks, blocks = (count + block_floats - 1) / block_floats, last = first + blocks;
  auto place = [&](uint64_t block) { return (block - first) * block_floats; };
  struct Span {
    std::size_t from, length;  // within the block
  };
  auto piece = [&](uint64_t block, std::size_t r) {
    std::size_t length = std::min(block_floats, count - place(block));
    std::size_t each = ((length + ranks - 1) / ranks + kAlign - 1) / kAlign * kAlign;
    std::size_t from = std::min(r * each, length);
    return Span{from, std::min(each, length - from)};
  };
  Patience patience(self.crowded);
  uint64_t given = first, added = first, taken = first;
  while (taken < last) {
    bool moved = false;
    if (given < last && given - taken < kDepth &&
        all(self, [&](const Rank& r) { return now(r.added) + kDepth > given; })) {
      for (std::size_t r = 0; r < ranks; ++r) {
        Span it = piece(given, r);
        if (r != me) std::memcpy(own.slot[given % kDepth] + it.from, data + place(given) + it.from, it.length * 4);
      }
      set(own.given, ++given);
      moved = true;
    }
    if (added < given &&
        all(
            self, [&](const Rank& r) { return now(r.given) > added; }) &&
        all(self, [&](const Rank& r) { return now(r.taken) + kDepth > added; })) {
      Span it = piece(added, me);
      float* x = data + place(added) + it.from;
      float* sum = own.sum[added % kDepth];
      add_all(self, sum, x, added % kDepth, it.from, it.length);
      std::memcpy(x, sum, it.length * 4);
      set(own.added, ++added);
      moved = true;
    }
    if (taken < added && all(self, [&](const Rank& r) { return now(r.added) > taken; })) {
      for (std::size_t r = 0; r < ranks; ++r) {
        Span it = piece(taken, r);
        if (r != me)
          std::memcpy(data + place(taken) + it.from, self.shared->rank[r].sum[taken % kDepth], it.length * 4);
      }
      set(own.taken, ++taken);
      moved = true;
    }
    patience.wait(moved);
  }
  self.blocks = last;
}

}  // namespace

extern "C" {

std::size_t ceiling_bytes() { return sizeof(Shared); }

// `shared`: ceiling_bytes() zeroes that all ranks have mapped.
Ceiling* ceiling_join(void* shared, int rank, int ranks, int cores) {
  if (ranks < 2 || ranks > kMaxRanks) return nullptr;
  auto* self = new Ceiling{};
  self->shared = static_cast<Shared*>(shared);
  self->rank = rank;
  self->ranks = ranks;
  self->crowded = ranks > cores;
  return self;
}

void ceiling_leave(Ceiling* self) { delete self; }

// In place; all ranks call it with the same `count`, in the same order.
void ceiling_all_reduce(Ceiling* self, float* data, std::size_t count) {
  if (self->ranks == 2 || count <= kFoldFloats)
    fold(*self, data, count);
  else
    scatter_and_gather(*self, data, count);
}
}
