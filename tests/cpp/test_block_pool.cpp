// The pool of large blocks: blocks never overlap, idle memory is reused, and what was idle for long enough is the
// kernel's.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/block_pool.h"
#include "testing.h"

namespace ringdp::testing {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kUnit = BlockPool::kUnitBytes;

struct Block {
  unsigned char* memory = nullptr;
  std::size_t bytes = 0;
  unsigned char mark = 0;
};

// The first and the last byte of every page have the block's mark.
void write(const Block& block) {
  for (std::size_t i = 0; i < block.bytes; i += 4096) block.memory[i] = block.mark;
  block.memory[block.bytes - 1] = block.mark;
}

bool intact(const Block& block) {
  for (std::size_t i = 0; i < block.bytes; i += 4096) {
    if (block.memory[i] != block.mark) return false;
  }
  return block.memory[block.bytes - 1] == block.mark;
}

Block made(BlockPool& pool, std::size_t bytes, unsigned char mark = 1) {
  Block block{static_cast<unsigned char*>(pool.allocate(bytes)), bytes, mark};
  REQUIRE(block.memory != nullptr);
  write(block);
  return block;
}

void steps(BlockPool& pool, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) pool.end_step();
}

// Of the range that `block` had: how many pages are in memory, or -1 where it is not mapped.
long resident_pages(const void* block, std::size_t bytes) {
  std::vector<unsigned char> pages(bytes / 4096);
  if (mincore(const_cast<void*>(block), bytes, pages.data()) != 0) return -1;
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; });
}

}  // namespace

CASE("a released block serves the next request of its size, and none costs memory beside it") {
  BlockPool pool;
  const Block first = made(pool, 16 * kMiB);
  CHECK_EQ(reinterpret_cast<uintptr_t>(first.memory) % kUnit, 0u);
  CHECK(pool.owns(first.memory));
  CHECK_EQ(pool.use().in_use_bytes, 16 * kMiB);
  pool.release(first.memory);
  CHECK_EQ(pool.use().in_use_bytes, 0u);
  CHECK_EQ(pool.use().idle_bytes, 16 * kMiB);
  CHECK(pool.allocate(16 * kMiB) == first.memory);
  CHECK_EQ(pool.use().idle_bytes, 0u);
}

CASE("released neighbours are one block again, whatever the order") {
  BlockPool pool;
  for (const std::vector<int>& order : {std::vector{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}}) {
    void* blocks[3];
    for (void*& block : blocks) block = pool.allocate(8 * kMiB);
    for (const int i : order) pool.release(blocks[i]);
    void* const whole = pool.allocate(BlockPool::kSegmentBytes);
    CHECK_EQ(pool.use().mapped_bytes, BlockPool::kSegmentBytes);
    pool.release(whole);
  }
}

CASE("a request takes the smallest hole that holds it") {
  BlockPool pool;
  void* const large = pool.allocate(8 * kMiB);
  const Block wall = made(pool, kMiB);
  void* const small = pool.allocate(3 * kMiB);
  const Block end = made(pool, BlockPool::kSegmentBytes - 12 * kMiB);
  pool.release(large);
  pool.release(small);
  CHECK(pool.allocate(3 * kMiB) == small);
  CHECK(pool.allocate(5 * kMiB) == large);
  CHECK(intact(wall) && intact(end));
}

CASE("sizes around a page, a unit and a segment") {
  BlockPool pool;
  for (const std::size_t limit : {BlockPool::kGranuleBytes, kUnit, BlockPool::kSegmentBytes, 3 * kUnit}) {
    for (const std::size_t bytes : {limit - 1, limit, limit + 1}) {
      const Block block = made(pool, bytes);
      CHECK_EQ(reinterpret_cast<uintptr_t>(block.memory) % BlockPool::kGranuleBytes, 0u);
      CHECK_EQ(pool.use().in_use_bytes, (bytes + 4095) / 4096 * 4096);
      pool.release(block.memory);
    }
  }
  CHECK(pool.allocate(0) == nullptr);
  CHECK(pool.allocate(std::numeric_limits<std::size_t>::max()) == nullptr);
  CHECK(pool.allocate(std::numeric_limits<std::size_t>::max() / 2) == nullptr);
}

CASE("what is not the pool's is left alone") {
  BlockPool pool;
  const Block block = made(pool, 4 * kMiB);
  int other = 0;
  CHECK(!pool.owns(&other));
  pool.release(&other);
  pool.release(block.memory + 4096);
  pool.release(nullptr);
  CHECK_EQ(pool.use().in_use_bytes, 4 * kMiB);
  pool.release(block.memory);
  pool.release(block.memory);
  CHECK_EQ(pool.use().in_use_bytes, 0u);
}

CASE("memory stays for kKeptSteps steps after its last use, then the kernel has it back") {
  BlockPool pool;
  const Block block = made(pool, 8 * kMiB);
  steps(pool, 3 * BlockPool::kKeptSteps);  // in use, however long
  CHECK(intact(block));
  pool.release(block.memory);
  steps(pool, BlockPool::kKeptSteps - 1);
  CHECK_EQ(pool.use().idle_bytes, 8 * kMiB);
  CHECK_EQ(resident_pages(block.memory, block.bytes), 2048);
  pool.end_step();
  CHECK_EQ(pool.use().idle_bytes, 0u);
  CHECK_EQ(pool.use().mapped_bytes, 0u);
}

CASE("units that no block covered are given back one by one, beside blocks that stay") {
  BlockPool pool;
  const Block stays = made(pool, kUnit + kMiB, 7);  // one unit and a half
  const Block goes = made(pool, 4 * kUnit - kMiB, 8);
  pool.release(goes.memory);
  for (uint64_t i = 0; i <= BlockPool::kKeptSteps; ++i) {
    const Block again = made(pool, kMiB / 2, 9);  // in the half that is left of the second unit
    pool.release(again.memory);
    pool.end_step();
  }
  CHECK(intact(stays));
  CHECK_EQ(pool.use().idle_bytes, kUnit - kMiB);
  CHECK_EQ(resident_pages(stays.memory + 2 * kUnit, 3 * kUnit), 0);
  CHECK_EQ(pool.use().mapped_bytes, BlockPool::kSegmentBytes);
  const Block anew = made(pool, 4 * kUnit, 10);  // what was given back can be had again
  CHECK(intact(stays) && intact(anew));
}

CASE("a pool that keeps nothing gives blocks back when they are released") {
  BlockPool pool;
  const Block idle = made(pool, 6 * kMiB), used = made(pool, 10 * kMiB);
  pool.release(idle.memory);
  pool.keep(false);
  CHECK_EQ(pool.use().idle_bytes, 0u);
  CHECK_EQ(resident_pages(idle.memory, idle.bytes), 0);
  CHECK(intact(used));
  pool.release(used.memory);
  CHECK_EQ(pool.use().mapped_bytes, 0u);
  pool.keep(true);
  pool.release(made(pool, 6 * kMiB).memory);
  CHECK_EQ(pool.use().idle_bytes, 6 * kMiB);
}

CASE("blocks of all sizes from several threads, each released by another one: none overlaps, nothing is lost") {
  BlockPool pool;
  std::mutex mutex;
  std::vector<Block> handed_over;
  std::atomic<int> damaged{0};
  run_ranks(4, [&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int i = 0; i < 300; ++i) {
      const std::size_t bytes = 1 + random() % (random() % 16 == 0 ? 40 * kMiB : 3 * kMiB);
      const Block mine = made(pool, bytes, static_cast<unsigned char>(1 + random() % 255));
      Block other;
      {
        const std::lock_guard lock(mutex);
        handed_over.push_back(mine);
        if (handed_over.size() > 12) {
          std::swap(handed_over[random() % handed_over.size()], handed_over.back());
          other = handed_over.back();
          handed_over.pop_back();
        }
      }
      if (other.memory != nullptr) {
        if (!intact(other)) ++damaged;
        pool.release(other.memory);
      }
      if (i % 5 == 0) pool.end_step();
    }
  });
  std::size_t in_use = 0;
  for (const Block& block : handed_over) {
    if (!intact(block)) ++damaged;
    in_use += (block.bytes + 4095) / 4096 * 4096;
  }
  CHECK_EQ(damaged.load(), 0);
  CHECK_EQ(pool.use().in_use_bytes, in_use);
  for (const Block& block : handed_over) pool.release(block.memory);
  steps(pool, BlockPool::kKeptSteps);
  CHECK_EQ(pool.use().mapped_bytes, 0u);
}

CASE("a forked child has the blocks, may release them and allocate, while threads of the parent do") {
  BlockPool pool;
  const Block block = made(pool, 4 * kMiB, 3);
  std::atomic<bool> over{false};
  std::thread busy([&] {
    while (!over) pool.release(pool.allocate(2 * kMiB));
  });
  for (int i = 0; i < 20; ++i) {
    pool.lock_for_fork();
    const pid_t child = fork();
    pool.unlock_after_fork();
    if (child == 0) {
      bool good = intact(block);
      pool.release(block.memory);
      const Block own{static_cast<unsigned char*>(pool.allocate(4 * kMiB)), 4 * kMiB, 5};
      if (own.memory != nullptr) write(own);
      for (uint64_t step = 0; step < 2 * BlockPool::kKeptSteps; ++step) pool.end_step();
      good = good && own.memory != nullptr && intact(own);
      _exit(good ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(intact(block));
  }
  over = true;
  busy.join();
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // these need address space themselves
CASE("where the system refuses there is no block, and idle memory makes room first") {
  BlockPool pool;
  const pid_t child = fork();
  if (child == 0) {
    pool.release(made(pool, 256 * kMiB).memory);
    std::size_t pages = 0;
    FILE* const statm = fopen("/proc/self/statm", "r");
    if (statm == nullptr || fscanf(statm, "%zu", &pages) != 1) _exit(2);
    fclose(statm);
    const rlimit limit{pages * 4096 + 64 * kMiB, RLIM_INFINITY};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(3);
    if (pool.allocate(1024 * kMiB) != nullptr) _exit(4);
    if (pool.use().mapped_bytes != 0) _exit(5);
    if (pool.allocate(300 * kMiB) == nullptr) _exit(6);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
}
#endif

}  // namespace ringdp::testing
