// torch's key-value store as the Store of meet/store.h. Used by the thread that creates a process group, without the
// GIL.
//
// StoreWatch: watches the calls of a joining rank to torch's TCPStore, which wait for an answer without a limit. It
// logs a call that takes long. It ends a call whose request or answer does not arrive by shutting its connection down;
// `take_verdict` then gives the reason. It has a thread of its own, which is active only while a call takes longer
// than a second. Owned by the StoreAdapter, used by the thread that creates a process group.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "base/deadline.h"
#include "meet/store.h"
#include "transport/tcp_health.h"

namespace ringdp {

class StoreWatch {
 public:
  struct Verdict {
    bool small_packets_pass = false;  // otherwise the store's host is silent
    std::string text;
  };

  StoreWatch(const std::string& host, uint16_t port);  // where the store is
  ~StoreWatch();
  StoreWatch(const StoreWatch&) = delete;
  StoreWatch& operator=(const StoreWatch&) = delete;

  void begin_call();
  void end_call();
  std::optional<Verdict> take_verdict();               // the reason why it ended a call
  const std::string& place() const { return place_; }  // HOST:PORT

 private:
  void run();
  void find_connections();
  std::optional<std::pair<int, Verdict>> judge(Clock::time_point call);  // a descriptor to shut down

  bool short_answers_come(Clock::time_point call);

  const std::string host_;
  const std::string place_;
  const uint16_t port_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Clock::time_point> began_;  // of the call in progress
  std::optional<Verdict> verdict_;
  bool stopping_ = false;

  // Used by the watching thread, for the present call.
  Clock::time_point looked_at_{};
  std::map<int, TcpWatch> connections_;  // by descriptor
  Clock::duration notice_after_{};
  std::shared_ptr<std::atomic<bool>> answered_;  // whether the probe was answered; shared with the probing thread
  std::unique_ptr<std::thread> thread_;
};

// Every key has the prefix, and torch's exceptions become Errors.
class StoreAdapter final : public Store {
 public:
  // Keys get `prefix` in front.
  StoreAdapter(c10::intrusive_ptr<c10d::Store> store, std::string prefix);

  void set(const std::string& key, const std::string& value) override;
  std::string set_first(const std::string& key, const std::string& value) override;
  std::optional<std::string> find(const std::string& key) override;
  std::optional<std::vector<std::string>> find_all(const std::vector<std::string>& keys) override;
  std::string place() const override;

 private:
  template <class Call>
  auto guarded(Call call);

  c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  std::unique_ptr<StoreWatch> watch_;  // of a TCPStore
};

}  // namespace ringdp
