// The rows that a list of ids asks for, each once, grouped by the rank that owns it; and RowDirectory, which assigns
// rows to the ids of a table that grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/rows.h"

namespace ringdp::rows {

// A permutation of the numbers from 0 to rows - 1, dealt to the ranks in turn: an id's place is id·factor mod rows;
// the place belongs to rank place mod ranks, where it is row place / ranks. rows·factor must fit int64.
struct Deal {
  uint64_t rows;
  uint64_t factor;
  uint64_t ranks;
};

uint64_t hash_of(int64_t id);  // splitmix64's; an id of a growing table belongs to rank hash mod ranks

// The distinct numbers of a list, grouped by owner; within an owner in order of first occurrence.
struct Asked {
  std::vector<int64_t> ids;
  std::vector<int64_t> times;      // how often each is in the list
  std::vector<int64_t> per_owner;  // how many each rank owns
  std::vector<Index> inverse;      // of each number in the list: its index in `ids`
};

// Stateless, any thread. At most 2^30 numbers.
Asked ask(std::span<const int64_t> ids,
          const Deal& deal);  // `ids` of the result are rows of the owner; numbers of the list must be below deal.rows
Asked ask_hashed(std::span<const int64_t> ids, uint64_t ranks);  // any numbers
// The distinct rows of a list in order of first occurrence. Negative numbers are skipped, and have the inverse -1.
Asked distinct(std::span<const Index> rows);

// The ids that have a row on this rank, or whose occurrences it counts. An id gets a row when it has occurred
// `admit_after` times. An id unused for more than `evict_after` steps is forgotten. The result depends on the ids
// seen, not on the number of ranks or on when memory is freed. Used by one thread at a time; owned by a table in
// Python.
class RowDirectory {
 public:
  // evict_after 0: never.
  RowDirectory(uint64_t admit_after, uint64_t evict_after);

  struct Found {
    std::vector<Index> rows;       // of each id; -1: it has none
    std::vector<int64_t> new_ids;  // ids that got a row in this call,
    std::vector<Index> new_rows;   // their rows, to be filled by the caller
  };

  // Rows of `ids`, which may repeat. Id i occurs times[i] times at step `clock`; 0: it is only looked up. Clocks do
  // not decrease. All rows returned are below capacity().
  Found look_up(std::span<const int64_t> ids, std::span<const int64_t> times, int64_t clock);

  std::size_t capacity() const { return capacity_; }  // one above the largest row so far
  std::size_t count(int64_t clock) const;             // ids with a row

  struct Entry {
    int64_t id;
    int64_t seen;  // the step at which it occurred last
    int64_t times;
    Index row;  // -1: none yet
  };

  // The entries that have not expired at step `clock`, in ascending order of ids.
  std::vector<Entry> entries(int64_t clock) const;
  // Adds an entry of another directory, whose id is not in this one; returns its row here.
  Index add(const Entry& entry);

 private:
  struct Slot {
    int64_t id = 0;
    int64_t seen = kFree;
    int64_t times = 0;
    Index row = -1;
  };
  static constexpr int64_t kFree = -1;

  bool expired(const Slot& slot, int64_t clock) const;
  Slot* find(int64_t id);  // the id's slot, or the free one where it would be
  Index take_row(int64_t clock);
  void give_back(Slot& slot);
  void make_room(int64_t clock);
  void rebuild(std::size_t size, int64_t clock);

  uint64_t admit_after_;
  uint64_t evict_after_;
  std::vector<Slot> slots_;  // open addressing, linear probing; a power of two, at most half of them used
  std::size_t used_ = 0;
  std::vector<Index> free_rows_;
  std::size_t capacity_ = 0;
  int64_t swept_ = 0;  // the clock of the last eviction
};

// A row for an id of a growing table: sums of twelve uniform numbers, nearly normal, times `size`. They depend on id
// and seed alone, and on no library's functions.
template <class T>
void fill_row(T* row, std::size_t dim, int64_t id, uint64_t seed, double size);

}  // namespace ringdp::rows
