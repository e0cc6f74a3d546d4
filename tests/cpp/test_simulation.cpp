// Simulations: that they run the product's operations (with memory they give the right sums), that no byte is touched
// without, and laws of their times.

#include <algorithm>
#include <cmath>

#include "collective/factory.h"
#include "job.h"
#include "simulation/simulation.h"
#include "simulation/start.h"

using namespace ringdp;
using namespace ringdp::testing;

namespace {

constexpr double kBytesPerS = 125e6;

SimulatedNetwork network_of(int hosts, int per_host, double bytes_per_s = kBytesPerS, double latency_s = 20e-6) {
  SimulatedNetwork network;
  network.hosts.assign(static_cast<std::size_t>(hosts), {per_host, 0, bytes_per_s, bytes_per_s});
  network.cores = per_host;
  network.latency_s = network.latency_between_sites_s = latency_s;
  network.site_bytes_per_s = bytes_per_s;
  network.costs = {.message_between_hosts = 5e-6,
                   .message_within_host = 1e-6,
                   .copy_between_hosts = 0.2e-9,
                   .copy_within_host = 0.1e-9,
                   .add = 0.02e-9,
                   .encode = 0.2e-9,
                   .decode = 0.1e-9};
  return network;
}

SimulatedCall call_of(Algorithm algorithm, std::size_t bytes) {
  SimulatedCall call;
  call.algorithm = algorithm;
  call.bytes = bytes;
  return call;
}

SimulatedResult run(const SimulatedNetwork& network, const SimulatedCall& call) {
  return Simulation(network, call).run([] {});
}

double seconds(const SimulatedNetwork& network, const SimulatedCall& call) { return run(network, call).seconds; }

const std::vector<Algorithm> kExact{Algorithm::kTree,     Algorithm::kFold,     Algorithm::kHalving,
                                    Algorithm::kTwoLevel, Algorithm::kPairwise, Algorithm::kRing};
const std::vector<std::pair<int, int>> kShapes{{1, 2}, {2, 1}, {1, 5}, {3, 1}, {2, 2}, {3, 4}, {8, 1}, {4, 3}};

bool has(Algorithm algorithm, std::pair<int, int> shape) {
  return algorithm != Algorithm::kTwoLevel || (shape.first > 1 && shape.second > 1);
}

}  // namespace

CASE("with memory, the simulated ranks compute what real ones do") {
  for (const auto& shape : kShapes) {
    const SimulatedNetwork network = network_of(shape.first, shape.second);
    const int n = network.ranks();
    for (std::size_t count : {1UL, 1000UL, 70'001UL, 150'000UL}) {
      std::vector<float> wanted(count, 0);
      for (int rank = 0; rank < n; ++rank) {
        const std::vector<float> input = input_of(count, rank);
        for (std::size_t i = 0; i < count; ++i) wanted[i] += input[i];
      }
      for (Algorithm algorithm : kExact) {
        if (!has(algorithm, shape)) continue;
        std::vector<std::vector<float>> data;
        for (int rank = 0; rank < n; ++rank) data.push_back(input_of(count, rank));
        SimulatedCall call = call_of(algorithm, count * sizeof(float));
        for (auto& it : data) call.memory.push_back(bytes_of(it));
        run(network, call);
        for (const auto& it : data) CHECK(same_bits(it, wanted));  // these sums are exact in any order
      }
    }
  }
}

CASE("with memory, simulated ranks have the same mean of codes, near the exact one") {
  for (const auto& shape : kShapes) {
    const SimulatedNetwork network = network_of(shape.first, shape.second);
    const int n = network.ranks();
    const std::size_t count = 100'003;
    std::vector<std::vector<float>> data;
    std::vector<float> mean(count, 0);
    for (int rank = 0; rank < n; ++rank) {
      data.push_back(input_of(count, rank));
      for (std::size_t i = 0; i < count; ++i) mean[i] += data.back()[i] / static_cast<float>(n);
    }
    SimulatedCall call = call_of(Algorithm::kCompressed, count * sizeof(float));
    for (auto& it : data) call.memory.push_back(bytes_of(it));
    run(network, call);
    float worst = 0;
    for (std::size_t i = 0; i < count; ++i) worst = std::max(worst, std::abs(data[0][i] - mean[i]));
    CHECK(worst < 1.5F);  // of values up to 62.5: two steps of 1/127
    for (const auto& it : data) CHECK(same_bits(it, data[0]));
  }
}

CASE("the same simulation gives the same result to the last digit, and its critical path adds up to its time") {
  for (const auto& shape : kShapes) {
    const SimulatedNetwork network = network_of(shape.first, shape.second);
    for (Algorithm algorithm : kExact) {
      if (!has(algorithm, shape)) continue;
      const SimulatedCall call = call_of(algorithm, 3'000'000);
      const SimulatedResult one = run(network, call), other = run(network, call);
      CHECK_EQ(one.seconds, other.seconds);
      CHECK_EQ(one.events, other.events);
      CHECK(one.finish_s == other.finish_s);
      const double last = *std::max_element(one.finish_s.begin(), one.finish_s.end());
      CHECK(std::abs(one.path.total() - last) < 1e-9 * last);
    }
  }
}

CASE("no simulation is faster than its links, and a faster link is never slower") {
  for (const auto& shape : kShapes) {
    if (shape.first == 1) continue;
    for (Algorithm algorithm : kExact) {
      if (!has(algorithm, shape)) continue;
      for (std::size_t bytes : {4096UL, 1UL << 20, 8UL << 20}) {
        double before = 1e9;
        for (double rate : {kBytesPerS, 2 * kBytesPerS, 10 * kBytesPerS}) {
          const SimulatedResult found = run(network_of(shape.first, shape.second, rate), call_of(algorithm, bytes));
          for (const SimulatedTraffic& it : found.up) CHECK(found.seconds >= static_cast<double>(it.bytes) / rate);
          // 1 %: that a queue is served in another order may cost a little
          CHECK(found.seconds <= 1.01 * before);
          before = found.seconds;
        }
      }
    }
  }
}

CASE("the bytes on each host's link are those of the algorithm") {
  const std::size_t bytes = 16 << 20;
  const auto h = 4.0, k = 4.0, n = h * k, size = static_cast<double>(bytes);
  const std::vector<std::pair<Algorithm, double>> expected{
      {Algorithm::kRing, 2 * (n - 1) / n * size},      // one neighbour of a host is on another
      {Algorithm::kTwoLevel, 2 * (h - 1) / h * size},  // however many ranks it has
      {Algorithm::kHalving, 2 * (h - 1) / h * size},
      {Algorithm::kPairwise, k * 2 * (n - k) / n * size},  // each rank for itself
      {Algorithm::kFold, k * (n - k) * size},
  };
  for (const auto& [algorithm, wanted] : expected) {
    const SimulatedResult found = run(network_of(4, 4), call_of(algorithm, bytes));
    for (const auto& lines : {found.up, found.down})
      for (const SimulatedTraffic& it : lines) {
        CHECK(static_cast<double>(it.bytes) >= wanted);
        CHECK(static_cast<double>(it.bytes) < 1.01 * wanted + 10'000);  // headers
      }
  }
}

CASE("a slow link is what a ring is as fast as, and its sites' lines are shared") {
  SimulatedNetwork network = network_of(4, 1);
  const SimulatedCall call = call_of(Algorithm::kRing, 8 << 20);
  const double even = seconds(network, call);
  network.hosts[2].up_bytes_per_s /= 4;
  const SimulatedResult slow = run(network, call);
  CHECK(slow.seconds > 3.5 * even && slow.seconds < 4.5 * even);
  CHECK(slow.up[2].busy_s > 0.9 * slow.seconds);
  CHECK(slow.up[1].busy_s < 0.4 * slow.seconds);
  SimulatedNetwork sites = network_of(4, 1);
  sites.hosts[2].site = sites.hosts[3].site = 1;
  sites.site_bytes_per_s = kBytesPerS / 10;
  const SimulatedResult apart = run(sites, call);
  CHECK(apart.seconds > 8 * even);
  CHECK(apart.site_up[0].bytes >= (8 << 20));
}

CASE("one host stands for all that are alike") {
  // The sums of a fold, a pairwise exchange and codes are in rank order, which begins at another place on each host. By
  // halving blocks are in two pieces where the last host's is followed by the first one's.
  for (const auto& [algorithm, within] : {std::pair(Algorithm::kRing, 1e-9),
                                          {Algorithm::kTwoLevel, 1e-9},
                                          {Algorithm::kHalving, 0.1},
                                          {Algorithm::kFold, 0.05},
                                          {Algorithm::kPairwise, 0.05},
                                          {Algorithm::kCompressed, 0.05}}) {
    for (const auto& shape : {std::pair(16, 1), {8, 4}, {5, 2}}) {
      if (!has(algorithm, shape)) continue;
      for (std::size_t bytes : {100'000UL, 24UL << 20}) {
        SimulatedCall call = call_of(algorithm, bytes);
        call.fold_from_messages = 0;
        const SimulatedNetwork network = network_of(shape.first, shape.second);
        const SimulatedResult folded = run(network, call);
        CHECK_EQ(folded.folded_hosts, shape.first);
        call.bytes = folded.bytes;
        call.fold_from_messages = 1e9;
        const SimulatedResult full = run(network, call);
        CHECK_EQ(full.folded_hosts, 1);
        if (std::abs(folded.seconds - full.seconds) > within * full.seconds) CHECK_EQ(folded.seconds, full.seconds);
        CHECK(std::abs(static_cast<double>(folded.up[0].bytes) / static_cast<double>(full.up[3].bytes) - 1) < 0.01);
      }
    }
  }
}

CASE("what cannot be simulated is refused") {
  SimulatedCall call = call_of(Algorithm::kRing, 1 << 20);
  SimulatedNetwork network = network_of(600, 1);
  network.hosts[3].up_bytes_per_s /= 2;
  call.most_messages = 1e5;
  CHECK_THROWS(ErrorKind::kValue, run(network, call));
  CHECK_THROWS(ErrorKind::kValue, run(network_of(2, 1), call_of(Algorithm::kRing, 3)));
  CHECK_THROWS(ErrorKind::kValue, run(network_of(2, 1), call_of(Algorithm::kChain, 4096)));
  network = network_of(2, 1);
  network.hosts[0].down_bytes_per_s = 0;
  CHECK_THROWS(ErrorKind::kValue, run(network, call_of(Algorithm::kRing, 4096)));
}

CASE("an interruption ends a simulation") {
  Simulation simulation(network_of(8, 1), call_of(Algorithm::kRing, 64 << 20));
  CHECK_THROWS(ErrorKind::kSystem, simulation.run([] { throw Error(ErrorKind::kSystem, "stop"); }));
}

namespace {

StartCosts start_costs(double request_s = 20e-6) {
  return {.store_request_s = request_s,
          .store_key_s = 1e-6,
          .store_byte_s = 2e-9,
          .round_trip_s = 50e-6,
          .message_between_hosts_s = 6e-6,
          .message_within_host_s = 1e-6,
          .connection_s = 1e-3,
          .cores = 8};
}

std::vector<int> hosts_of(int hosts, int per_host) {
  std::vector<int> out;
  for (int rank = 0; rank < hosts * per_host; ++rank) out.push_back(rank / per_host);
  return out;
}

}  // namespace

CASE("a start takes the time of its requests, and those are few") {
  for (int hosts : {2, 16, 17, 64, 300}) {
    const SimulatedStart found = simulate_start(hosts_of(hosts, 1), kFullMeshRanks, start_costs(), [] {});
    CHECK(found.seconds > found.records_s);
    // The store answers one after another, and each rank waits for each of its own.
    CHECK(found.records_s > 20e-6 * hosts * found.mean_requests - 0.3);
    CHECK(found.records_s >= found.rounds * 50e-6);
    CHECK(found.requests < 150);
    if (hosts > 16) CHECK(found.connections <= 2 * std::ceil(std::log2(hosts)) + 5);
    if (hosts <= 16) CHECK_EQ(found.connections, hosts - 1);
    CHECK(simulate_start(hosts_of(hosts, 1), kFullMeshRanks, start_costs(200e-6), [] {}).records_s > found.records_s);
  }
  const double apart = simulate_start(hosts_of(64, 1), kFullMeshRanks, start_costs(), [] {}).store_bytes;
  const double together = simulate_start(hosts_of(8, 8), kFullMeshRanks, start_costs(), [] {}).store_bytes;
  CHECK(together < 0.7 * apart);  // records of ranks of a host are alike
  CHECK_THROWS(ErrorKind::kValue, simulate_start(hosts_of(2000, 1), 2000, start_costs(), [] {}));
}

CASE("a loss is heard of in as many messages as the ranks' graph is wide") {
  for (int hosts : {2, 3, 16, 17, 100, 1000}) {
    const SimulatedLoss found = simulate_loss(hosts_of(hosts, 1), kFullMeshRanks, start_costs());
    CHECK(found.hops <= (hosts <= 16 ? 0 : std::log2(hosts) / 2 + 1));
    CHECK(found.seconds >= found.hops * 25e-6);
    CHECK(found.messages <= (hosts <= 16 ? hosts : 2 * std::ceil(std::log2(hosts)) + 5));
  }
}

CASE("the survivors of an elastic job agree, one of them by reading what all others say") {
  for (int members : {2, 3, 16, 200, 1000}) {
    const SimulatedChange found = simulate_change(members, start_costs(), [] {});
    CHECK(found.requests >= members);  // a state of each other survivor, its own, the decision
    CHECK(found.seconds >= 50e-6 * members);
    CHECK(found.seconds < 0.02 + 0.5e-3 * members);
  }
}

CASE("a barrier is simulated as the product makes it") {
  for (int hosts : {2, 16, 17, 200}) {
    SimulatedCall call = call_of(Algorithm::kTree, 8);
    call.barrier = true;
    const SimulatedResult found = run(network_of(hosts, 1), call);
    CHECK(found.seconds >= 20e-6 && found.path.hops >= 1);
    CHECK(*std::max_element(found.messages.begin(), found.messages.end()) <=
          (hosts <= 16 ? static_cast<std::size_t>(hosts) - 1 : 40));
  }
}
