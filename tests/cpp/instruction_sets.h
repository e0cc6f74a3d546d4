// Every instruction set this CPU has, for tests of kernels and codecs.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace ringdp::testing {

inline std::vector<Isa> isas() {
  std::vector<Isa> all = {Isa::kScalar};
  if (best_isa() >= Isa::kAvx2) all.push_back(Isa::kAvx2);
  if (best_isa() >= Isa::kAvx512) all.push_back(Isa::kAvx512);
  return all;
}

// Runs body with each instruction set selected; its name goes in front of every failure.
template <class Body>
void on_every_isa(Body&& body) {
  const Isa before = current_isa();
  for (const Isa isa : isas()) {
    select_isa(isa);
    body(std::string(isa_name(isa)));
  }
  select_isa(before);
}

}  // namespace ringdp::testing
