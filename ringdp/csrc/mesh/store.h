// Store: the key-value service the ranks meet at; torch's c10d::Store behind an adapter in torch/, or memory for
// threads. Values come from outside: readers check them. Owned by the caller of `meet`, used by the thread that builds
// the mesh.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"

namespace ringdp {

// The store itself is gone, and with it the process that kept it.
class StoreLost final : public Error {
 public:
  using Error::Error;
};

// Any call may throw StoreLost.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Sets the key where it is not there yet, and returns what then is: of several ranks one comes first.
  virtual std::string set_first(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;  // nullopt: not there now
  // The values of all keys, nullopt while one of them is not there. A store that can answers in two round trips.
  virtual std::optional<std::vector<std::string>> find_all(const std::vector<std::string>& keys);
  // HOST:PORT, for messages; empty: no process serves it over a network.
  virtual std::string place() const { return {}; }
};

// For ranks that are threads of one process. Any thread.
class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override;
  std::string set_first(const std::string& key, const std::string& value) override;
  std::optional<std::string> find(const std::string& key) override;
  // Waits until the key is there; nullopt when the deadline passes first.
  std::optional<std::string> get(const std::string& key, Deadline deadline);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace ringdp
