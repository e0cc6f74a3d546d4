#include "base/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace ringdp {
namespace {

// The files of one version's hierarchy.
struct Names {
  const char* limit;
  const char* used;
  const char* cached[2];  // lines of memory.stat
};

constexpr Names kVersion1{
    "/memory.limit_in_bytes", "/memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
constexpr Names kVersion2{"/memory.max", "/memory.current", {"inactive_file", "active_file"}};

std::optional<int64_t> number_in(const std::string& path) {
  int64_t value = 0;
  std::ifstream file(path);
  if (!(file >> value)) return std::nullopt;  // "max", or no such file
  return value;
}

int64_t cached_in(const std::string& group, const Names& names) {
  std::ifstream file(group + "/memory.stat");
  int64_t sum = 0, value = 0;
  for (std::string key; file >> key >> value;)
    if (key == names.cached[0] || key == names.cached[1]) sum += value;
  return sum;
}

// The least of the limits of the group and of the groups around it. In a container the path may be the host's: then
// only the root exists.
std::optional<int64_t> left_in(const std::string& root, std::string path, const Names& names) {
  std::optional<int64_t> least;
  if (path.find("..") != std::string::npos) path.clear();
  for (;;) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    std::string group = root + path;
    auto limit = number_in(group + names.limit), used = number_in(group + names.used);
    if (limit && used) {
      int64_t left = std::max<int64_t>(0, *limit - *used + cached_in(group, names));
      least = std::min(least.value_or(left), left);
    }
    if (path.empty()) return least;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace

std::optional<int64_t> memory_left_in_groups(const std::string& membership, const std::string& root) {
  std::optional<int64_t> least;
  auto take = [&](std::optional<int64_t> left) {
    if (left) least = std::min(least.value_or(*left), *left);
  };
  std::istringstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // hierarchy:controllers:path
    auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",", path = line.substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos)
      take(left_in(root + "/memory", path, kVersion1));
    else if (controllers == ",,")
      take(left_in(root, path, kVersion2));
  }
  return least;
}

std::optional<int64_t> memory_left_in_groups() {
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream membership;
  membership << file.rdbuf();
  return memory_left_in_groups(membership.str(), "/sys/fs/cgroup");
}

}  // namespace ringdp
