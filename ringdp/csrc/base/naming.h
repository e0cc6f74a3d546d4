// An operation's name, and whether it is bulk: `with ringdp.named("x"):` in Python, the bucket's parameters in the
// reducer. Thread-local: set by the thread that issues the operation, read once when it is issued.
#pragma once

#include <string>

namespace ringdp {

// Empty when nothing is set.
const std::string& current_name();
// Bulk operations give way to all others on their links.
bool current_is_bulk();

// While it exists, the operations that this thread issues have its name. Its destructor restores the name before it.
class NamedScope {
 public:
  explicit NamedScope(std::string name, bool bulk = false);
  ~NamedScope();
  NamedScope(const NamedScope&) = delete;
  NamedScope& operator=(const NamedScope&) = delete;

 private:
  std::string previous_;
  bool previous_bulk_;
};

}  // namespace ringdp
