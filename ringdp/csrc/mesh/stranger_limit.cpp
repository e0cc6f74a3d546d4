#include "mesh/stranger_limit.h"

#include <sys/resource.h>

#include <algorithm>

namespace ringdp {
namespace {

constexpr std::size_t kShare = 4;

}  // namespace

std::size_t most_strangers(std::size_t most, int newest, std::size_t held) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return most;
  const auto all = static_cast<std::size_t>(limit.rlim_cur);
  const std::size_t used = static_cast<std::size_t>(newest) + 1 - std::min(held, static_cast<std::size_t>(newest) + 1);
  const std::size_t left = all > used ? all - used : 0;
  return std::clamp(left / kShare, std::size_t{1}, std::max(most, std::size_t{1}));
}

}  // namespace ringdp
