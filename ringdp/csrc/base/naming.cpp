#include "base/naming.h"

#include <utility>

namespace ringdp {
namespace {

std::string& name_of_thread() {
  thread_local std::string name;
  return name;
}

}  // namespace

const std::string& current_name() { return name_of_thread(); }

NamedScope::NamedScope(std::string name) : previous_(std::exchange(name_of_thread(), std::move(name))) {}

NamedScope::~NamedScope() { name_of_thread() = std::move(previous_); }

}  // namespace ringdp
