#include "collective/owner_weights.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace ringdp {
namespace {

constexpr uint64_t kRateSteps = uint64_t{1} << 20;  // of the highest rate: integers, the same on every machine
constexpr uint64_t kWhole = uint64_t{1} << 20;

}  // namespace

// Of the m fastest hosts, R their rates together, all own something at t = (h-2+m)/R if the slowest of them does:
// t·r > 1. The others own nothing.
Weights owner_weights(std::span<const std::size_t> rates) {
  const auto hosts = static_cast<uint64_t>(rates.size());
  if (hosts < 3) return {};  // of two hosts each sends the buffer once, whatever they own
  const std::size_t highest = *std::max_element(rates.begin(), rates.end());
  std::vector<uint64_t> steps;
  for (const std::size_t rate : rates) {
    const double of_highest = static_cast<double>(rate) / static_cast<double>(highest);  // rounded alike everywhere
    steps.push_back(std::max<uint64_t>(1, static_cast<uint64_t>(of_highest * static_cast<double>(kRateSteps))));
  }
  std::vector<uint64_t> sorted = steps;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  uint64_t owners = 0, together = 0;
  while (owners < hosts && (hosts - 2 + owners + 1) * sorted[owners] > together + sorted[owners])
    together += sorted[owners++];
  const uint64_t lowest = sorted.back(), sent = hosts - 2 + owners;  // t = sent / together
  const bool own_links_limit = sent * lowest > together;             // else the lowest rate does, whatever it owns
  const uint64_t equal = 2 * hosts - 2;                              // over hosts · lowest
  if (own_links_limit ? 10 * equal * together < 11 * sent * hosts * lowest : 10 * equal < 11 * hosts) return {};
  Weights weights;
  for (const uint64_t rate : steps) {
    const uint64_t more = sent * rate > together ? sent * rate - together : 0;
    weights.push_back(static_cast<uint32_t>(more * kWhole / ((hosts - 2) * together)));
  }
  return weights;
}

std::vector<std::size_t> weighted_bounds(std::size_t units, std::span<const uint32_t> weights, uint32_t shift) {
  const uint64_t whole = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
  std::vector<std::size_t> bounds{0};
  uint64_t before = 0;
  for (const uint32_t weight : weights) {
    before += weight;
    bounds.push_back((units * before + shift % whole) / whole);
  }
  return bounds;
}

}  // namespace ringdp
