// Diagnosis: writes dumps of the recorder, and the stacks of ranks for which others wait. It writes on a thread of its
// own, since files may be slow and Python may be stuck. Another thread collects stacks, which may take a second. Owned
// by the Engine, which calls `start`, `stop` and `join`; the rest from any thread, and returns at once. No call throws
// or fails an operation: a folder that cannot be written gets one log line.
//
// JobThread: runs jobs one after the other on a thread of its own, which starts with the first. Owned by a Diagnosis,
// which calls `stop` and `join`; `run` from any thread. A job is dropped if no thread can be started, or too many are
// queued: a diagnosis must not fail an operation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/log.h"
#include "engine/operation_record.h"
#include "link/connection.h"

namespace ringdp {

class JobThread {
 public:
  explicit JobThread(const char* name);

  void run(std::function<void()> job);
  void stop();  // queued jobs still run
  void join();

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);

  const char* const name_;
  std::shared_ptr<State> state_;  // also held by the thread
  std::unique_ptr<std::thread> thread_;
};

inline constexpr int kMostDumps = 8;  // kept dumps of one rank; then the oldest is deleted

class Diagnosis {
 public:
  // `folder`: for dumps; empty: none are written. Both others outlive the thread.
  Diagnosis(OperationRecorder& recorder, NoticeBoard& notices, std::string folder);
  ~Diagnosis();
  Diagnosis(const Diagnosis&) = delete;
  Diagnosis& operator=(const Diagnosis&) = delete;

  // Installs the signal handlers, and registers this process in the folder for `python -m ringdp dump`.
  void start(const PeerInfo& self, int world);
  // Records and dumps the failure of a group, unless the group was ended on purpose.
  void note_failure(uint64_t group, const Error& error, uint64_t cause);
  // Adds to the log of stalls beside the dumps.
  void log_stall(const std::string& text);
  // Runs on the thread that collects stacks.
  void run(std::function<void()> job);
  void stop();  // queued jobs still run
  void join();

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);
  void write(std::function<void()> job);

  std::shared_ptr<State> state_;  // also held by the thread
  std::unique_ptr<std::thread> thread_;
};

}  // namespace ringdp
