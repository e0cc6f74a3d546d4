// How fast the kernel sends on a connection to a host far away: its congestion control, and that it spreads packets
// out. Any thread.
#pragma once

#include <string>
#include <string_view>

namespace ringdp {

inline constexpr std::string_view kAutomaticCongestion = "auto";  // bbr on long paths, where the system allows it
inline constexpr std::string_view kSystemCongestion = "system";   // as sockets are

// `setting`: one of these, or the name of a congestion control for all connections. Empty, or why it cannot be had,
// with what is used instead and what would help.
std::string ask_for_congestion(int fd, std::string_view setting);

bool keeps_its_rate(int fd);  // its congestion control does not slow down for single losses

}  // namespace ringdp
