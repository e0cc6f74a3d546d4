// Store: the key-value service of the rendezvous; torch's c10d::Store behind an adapter in torch/, or memory for
// threads. Values come from outside: readers check them. Owned by the caller of `meet`, used by the thread that builds
// the mesh.
//
// Record: what a rank writes into the store, lines of "key=value". Values come from outside: readers check them.
// Value types, any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"

namespace ringdp {

// The store does not answer: the process that served it has ended.
class StoreLost final : public Error {
 public:
  using Error::Error;
};

// Any call may throw StoreLost.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Sets the key if it does not exist, and returns its value: of several ranks the first one wins.
  virtual std::string set_first(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;  // nullopt: does not exist now
  // The values of all keys; nullopt while one of them does not exist. Two round trips, if the store supports it.
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
  // Waits until the key exists; nullopt if the deadline passes first.
  std::optional<std::string> get(const std::string& key, Deadline deadline);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

using Record = std::map<std::string, std::string>;

std::string write_record(const Record& record);  // line breaks in values become blanks
Record read_record(const std::string& text);

std::string field(const Record& record, const std::string& key);  // empty where it is missing
int64_t number(const std::string& text);                          // -1 if it is none

std::string join(const std::vector<std::string>& parts, const char* separator);
std::vector<std::string> split(const std::string& text, char separator);  // without empty parts

}  // namespace ringdp
