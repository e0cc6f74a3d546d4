#include "transport/slot_writer.h"

#include <cstring>

#include "base/deadline.h"
#include "base/stream_copy.h"

namespace ringdp {
namespace {

constexpr std::size_t kTimedBytes = 16 * 1024;  // shorter copies are not timed
constexpr double kSlowBytesPerNs = 4.0;         // 9 where the cores share a cache, 2.3 where they do not
constexpr int kSlowInARow = 8;                  // one slow copy is a thread that was interrupted
constexpr int kProbePeriod = 128;  // copies between two trials of the other way: costs below 10 % if that is slow

}  // namespace

void SlotWriter::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  const bool timed = bytes >= kTimedBytes;
  if (streams_ && !(timed && --until_probe_ <= 0)) return stream_copy(to, from, bytes);
  if (!timed) {
    std::memcpy(to, from, bytes);
    return;
  }
  auto begin = Clock::now();
  std::memcpy(to, from, bytes);
  auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
  judge(static_cast<double>(bytes) < kSlowBytesPerNs * static_cast<double>(ns));
}

void SlotWriter::judge(bool slow) {
  slow_in_a_row_ = slow ? slow_in_a_row_ + 1 : 0;
  streams_ = slow && (streams_ || slow_in_a_row_ >= kSlowInARow);
  until_probe_ = kProbePeriod;
}

}  // namespace ringdp
