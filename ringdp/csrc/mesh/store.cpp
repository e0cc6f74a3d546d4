#include "mesh/store.h"

namespace ringdp {

void MemoryStore::set(const std::string& key, const std::string& value) {
  std::lock_guard lock(mutex_);
  values_[key] = value;
  changed_.notify_all();
}

std::optional<std::string> MemoryStore::find(const std::string& key) {
  std::lock_guard lock(mutex_);
  auto it = values_.find(key);
  return it == values_.end() ? std::nullopt : std::optional(it->second);
}

std::optional<std::string> MemoryStore::get(const std::string& key, Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    auto it = values_.find(key);
    if (it != values_.end()) return it->second;
    if (deadline.expired()) return std::nullopt;
    changed_.wait_for(lock, std::chrono::milliseconds(deadline.remaining_ms(1000)));
  }
}

}  // namespace ringdp
