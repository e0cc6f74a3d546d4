// torch's key-value store as the Store of mesh/store.h. Used by the thread that creates a process group, without the GIL.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "mesh/store.h"

namespace ringdp {

class StoreAdapter final : public Store {
 public:
  // Keys get `prefix` in front.
  StoreAdapter(c10::intrusive_ptr<c10d::Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> find(const std::string& key) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
};

}  // namespace ringdp
