#include "kernels/row_index.h"

#include <algorithm>
#include <bit>

namespace ringdp::rows {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
constexpr std::size_t kLeastSlots = 64;
constexpr int kUniforms = 12;  // whose sum has variance 1

constexpr uint64_t spread(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// The distinct numbers of a list in order of first occurrence, and for each number of the list its index among them.
template <class Number>
Asked find_distinct(std::span<const Number> list) {
  Asked out;
  out.inverse.resize(list.size());
  const std::size_t size = std::bit_ceil(std::max(kLeastSlots, 2 * list.size()));
  const int shift = 64 - std::countr_zero(size);
  std::vector<Index> slots(size, -1);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto number = static_cast<int64_t>(list[i]);
    if constexpr (sizeof(Number) == sizeof(Index)) {
      if (number < 0) {
        out.inverse[i] = -1;
        continue;
      }
    }
    std::size_t at = (static_cast<uint64_t>(number) * kGolden) >> shift;
    while (slots[at] >= 0 && out.ids[slots[at]] != number) at = (at + 1) & (size - 1);
    if (slots[at] < 0) {
      slots[at] = static_cast<Index>(out.ids.size());
      out.ids.push_back(number);
      out.times.push_back(0);
    }
    ++out.times[slots[at]];
    out.inverse[i] = slots[at];
  }
  return out;
}

// Groups the ids by owner. `owner_of(id)` may change the id to the owner's row.
template <class OwnerOf>
void group(Asked& asked, uint64_t ranks, OwnerOf owner_of) {
  const std::size_t count = asked.ids.size();
  asked.per_owner.assign(ranks, 0);
  std::vector<uint32_t> owners(count);
  for (std::size_t i = 0; i < count; ++i) {
    owners[i] = static_cast<uint32_t>(owner_of(asked.ids[i]));
    ++asked.per_owner[owners[i]];
  }
  std::vector<Index> next(ranks, 0);
  for (uint64_t rank = 1; rank < ranks; ++rank)
    next[rank] = next[rank - 1] + static_cast<Index>(asked.per_owner[rank - 1]);
  std::vector<Index> moved(count);
  std::vector<int64_t> ids(count), times(count);
  for (std::size_t i = 0; i < count; ++i) {
    moved[i] = next[owners[i]]++;
    ids[moved[i]] = asked.ids[i];
    times[moved[i]] = asked.times[i];
  }
  asked.ids = std::move(ids);
  asked.times = std::move(times);
  for (Index& it : asked.inverse) it = moved[it];
}

}  // namespace

uint64_t hash_of(int64_t id) { return spread(static_cast<uint64_t>(id) + kGolden); }

Asked ask(std::span<const int64_t> ids, const Deal& deal) {
  Asked out = find_distinct(ids);
  group(out, deal.ranks, [&](int64_t& id) {
    const uint64_t place = static_cast<uint64_t>(id) * deal.factor % deal.rows;
    id = static_cast<int64_t>(place / deal.ranks);
    return place % deal.ranks;
  });
  return out;
}

Asked ask_hashed(std::span<const int64_t> ids, uint64_t ranks) {
  Asked out = find_distinct(ids);
  group(out, ranks, [&](int64_t& id) { return hash_of(id) % ranks; });
  return out;
}

Asked distinct(std::span<const Index> rows) { return find_distinct(rows); }

RowDirectory::RowDirectory(uint64_t admit_after, uint64_t evict_after)
    : admit_after_(admit_after), evict_after_(evict_after), slots_(kLeastSlots) {}

RowDirectory::Found RowDirectory::look_up(std::span<const int64_t> ids, std::span<const int64_t> times, int64_t clock) {
  Found out;
  out.rows.resize(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (times[i] <= 0) continue;
    Slot* slot = find(ids[i]);
    if (slot->seen == kFree) {
      if (2 * (used_ + 1) > slots_.size()) {
        make_room(clock);
        slot = find(ids[i]);
      }
      *slot = {.id = ids[i], .seen = clock, .times = 0, .row = -1};
      ++used_;
    } else if (expired(*slot, clock)) {
      give_back(*slot);
    }
    slot->seen = clock;
    slot->times += times[i];
    if (slot->row < 0 && static_cast<uint64_t>(slot->times) >= admit_after_) {
      const Index row = take_row(clock);
      slot = find(ids[i]);  // evicting expired ids moves the others
      slot->row = row;
      out.new_ids.push_back(ids[i]);
      out.new_rows.push_back(row);
    }
  }
  // after all have been counted, so that all occurrences of an id get the same row
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Slot* slot = find(ids[i]);
    out.rows[i] = slot->seen == kFree || expired(*slot, clock) ? -1 : slot->row;
  }
  return out;
}

std::size_t RowDirectory::count(int64_t clock) const {
  return static_cast<std::size_t>(std::count_if(slots_.begin(), slots_.end(), [&](const Slot& it) {
    return it.seen != kFree && it.row >= 0 && !expired(it, clock);
  }));
}

std::vector<RowDirectory::Entry> RowDirectory::entries(int64_t clock) const {
  std::vector<Entry> out;
  for (const Slot& it : slots_)
    if (it.seen != kFree && !expired(it, clock)) out.push_back({it.id, it.seen, it.times, it.row});
  std::sort(out.begin(), out.end(), [](const Entry& a, const Entry& b) { return a.id < b.id; });
  return out;
}

Index RowDirectory::add(const Entry& entry) {
  if (2 * (used_ + 1) > slots_.size()) rebuild(2 * slots_.size(), entry.seen);
  Slot* slot = find(entry.id);
  if (slot->seen == kFree) ++used_;
  *slot = {.id = entry.id, .seen = entry.seen, .times = entry.times, .row = -1};
  if (entry.row >= 0) slot->row = static_cast<Index>(capacity_++);
  return slot->row;
}

bool RowDirectory::expired(const Slot& slot, int64_t clock) const {
  return evict_after_ > 0 && clock - slot.seen > static_cast<int64_t>(evict_after_);
}

RowDirectory::Slot* RowDirectory::find(int64_t id) {
  std::size_t at = hash_of(id) >> (64 - std::countr_zero(slots_.size()));
  while (slots_[at].seen != kFree && slots_[at].id != id) at = (at + 1) & (slots_.size() - 1);
  return &slots_[at];
}

Index RowDirectory::take_row(int64_t clock) {
  if (free_rows_.empty() && evict_after_ > 0 && clock - swept_ > static_cast<int64_t>(evict_after_) / 2)
    rebuild(slots_.size(), clock);
  if (free_rows_.empty()) return static_cast<Index>(capacity_++);
  const Index row = free_rows_.back();
  free_rows_.pop_back();
  return row;
}

void RowDirectory::give_back(Slot& slot) {
  if (slot.row >= 0) free_rows_.push_back(slot.row);
  slot.row = -1;
  slot.times = 0;
}

void RowDirectory::make_room(int64_t clock) {
  rebuild(slots_.size(), clock);
  if (4 * (used_ + 1) > slots_.size()) rebuild(2 * slots_.size(), clock);
}

void RowDirectory::rebuild(std::size_t size, int64_t clock) {
  std::vector<Slot> before(size);
  before.swap(slots_);
  used_ = 0;
  swept_ = clock;
  for (Slot& it : before) {
    if (it.seen == kFree) continue;
    if (expired(it, clock)) {
      give_back(it);
      continue;
    }
    *find(it.id) = it;
    ++used_;
  }
}

template <class T>
void fill_row(T* row, std::size_t dim, int64_t id, uint64_t seed, double size) {
  uint64_t state = hash_of(id) ^ spread(seed * kGolden + 1);
  for (std::size_t j = 0; j < dim; ++j) {
    int64_t total = 0;
    for (int i = 0; i < kUniforms; i += 4) {
      const uint64_t bits = spread(state += kGolden);
      for (int k = 0; k < 4; ++k) total += static_cast<int64_t>(bits >> (16 * k) & 0xffffu);
    }
    const double centred = static_cast<double>(2 * total - kUniforms * 65535) * 0x1p-17;
    row[j] = static_cast<T>(centred * size);
  }
}

template void fill_row<float>(float*, std::size_t, int64_t, uint64_t, double);
template void fill_row<double>(double*, std::size_t, int64_t, uint64_t, double);

}  // namespace ringdp::rows
