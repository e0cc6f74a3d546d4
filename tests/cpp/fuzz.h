// A fuzzer of one page, for compilers without libFuzzer: each round is made from one seed, bytes that are right are
// changed here and there, and whatever a round does, it may end in a ringdp::Error only. The sanitizers look for the
// rest.
//
//   fuzz_x [--seconds N] [--seed N] [--rounds N]
//
// Prints the first seed, and at a crash the seed of the round: --seed N --rounds 1 does it again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ringdp::fuzz {

// SplitMix64 (Steele, Lea and Flood, 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  uint64_t below(uint64_t limit) { return limit == 0 ? 0 : next() % limit; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  uint64_t odd_number();  // near typical limits: 0, 1, powers of two and their neighbours
  std::vector<std::byte> bytes(std::size_t count);

 private:
  uint64_t state_;
};

// Changes, inserts, removes or repeats bytes; sometimes nothing.
void mutate(std::vector<std::byte>& bytes, Random& random);

// What must hold. A failure ends the process with the round's seed.
void require(bool condition, const char* what);

// One round; `main` in fuzz.cpp calls it until time is up.
void round(Random& random);

// What the rounds came to see, printed at the end: a fuzzer that never gets beyond the door shows here.
void count(const char* what);

}  // namespace ringdp::fuzz
