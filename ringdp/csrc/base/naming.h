// The name an operation carries: `with ringdp.named("x"):` in Python, the bucket's parameters in the reducer.
// Thread-local: set by the thread that issues the operation, read once when it is issued.
#pragma once

#include <string>

namespace ringdp {

// Empty when nothing is set.
const std::string& current_name();

class NamedScope {
 public:
  explicit NamedScope(std::string name);
  ~NamedScope();
  NamedScope(const NamedScope&) = delete;
  NamedScope& operator=(const NamedScope&) = delete;

 private:
  std::string previous_;
};

}  // namespace ringdp
