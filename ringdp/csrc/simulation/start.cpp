#include "simulation/start.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/sha256.h"
#include "meet/record_tree.h"
#include "meet/records.h"
#include "meet/rendezvous.h"
#include "membership/member_turn.h"
#include "shared/shared_setup.h"

namespace ringdp {
namespace {

constexpr int kMostConnectedRanks = 1024;  // each of them knows the records of all
constexpr int kLookEvents = 4096;

struct RootRead {};  // a rank would have read the records of all: it need not parse them here

// Invariant: the backlog is what the store has to do, at its clock, of all requests so far. A rank's requests follow
// one another, and wait for the store to have done that; what a rank has set is found by those whose clocks are later.
class SimulatedStore final : public Store {
 public:
  SimulatedStore(const StartCosts& costs, std::size_t ranks) : requests(ranks, 0), costs_(costs) {}

  void begin(std::size_t rank, double now_s) {
    backlog_s_ = std::max(0.0, backlog_s_ - (now_s - clock_s_));
    clock_s_ = now_s_ = now_s;
    rank_ = rank;
  }
  double now_s() const { return now_s_; }

  void set(const std::string& key, const std::string& value) override {
    ask(1, value.size());
    values_[key] = {value, now_s_};
  }
  std::string set_first(const std::string& key, const std::string& value) override {
    ask(1, value.size());
    return values_.emplace(key, Value{value, now_s_}).first->second.text;
  }
  std::optional<std::string> find(const std::string& key) override {
    ask(1, 0);
    const Value* found = there(key);
    if (found == nullptr) return std::nullopt;
    ask(1, found->text.size());
    if (key == root) throw RootRead{};
    return found->text;
  }
  std::optional<std::vector<std::string>> find_all(const std::vector<std::string>& keys) override {
    ask(keys.size(), 0);
    std::vector<std::string> values;
    std::size_t bytes = 0;
    for (const std::string& key : keys) {
      const Value* found = there(key);
      if (found == nullptr) return std::nullopt;
      bytes += values.emplace_back(found->text).size();
    }
    ask(keys.size(), bytes);
    return values;
  }

  std::string root;  // see RootRead
  std::vector<int64_t> requests;
  double bytes = 0;

 private:
  struct Value {
    std::string text;
    double from_s = 0;
  };

  const Value* there(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() || found->second.from_s > now_s_ ? nullptr : &found->second;
  }
  void ask(std::size_t keys, std::size_t value_bytes) {
    const double work_s = costs_.store_request_s + costs_.store_key_s * static_cast<double>(keys) +
                          costs_.store_byte_s * static_cast<double>(value_bytes);
    now_s_ = std::max(now_s_, clock_s_ + backlog_s_) + work_s + costs_.round_trip_s;
    backlog_s_ += work_s;
    bytes += static_cast<double>(value_bytes);
    ++requests[rank_];
  }

  const StartCosts costs_;
  std::map<std::string, Value> values_;
  std::size_t rank_ = 0;
  double clock_s_ = 0;    // when the present rank began
  double now_s_ = 0;      // when its last answer came
  double backlog_s_ = 0;  // of the store, at its clock
};

// As ranks of that host have them.
std::string identity_text(int rank, int host) {
  const uint64_t mixed = (static_cast<uint64_t>(host) + 1) * 0x9E3779B97F4A7C15ULL;
  const std::array<uint64_t, 2> boot{mixed, mixed * mixed};
  return write_record({{"boot", hex_encode(std::as_bytes(std::span(boot))) + "0000"},
                       {"hello", std::string(120, 'x')},
                       {"host", "node" + std::to_string(host)},
                       {"host_id", ""},
                       {"ips", "10." + std::to_string(host / 256) + ".0." + std::to_string(host % 256)},
                       {"network", "4026531840"},
                       {"pid", std::to_string(10'000 + (rank * 7919) % 90'000)},
                       {"site", ""},
                       {"space", "4026531836"},
                       {"started", std::to_string(10'000'000 + (rank * 104'729LL) % 90'000'000)},
                       {"transport", "auto"}});
}

std::string address_text(int rank, int host) {
  return write_record({{"addresses", "10." + std::to_string(host / 256) + ".0." + std::to_string(host % 256) + ":" +
                                         std::to_string(30'000 + (rank * 7919) % 30'000)}});
}

// RendezvousRun's reads of the store, of one rank.
class StartingRank {
 public:
  virtual ~StartingRank() = default;
  virtual void introduce() = 0;
  virtual bool look() = 0;  // true: something new has come
  virtual bool done() const = 0;
};

class GatheringRank final : public StartingRank {
 public:
  GatheringRank(SimulatedStore& store, int rank, int world, int host)
      : store_(store),
        rank_(rank),
        host_(host),
        identities_(store, "who", rank, world),
        addresses_(store, "at", rank, world) {}

  void introduce() override { identities_.set(identity_text(rank_, host_)); }
  bool look() override {
    bool found = false;
    if (!knows_job_ && rank_ > 0) {
      knows_job_ = found = store_.find("job").has_value();
      if (found) static_cast<void>(store_.find("who/0"));
    }
    const bool gathers = !has_all_;
    const bool came = gathers ? step(identities_, "whos/0") : step(addresses_, "ats/0");
    if (gathers && has_all_) addresses_.set(address_text(rank_, host_));
    return found || came;
  }
  bool done() const override { return has_places_; }

 private:
  bool step(RecordTree& tree, const char* root) {
    bool& complete = &tree == &identities_ ? has_all_ : has_places_;
    store_.root = root;
    try {
      const bool came = !tree.step(false).texts.empty();
      complete = tree.complete();
      return came || complete;
    } catch (const RootRead&) {
      return complete = true;
    }
  }

  SimulatedStore& store_;
  const int rank_;
  const int host_;
  RecordTree identities_;
  RecordTree addresses_;
  bool knows_job_ = false;
  bool has_all_ = false;
  bool has_places_ = false;
};

class ReadingRank final : public StartingRank {
 public:
  ReadingRank(SimulatedStore& store, const RendezvousOptions& options)
      : store_(store), rank_(options.rank), records_(store, options) {}

  void introduce() override { records_.publish(); }
  bool look() override {
    bool found = false;
    if (!knows_job_ && rank_ > 0) knows_job_ = found = store_.find("job").has_value();
    found |= records_.ask(listens_, {}).any;
    if (!listens_ && records_.all_present()) records_.publish_addresses({"10.0.0.1:30000"});
    listens_ = records_.all_present();
    return found;
  }
  bool done() const override { return records_.all_placed(); }

 private:
  SimulatedStore& store_;
  const int rank_;
  PeerRecords records_;
  bool knows_job_ = false;
  bool listens_ = false;
};

std::vector<int> peers_of(int rank, int world, int full_mesh_ranks) {
  std::set<int> out;
  if (world <= full_mesh_ranks) {
    for (int peer = 0; peer < world; ++peer) out.insert(peer);
    out.erase(rank);
    return {out.begin(), out.end()};
  }
  for (int peer : overlay_neighbours(rank, world)) out.insert(peer);
  const ReadyTree tree(rank, world);
  out.insert(tree.children().begin(), tree.children().end());
  if (tree.parent() >= 0) out.insert(tree.parent());
  return {out.begin(), out.end()};
}

void refuse_more_than(int most, int ranks) {
  if (ranks > most)
    throw Error(ErrorKind::kValue, "simulation: in a job in which each rank is connected with all others, " +
                                       std::to_string(most) + " ranks are the most");
}

// The longest way through the barrier at the end of the start, up and down.
double ready_s(int world, const std::vector<int>& host_of, const StartCosts& costs) {
  double longest = 0;
  for (int rank = world - 1; rank > std::max(0, world - 1 - 64); --rank) {
    double way = 0;
    for (int at = rank; at > 0; at = ReadyTree::parent_of(at)) {
      const bool away =
          host_of[static_cast<std::size_t>(at)] != host_of[static_cast<std::size_t>(ReadyTree::parent_of(at))];
      way += away ? costs.round_trip_s / 2 + 2 * costs.message_between_hosts_s : 2 * costs.message_within_host_s;
    }
    longest = std::max(longest, way);
  }
  return 2 * longest;
}

using Event = std::pair<double, std::size_t>;  // of which rank
using Events = std::priority_queue<Event, std::vector<Event>, std::greater<>>;

double mean_of(const std::vector<int64_t>& numbers) {
  double sum = 0;
  for (int64_t it : numbers) sum += static_cast<double>(it);
  return sum / static_cast<double>(numbers.size());
}

}  // namespace

SimulatedStart simulate_start(const std::vector<int>& host_of, int full_mesh_ranks, const StartCosts& costs,
                              const std::function<void()>& look) {
  const auto world = static_cast<int>(host_of.size());
  const bool gathers = world > full_mesh_ranks;
  SimulatedStart result;
  if (world < 2) return result;
  if (!gathers) refuse_more_than(kMostConnectedRanks, world);
  SimulatedStore store(costs, host_of.size());
  std::vector<std::unique_ptr<StartingRank>> ranks;
  std::vector<double> last_answer_s(host_of.size(), 0);
  Events events;
  for (int rank = 0; rank < world; ++rank) {
    const int host = host_of[static_cast<std::size_t>(rank)];
    RendezvousOptions options;
    options.rank = rank;
    options.world = world;
    options.links.full_mesh_ranks = full_mesh_ranks;
    if (gathers)
      ranks.push_back(std::make_unique<GatheringRank>(store, rank, world, host));
    else
      ranks.push_back(std::make_unique<ReadingRank>(store, options));
    store.begin(static_cast<std::size_t>(rank), 0);
    static_cast<void>(store.find("who/" + std::to_string(rank)));  // of another process with this rank
    ranks.back()->introduce();
    if (rank == 0) store.set("job", std::string(400, 'x'));
    events.emplace(store.now_s(), rank);
  }
  for (int64_t count = 0; !events.empty(); ++count) {
    const auto [now, rank] = events.top();
    events.pop();
    if (count % kLookEvents == 0) look();
    store.begin(rank, now);
    static_cast<void>(store.find("trouble"));
    if (ranks[rank]->look()) last_answer_s[rank] = now;
    if (ranks[rank]->done()) {
      result.records_s = std::max(result.records_s, store.now_s());
      continue;
    }
    const auto quiet =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(now - last_answer_s[rank]));
    events.emplace(std::max(store.now_s(), now + std::chrono::duration<double>(store_pause(quiet, world)).count()),
                   rank);
  }
  std::map<int, int> of_host;
  for (int host : host_of) ++of_host[host];
  double work_s = 0;
  for (int rank = 0; rank < world; ++rank) {
    const auto peers = static_cast<int>(peers_of(rank, world, full_mesh_ranks).size());
    const double turns =
        std::max(1.0, static_cast<double>(of_host[host_of[static_cast<std::size_t>(rank)]]) / costs.cores);
    work_s = std::max(work_s, peers * costs.connection_s * turns);
    result.connections = std::max(result.connections, peers);
  }
  result.seconds = result.records_s + work_s + 2 * costs.round_trip_s + ready_s(world, host_of, costs);
  result.requests = *std::max_element(store.requests.begin(), store.requests.end());
  result.mean_requests = mean_of(store.requests);
  result.store_bytes = store.bytes;
  int levels = 0;
  for (int rank = RecordTree::children_of(0, world).back(); rank > 0; rank /= RecordTree::kWays) ++levels;
  result.rounds = gathers ? 2 * (levels + 1) : 2;
  return result;
}

SimulatedLoss simulate_loss(const std::vector<int>& host_of, int full_mesh_ranks, const StartCosts& costs) {
  const auto world = static_cast<int>(host_of.size());
  const int lost = world / 2;
  SimulatedLoss result;
  std::vector<int> hops(host_of.size(), -1);
  std::priority_queue<std::tuple<double, int, int>, std::vector<std::tuple<double, int, int>>, std::greater<>> heard;
  for (int peer : peers_of(lost, world, full_mesh_ranks)) heard.emplace(0.0, 0, peer);
  while (!heard.empty()) {
    auto [now, way, rank] = heard.top();
    heard.pop();
    if (hops[static_cast<std::size_t>(rank)] >= 0) continue;
    hops[static_cast<std::size_t>(rank)] = way;
    result.seconds = now;
    result.hops = std::max(result.hops, way);
    int64_t messages = 0;
    for (int peer : peers_of(rank, world, full_mesh_ranks)) {
      if (peer == lost) continue;
      const bool away = host_of[static_cast<std::size_t>(rank)] != host_of[static_cast<std::size_t>(peer)];
      const double message_s = away ? costs.message_between_hosts_s : costs.message_within_host_s;
      now += message_s;
      ++messages;
      if (hops[static_cast<std::size_t>(peer)] < 0)
        heard.emplace(now + message_s + (away ? costs.round_trip_s / 2 : 0), way + 1, peer);
    }
    result.messages = std::max(result.messages, messages);
  }
  return result;
}

SimulatedChange simulate_change(int members, const StartCosts& costs, const std::function<void()>& look) {
  refuse_more_than(kMostConnectedRanks, members);
  const int lost = members / 2;
  std::vector<int> all;
  for (int member = 0; member < members; ++member) all.push_back(member);
  SimulatedStore store(costs, all.size());
  std::vector<MemberTurn> turns;
  std::vector<double> pauses(all.size(), 0);
  MemberState mine;
  mine.lost = {lost};
  mine.cause = "its connection has ended";
  Events events;
  for (int member : all) {
    turns.emplace_back(1, all, member, mine);
    if (member != lost) events.emplace(0.0, member);
  }
  SimulatedChange result;
  for (int64_t count = 0; !events.empty(); ++count) {
    const auto [now, member] = events.top();
    events.pop();
    if (count % kLookEvents == 0) look();
    MemberTurn& turn = turns[member];
    store.begin(member, now);
    const StoreRequest request = turn.request();
    if (request.kind == StoreRequest::Kind::kFind) {
      turn.answer(store.find(request.key));
    } else if (request.kind == StoreRequest::Kind::kSetFirst) {
      turn.answer(store.set_first(request.key, request.value));
    } else {
      store.set(request.key, request.value);
      turn.answer(request.value);
    }
    if (turn.decision()) {
      result.seconds = std::max(result.seconds, store.now_s());
      continue;
    }
    double next = store.now_s();
    if (turn.waits()) next += pauses[member] = agreement_pause_s(pauses[member], all.size());
    events.emplace(next, member);
  }
  std::erase(store.requests, 0);  // of the lost one
  if (store.requests.empty()) return result;
  result.requests = *std::max_element(store.requests.begin(), store.requests.end());
  result.mean_requests = mean_of(store.requests);
  return result;
}

}  // namespace ringdp
