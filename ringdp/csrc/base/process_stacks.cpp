#include "base/process_stacks.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <sstream>
#include <utility>

#include "base/native_stack.h"

namespace ringdp {
namespace {

constexpr auto kFresh = std::chrono::milliseconds(500);

std::mutex source_mutex;
StackSource source;

std::mutex collecting;  // this guards the next two
std::string collected;
std::chrono::steady_clock::time_point collected_at{};

std::mutex count_mutex;
ProgramThreadCount last_count;  // by that mutex

StackSource current_source() {
  std::lock_guard lock(source_mutex);
  return source;
}

bool starts_with_any(const std::string& text, const std::vector<std::string>& beginnings) {
  return text.starts_with("<") ||
         std::any_of(beginnings.begin(), beginnings.end(), [&](const std::string& it) { return text.starts_with(it); });
}

}  // namespace

void set_stack_source(StackSource replacement) {
  std::lock_guard none(collecting);
  collected_at = {};
  std::lock_guard lock(source_mutex);
  source = std::move(replacement);
}

std::string process_stacks(int64_t limit_ms) {
  std::lock_guard one(collecting);
  const StackSource now = current_source();
  if (!now.python) return "";
  if (std::chrono::steady_clock::now() - collected_at < kFresh) return collected;
  std::string out = now.python(limit_ms);
  if (out.size() > kStacksBytes * 3 / 4) out = out.substr(0, kStacksBytes * 3 / 4) + "\n  …\n";
  out += "C++ stack of the main thread (most recent call first):\n" + native_stack_of_main(limit_ms);
  if (out.size() > kStacksBytes) out.resize(kStacksBytes);
  collected = out;
  collected_at = std::chrono::steady_clock::now();
  return out;
}

std::string call_site_text(int32_t number) {
  const StackSource now = current_source();
  return now.call_site && number >= 0 ? now.call_site(number) : "";
}

void note_program_threads(const ProgramThreadCount& counted) {
  std::lock_guard lock(count_mutex);
  if (counted.at >= last_count.at) last_count = counted;
}

ProgramThreadCount program_threads() {
  std::lock_guard lock(count_mutex);
  return last_count;
}

std::string frame_of_script(const std::string& stacks) {
  const std::vector<std::string> foreign = current_source().foreign;
  std::istringstream lines(stacks);
  std::string line, innermost;
  while (std::getline(lines, line)) {
    const auto file = line.find("File \"");
    if (file == std::string::npos) {
      if (!innermost.empty() && (line.empty() || !line.starts_with(" "))) break;  // the first thread's end
      continue;
    }
    const auto begin = file + 6, end = line.find('"', begin), number = line.find("line ", begin);
    if (end == std::string::npos || number == std::string::npos) continue;
    const std::string path = line.substr(begin, end - begin);
    const auto slash = path.rfind('/');
    std::string text = path.substr(slash == std::string::npos ? 0 : slash + 1) + ":" + line.substr(number + 5);
    if (!starts_with_any(path, foreign)) return text;
    if (innermost.empty()) innermost = std::move(text);
  }
  return innermost;
}

}  // namespace ringdp
