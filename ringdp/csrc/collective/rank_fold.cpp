#include "collective/rank_fold.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringdp {
namespace {

constexpr std::size_t kPieceBytes = 16 * 1024;  // what is summed at a time: stays in the first-level cache

// Of all peers: 8 MiB. A grant waits behind this rank's queued frames to the same peer, and meanwhile the line must
// stay busy: with two blocks of each of three peers a sum took a fifth longer than a ring at 1 Gbit.
constexpr std::size_t kBlocksOfAll = 64;
constexpr std::size_t kLeastBlocks = 2;  // of a peer: one is filled while the other is added
constexpr std::size_t kMostBlocks = 16;
// Between far hosts, in all: 64 MiB. A path of 1 Gbit/s and 200 ms holds 25 MB in each direction, and as much in its
// queues.
constexpr std::size_t kFarBlocks = 512;

std::size_t blocks_for(int size, bool far) {
  const auto peers = static_cast<std::size_t>(std::max(1, size - 1));
  return far ? std::max(kFarBlocks / peers, kLeastBlocks) : std::clamp(kBlocksOfAll / peers, kLeastBlocks, kMostBlocks);
}

}  // namespace

RankOrderFold::RankOrderFold(int rank, int size, DType dtype, ReduceOp op, int divisor, bool far, bool in_stages)
    : rank_(rank),
      size_(size),
      blocks_(blocks_for(size, far)),
      element_bytes_(dtype_size(dtype)),
      divisor_(op == ReduceOp::kAvg ? static_cast<std::size_t>(divisor) : 1),
      kernels_(reduce_kernels(dtype, op)),
      upto_(size),
      in_stages_(in_stages && size > 2 && kernels_.accumulate == nullptr),
      summed_(in_stages_ ? size : 0) {}

void RankOrderFold::begin(ScratchPool& pool, std::span<const std::byte> own, std::span<std::byte> out) {
  begin(pool, Scattered({const_cast<std::byte*>(own.data()), own.size()}), Scattered(out));
}

void RankOrderFold::begin(ScratchPool& pool, Scattered own, Scattered out) {
  own_ = std::move(own);
  out_ = std::move(out);
  block_bytes_ = std::min<uint64_t>(kBlockBytes, out_.size());
  upto_[rank_] = out_.size();
  slots_.clear();
  slots_.reserve(static_cast<std::size_t>(size_));
  for (int member = 0; member < size_; ++member) {
    bool needed = member != rank_ && !out_.empty();
    std::size_t bytes = std::min<std::size_t>(blocks_ * kBlockBytes, out_.size());
    slots_.push_back(needed ? pool.take(bytes) : ScratchPool::Block(nullptr, {}));
  }
  const bool half_types = kernels_.accumulate != nullptr;
  if (half_types || size_ > 2) sum_ = pool.take(half_types ? kPieceBytes * 2 : kPieceBytes);
}

std::span<std::byte> RankOrderFold::room(int member, uint64_t offset, std::size_t length) {
  if (offset % kBlockBytes + length > kBlockBytes || offset + length > out_.size()) return {};
  return {slots_[member].get() + offset % (blocks_ * kBlockBytes), length};
}

uint64_t RankOrderFold::window() const {
  return std::min<uint64_t>(out_.size(), (folded_ / kBlockBytes + blocks_) * kBlockBytes);
}

const std::byte* RankOrderFold::source(int member, uint64_t offset) const {
  if (member != rank_ && !lent_.empty()) return lent_.data() + (offset - lent_at_);
  return member == rank_ ? own_.at(offset, 1).data() : slots_[member].get() + offset % (blocks_ * kBlockBytes);
}

bool RankOrderFold::take(int member, uint64_t offset, std::span<const std::byte> data, uint64_t limit) {
  if (in_stages_) return take_in_stages(member, offset, data, limit);
  limit = std::min(limit, upto_[rank_]);
  if (size_ != 2 || offset != folded_ || offset + data.size() > limit || data.size() % element_bytes_ != 0)
    return false;
  lent_ = data;
  lent_at_ = offset;
  upto_[member] = offset + data.size();
  advance(limit);
  lent_ = {};
  return true;
}

uint64_t RankOrderFold::reach(uint64_t limit) const {
  const uint64_t end = std::min(limit, *std::min_element(upto_.begin(), upto_.end()));
  return end == out_.size() ? end : end - end % element_bytes_;
}

uint64_t RankOrderFold::advance(uint64_t limit) {
  if (in_stages_) {
    advance_in_stages(limit);
    return folded_;
  }
  const uint64_t end = reach(limit);
  while (folded_ < end) {
    // Whole pieces, and never across a block's end, where a peer's bytes continue in its other block, or a place's.
    uint64_t block_end = (folded_ / kBlockBytes + 1) * kBlockBytes;
    std::size_t bytes = std::min({end - folded_, block_end - folded_, uint64_t{kPieceBytes}});
    bytes = own_.at(folded_, bytes).size();
    const std::span<std::byte> out = out_.at(folded_, bytes);
    bytes = out.size();
    if (watch_own_ != nullptr) watch_own_->own({source(rank_, folded_), bytes});
    if (kernels_.accumulate != nullptr)
      fold_half(folded_, out);
    else
      fold_wide(folded_, out);
    if (watch_result_ != nullptr) watch_result_->result(out);
    folded_ += bytes;
  }
  return folded_;
}

// The sum of the ranks before this one is in the first block of rank 0, that of this one and more in `out`.
std::span<std::byte> RankOrderFold::sum_upto(int member, uint64_t offset, std::size_t most) {
  if (member >= rank_) return out_.at(offset, most);
  return {slots_[0].get() + offset % (blocks_ * kBlockBytes), most};
}

uint64_t RankOrderFold::reach_of(int member, uint64_t limit) const {
  const uint64_t before = member == 1 ? upto_[0] : summed_[static_cast<std::size_t>(member) - 1];
  uint64_t end = std::min(before, upto_[static_cast<std::size_t>(member)]);
  if (member >= rank_) end = std::min(end, limit);  // it goes to `out`
  return end == out_.size() ? end : end - end % element_bytes_;
}

std::size_t RankOrderFold::add(int member, uint64_t end, const std::byte* data) {
  uint64_t& summed = summed_[static_cast<std::size_t>(member)];
  const uint64_t begin = summed, block_end = (begin / kBlockBytes + 1) * kBlockBytes;
  std::size_t bytes = std::min({end - begin, block_end - begin, uint64_t{kPieceBytes}});
  bytes = own_.at(begin, bytes).size();
  bytes = out_.at(begin, bytes).size();
  const std::byte* own = own_.at(begin, bytes).data();
  const std::byte* left = member == 1 && rank_ == 0 ? own : sum_upto(member - 1, begin, bytes).data();
  if (watch_own_ != nullptr && member == std::max(rank_, 1)) watch_own_->own({own, bytes});
  const std::span<std::byte> to = sum_upto(member, begin, bytes);
  const std::size_t count = bytes / element_bytes_;
  const bool last = member == size_ - 1, divides = last && divisor_ > 1 && kernels_.divide != nullptr;
  if (divides && kernels_.mean != nullptr) {
    kernels_.mean(to.data(), left, data, divisor_, count);
  } else {
    kernels_.combine(to.data(), left, data, count);
    if (divides) kernels_.divide(to.data(), divisor_, count);
  }
  if (last && watch_result_ != nullptr) watch_result_->result(to);
  summed += bytes;
  if (last) folded_ = summed;
  return bytes;
}

// Adds the ranks' pieces in rank order, while the sum is in the cache.
void RankOrderFold::advance_in_stages(uint64_t limit) {
  for (bool moved = true; moved;) {
    moved = false;
    for (int member = 1; member < size_; ++member) {
      const uint64_t begin = summed_[static_cast<std::size_t>(member)], end = reach_of(member, limit);
      if (begin >= end) continue;
      add(member, end, source(member, begin));
      moved = true;
    }
  }
}

bool RankOrderFold::take_in_stages(int member, uint64_t offset, std::span<const std::byte> data, uint64_t limit) {
  auto& upto = upto_[static_cast<std::size_t>(member)];
  const std::span<std::byte> room = this->room(member, offset, data.size());
  if (room.empty() || offset != upto) return false;
  upto = offset + data.size();
  std::size_t added = 0;
  if (member > 0 && summed_[static_cast<std::size_t>(member)] == offset) {
    const uint64_t end = reach_of(member, limit);
    while (offset + added < end) added += add(member, end, data.data() + added);
  }
  std::memcpy(room.data() + added, data.data() + added, data.size() - added);
  advance_in_stages(limit);
  return true;
}

void RankOrderFold::fold_wide(uint64_t begin, std::span<std::byte> place) {
  std::size_t count = place.size() / element_bytes_;
  std::byte* out = place.data();
  const bool divides = divisor_ > 1 && kernels_.divide != nullptr;
  // The running sum may not overwrite this rank's own input before its turn: it lives in `sum_` until the last step.
  const std::byte* left = source(0, begin);
  for (int member = 1; member < size_; ++member) {
    std::byte* to = member == size_ - 1 ? out : sum_.get();
    if (member == size_ - 1 && divides && kernels_.mean != nullptr)
      return kernels_.mean(to, left, source(member, begin), divisor_, count);
    kernels_.combine(to, left, source(member, begin), count);
    left = to;
  }
  if (divides) kernels_.divide(out, divisor_, count);
}

void RankOrderFold::fold_half(uint64_t begin, std::span<std::byte> place) {
  std::size_t count = place.size() / element_bytes_;
  auto* sum = reinterpret_cast<float*>(sum_.get());
  kernels_.load(sum, source(0, begin), count);
  for (int member = 1; member < size_; ++member) kernels_.accumulate(sum, source(member, begin), count);
  kernels_.store(place.data(), sum, static_cast<float>(divisor_), count);
}

}  // namespace ringdp
