// torch's key-value store as the Store of meet/store.h. Used by the thread that creates a process group, without the
// GIL.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "meet/store.h"
#include "torch/backend/store_watch.h"

namespace ringdp {

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
