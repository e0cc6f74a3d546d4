#include "link/resend_queue.h"

#include <algorithm>

namespace ringdp {
namespace {

constexpr uint64_t kForgetBytes = 1024 * 1024;
constexpr std::size_t kForgetFrames = 64;
constexpr std::size_t kSpareBytes = 1024 * 1024;

}  // namespace

void ResendQueue::add(std::span<const std::byte> head, std::span<const std::byte> payload, const SendFlow* lender) {
  Kept& it = kept_.emplace_back();
  std::copy(head.begin(), head.end(), it.head.begin());
  it.head_bytes = head.size();
  it.payload = payload;
  it.lender = lender;
  if (lender != nullptr) {
    ++lent_;
  } else {
    copy_payload(it);
  }
  it.end = stream_ += it.bytes();
}

void ResendQueue::take_over(const SendFlow& flow, std::span<const std::byte> memory) {
  if (lent_ == 0) return;
  auto concerned = [&](std::span<const std::byte> payload) {
    return memory.empty() ||
           (payload.data() < memory.data() + memory.size() && memory.data() < payload.data() + payload.size());
  };
  for (Kept& it : kept_) {
    if (it.lender != &flow || !concerned(it.payload)) continue;
    copy_payload(it);
    it.lender = nullptr;
    --lent_;
  }
}

void ResendQueue::copy_payload(Kept& it) {
  const std::size_t bytes = it.payload.size(), most = std::max(2 * bytes, kCopiedBytes);
  auto fits = [&](const auto& memory) { return memory.capacity() >= bytes && memory.capacity() <= most; };
  if (auto found = std::find_if(spare_.rbegin(), spare_.rend(), fits); found != spare_.rend()) {
    it.own = std::move(*found);
    spare_bytes_ -= it.own.capacity();
    spare_.erase(std::next(found).base());
  }
  it.own.assign(it.payload.begin(), it.payload.end());
  it.payload = it.own;
}

bool ResendQueue::should_forget() const {
  return stream_ - looked_at_ >= kForgetBytes || kept_.size() >= looked_size_ + kForgetFrames;
}

void ResendQueue::forget(uint64_t delivered_bytes) {
  while (!kept_.empty() && kept_.front().end <= delivered_bytes) drop_first();
  looked_at_ = stream_;
  looked_size_ = kept_.size();
}

void ResendQueue::drop_first() {
  Kept& it = kept_.front();
  if (it.lender != nullptr) --lent_;
  if (const std::size_t bytes = it.own.capacity();
      bytes > 0 && spare_.size() < kForgetFrames && spare_bytes_ + bytes <= kSpareBytes) {
    spare_bytes_ += bytes;
    spare_.push_back(std::move(it.own));
  }
  kept_.pop_front();
  ++first_;
}

bool ResendQueue::rewind(uint64_t taken) {
  const uint64_t next = first_ + kept_.size();
  if (taken < first_ || taken > next) return false;
  while (first_ < taken) drop_first();
  stream_ = 0;
  for (Kept& it : kept_) it.end = stream_ += it.bytes();
  again_ = first_;
  again_end_ = next;
  again_sent_ = 0;
  looked_at_ = stream_;
  looked_size_ = kept_.size();
  return true;
}

std::size_t ResendQueue::pieces(std::array<iovec, 3>& out) const {
  const Kept& it = at(again_);
  std::size_t count = 0;
  auto add = [&](std::span<const std::byte> bytes) {
    if (!bytes.empty()) out[count++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  };
  add(std::span(it.head).first(it.head_bytes).subspan(std::min(again_sent_, it.head_bytes)));
  add(it.payload.subspan(again_sent_ - std::min(again_sent_, it.head_bytes)));
  return count;
}

void ResendQueue::sent(std::size_t bytes) {
  again_sent_ += bytes;
  if (again_sent_ < at(again_).bytes()) return;
  again_sent_ = 0;
  ++again_;
}

}  // namespace ringdp
