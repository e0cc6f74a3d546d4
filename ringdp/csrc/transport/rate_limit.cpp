#include "transport/rate_limit.h"

#include <algorithm>

namespace ringdp {

RateLimiter::RateLimiter(int64_t bytes_per_s)
    : ns_per_byte_(1e9 / static_cast<double>(bytes_per_s)),
      quantum_bytes_(std::max(
          kLeastQuantumBytes,
          static_cast<std::size_t>(static_cast<double>(std::chrono::nanoseconds(kQuantum).count()) / ns_per_byte_))) {}

std::size_t RateLimiter::allowance(Clock::time_point now) {
  if (now < free_at_) {
    refused_ = true;
    return 0;
  }
  auto late =
      std::min<Clock::duration>(now - free_at_, refused_ ? Clock::duration(kLateness) : Clock::duration(kBurst));
  free_at_ = now - late;
  return quantum_bytes_ + static_cast<std::size_t>(static_cast<double>(late.count()) / ns_per_byte_);
}

void RateLimiter::spend(std::size_t bytes, Clock::time_point now) {
  free_at_ += std::chrono::nanoseconds(static_cast<int64_t>(static_cast<double>(bytes) * ns_per_byte_));
  if (free_at_ > now) refused_ = false;
}

IoResult LimitedChannel::send(std::span<const iovec> pieces) {
  auto now = Clock::now();
  std::size_t allowed = limiter_.allowance(now);
  if (allowed == 0) return {IoStatus::kHeldBack};
  IoResult result = inner_->send(first_bytes(pieces, allowed));
  if (result.status == IoStatus::kOk) limiter_.spend(result.bytes, now);
  return result;
}

}  // namespace ringdp
