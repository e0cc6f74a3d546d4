// Diagnosis: writes what is known when something goes wrong: dumps of the recorder, and the stacks of ranks that are
// waited for. A thread of its own writes, which neither the network nor Python can hold up: files may be slow, and
// Python stuck. Another one asks for stacks, which may take a second. Owned by the Engine, which calls `start`, `stop`
// and `join`; the rest from any thread, and returns at once. Nothing here throws or fails an operation: a folder that
// cannot be written gets one log line.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "engine/job_thread.h"
#include "engine/notices.h"
#include "engine/operation_record.h"
#include "mesh/connection.h"

namespace ringdp {

inline constexpr int kMostDumps = 8;  // of one rank that are kept; then the oldest goes

class Diagnosis {
 public:
  // `folder`: where dumps go; empty: nowhere. Both others outlive the thread.
  Diagnosis(OperationRecorder& recorder, NoticeBoard& notices, std::string folder);
  ~Diagnosis();
  Diagnosis(const Diagnosis&) = delete;
  Diagnosis& operator=(const Diagnosis&) = delete;

  // Begins to hear signals, and leaves a note in the folder that this process is there, for `python -m ringdp dump`.
  void start(const PeerInfo& self, int world);
  // A group fails: that is recorded, and dumped, unless it was ended on purpose.
  void note_failure(uint64_t group, const Error& error, uint64_t cause);
  // Adds to the log of stalls beside the dumps.
  void log_stall(const std::string& text);
  // Where that log is; empty: nowhere.
  std::string stall_log() const;
  // On the thread that asks for stacks.
  void run(std::function<void()> job);
  void stop();  // what waits is still done
  void join();

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);
  void write(std::function<void()> job);

  std::shared_ptr<State> state_;  // also held by the thread
  std::unique_ptr<std::thread> thread_;
};

}  // namespace ringdp
