// The steps that this process has made, for its goodbye and its report. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace ringdp {

inline std::atomic<int64_t> most_steps_made = 0;

// The largest number of steps of a reducer of this process, alive or destroyed.
inline int64_t most_steps() { return most_steps_made.load(std::memory_order_relaxed); }

inline void note_steps(int64_t steps) {
  if (steps > most_steps()) most_steps_made.store(steps, std::memory_order_relaxed);
}

// " after 12 steps"; empty for none.
inline std::string after_steps() {
  const int64_t steps = most_steps();
  return steps == 0 ? "" : " after " + std::to_string(steps) + (steps == 1 ? " step" : " steps");
}

}  // namespace ringdp
