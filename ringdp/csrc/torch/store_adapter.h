// torch's key-value store as the Store of mesh/store.h. Used by the thread that creates a process group, without the GIL.
#pragma once

#include <functional>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "mesh/store.h"

namespace ringdp {

class StoreAdapter final : public Store {
 public:
  // Keys get `prefix` in front. `check_interrupt` is called now and then while waiting; it may throw.
  StoreAdapter(c10::intrusive_ptr<c10d::Store> store, std::string prefix, std::function<void()> check_interrupt)
      : store_(std::move(store)), prefix_(std::move(prefix)), check_interrupt_(std::move(check_interrupt)) {}

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key, Deadline deadline) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  std::function<void()> check_interrupt_;
};

}  // namespace ringdp
