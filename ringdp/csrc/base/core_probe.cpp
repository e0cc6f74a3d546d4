#include "base/core_probe.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>

#include "base/fd.h"

namespace ringdp {

RunDelay RunDelay::of_this_thread() noexcept {
  thread_local const Fd file(::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC));
  RunDelay delay{.ns = 0, .thread = &file};
  if (!file) return delay;
  std::array<char, 96> text{};
  if (::pread(file.get(), text.data(), text.size() - 1, 0) <= 0) return delay;
  char* second = nullptr;
  std::strtoll(text.data(), &second, 10);  // the first is the time on a core
  delay.ns = std::strtoll(second, nullptr, 10);
  return delay;
}

namespace {

volatile float start = 1.0F;  // volatile: otherwise the compiler computes the loop's result
thread_local volatile float result;

// Independent sums, more than the processor can add at once.
void compute() noexcept {
  constexpr int kRounds = 400;
  std::array<float, 48> sums;
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = start + static_cast<float>(i);
  for (int round = 0; round < kRounds; ++round)
    for (float& sum : sums) sum = sum * 0.9999F + 0.001F;
  float all = 0.0F;
  for (float sum : sums) all += sum;
  result = all;
}

}  // namespace

void CoreProbe::sample() noexcept {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point began = Clock::now();
  compute();
  const float seconds = std::chrono::duration<float>(Clock::now() - began).count();
  shortest_ = shortest_ == 0.0F ? seconds : std::min(shortest_, seconds);
  sum_ += std::min(seconds, kMost * shortest_);
  ++samples_;
}

float CoreProbe::take_mean() noexcept {
  const float mean = samples_ > 0 ? sum_ / static_cast<float>(samples_) : 0.0F;
  sum_ = 0.0F;
  samples_ = 0;
  return mean;
}

}  // namespace ringdp
