#include "mesh/record.h"

#include <algorithm>
#include <charconv>

namespace ringdp {

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
