// How much memory the control groups of this process still allow (cgroups(7), both versions). Above their limit the
// kernel kills the process instead of refusing memory, so a caller that needs much memory asks here first. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ringdp {

// Bytes; memory that the kernel can reclaim from its file cache counts as free. nullopt: no limit, or it is unknown.
std::optional<int64_t> memory_left_in_groups();

// The same for the text of /proc/self/cgroup in `membership`, with the hierarchies mounted under `root`.
std::optional<int64_t> memory_left_in_groups(const std::string& membership, const std::string& root);

}  // namespace ringdp
