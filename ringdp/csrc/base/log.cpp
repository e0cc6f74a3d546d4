#include "base/log.h"

#include <mutex>
#include <utility>

namespace ringdp {
namespace {

struct Slot {
  std::mutex mutex;
  LogSink sink;
};

Slot& slot() {
  static Slot* instance = new Slot;
  return *instance;
}

}  // namespace

void set_log_sink(LogSink sink) {
  std::lock_guard lock(slot().mutex);
  slot().sink = std::move(sink);
}

void log(LogLevel level, const std::string& text) {
  LogSink sink;
  {
    std::lock_guard lock(slot().mutex);
    sink = slot().sink;
  }
  if (sink) sink(level, text);
}

}  // namespace ringdp
