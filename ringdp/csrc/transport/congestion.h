// The kernel's congestion control and pacing on a connection to a host far away. Any thread.
#pragma once

#include <string>
#include <string_view>

namespace ringdp {

inline constexpr std::string_view kAutomaticCongestion = "auto";  // bbr on long paths, where the system allows it
inline constexpr std::string_view kSystemCongestion = "system";   // unchanged

// `setting`: one of these, or the name of a congestion control for all connections. Empty, or why it cannot be set,
// which one is used instead, and a remedy.
std::string ask_for_congestion(int fd, std::string_view setting);

bool keeps_its_rate(int fd);  // its congestion control does not slow down for single losses

}  // namespace ringdp
