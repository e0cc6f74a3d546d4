#include "meet/store.h"

#include <algorithm>
#include <charconv>

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

std::string write_record(const Record& record) {
  std::string out;
  for (const auto& [key, value] : record) {
    std::string line = value;
    std::replace(line.begin(), line.end(), '\n', ' ');
    out += key + "=" + line + "\n";
  }
  return out;
}

Record read_record(const std::string& text) {
  Record record;
  for (const std::string& line : split(text, '\n'))
    if (auto equals = line.find('='); equals != std::string::npos)
      record[line.substr(0, equals)] = line.substr(equals + 1);
  return record;
}

std::string field(const Record& record, const std::string& key) {
  auto it = record.find(key);
  return it == record.end() ? std::string() : it->second;
}

int64_t number(const std::string& text) {
  int64_t value = -1;
  auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  return problem == std::errc() && end == text.data() + text.size() ? value : -1;
}

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string out;
  for (const auto& part : parts) out += (out.empty() ? "" : separator) + part;
  return out;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = std::min(text.find(separator, at), text.size());
    if (end > at) out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

}  // namespace ringdp
