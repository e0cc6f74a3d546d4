// Log lines of the core, for the sink that was set (Python's logging in a module, stderr in C++ tests).
// Any thread; the sink must not call back into ringdp.
#pragma once

#include <functional>
#include <string>

namespace ringdp {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

using LogSink = std::function<void(LogLevel, const std::string&)>;

void set_log_sink(LogSink sink);  // an empty one drops everything (the start)
void log(LogLevel level, const std::string& text);

}  // namespace ringdp
