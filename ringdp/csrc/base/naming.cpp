#include "base/naming.h"

#include <utility>

namespace ringdp {
namespace {

std::string& name_of_thread() {
  thread_local std::string name;
  return name;
}

bool& bulk_of_thread() {
  thread_local bool bulk = false;
  return bulk;
}

}  // namespace

const std::string& current_name() { return name_of_thread(); }

bool current_is_bulk() { return bulk_of_thread(); }

NamedScope::NamedScope(std::string name, bool bulk)
    : previous_(std::exchange(name_of_thread(), std::move(name))),
      previous_bulk_(std::exchange(bulk_of_thread(), bulk)) {}

NamedScope::~NamedScope() {
  name_of_thread() = std::move(previous_);
  bulk_of_thread() = previous_bulk_;
}

}  // namespace ringdp
