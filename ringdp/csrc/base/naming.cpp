#include "base/naming.h"

#include <utility>

namespace ringdp {
namespace {

std::string& slot() {
  thread_local std::string name;
  return name;
}

}  // namespace

const std::string& current_name() { return slot(); }

NamedScope::NamedScope(std::string name) : previous_(std::exchange(slot(), std::move(name))) {}

NamedScope::~NamedScope() { slot() = std::move(previous_); }

}  // namespace ringdp
