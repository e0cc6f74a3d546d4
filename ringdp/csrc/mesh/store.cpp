#include "mesh/store.h"

namespace ringdp {

std::optional<std::vector<std::string>> Store::find_all(const std::vector<std::string>& keys) {
  std::vector<std::string> values;
  for (const std::string& key : keys) {
    auto value = find(key);
    if (!value) return std::nullopt;
    values.push_back(std::move(*value));
  }
  return values;
}

void MemoryStore::set(const std::string& key, const std::string& value) {
  std::lock_guard lock(mutex_);
  values_[key] = value;
  changed_.notify_all();
}

std::string MemoryStore::set_first(const std::string& key, const std::string& value) {
  std::lock_guard lock(mutex_);
  auto [it, added] = values_.emplace(key, value);
  if (added) changed_.notify_all();
  return it->second;
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
