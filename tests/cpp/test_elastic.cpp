// Elastic groups with ranks as threads: a rank is lost at one place after another, and the others go on as a plain
// group of exactly those that are left would.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "dead_channel.h"
#include "engine/elastic_group.h"
#include "job.h"

namespace ringdp::testing {
namespace {

constexpr int64_t kTimeoutMs = 30'000;
constexpr std::size_t kElements = 3000;

// Its rank dies in a change: when it has said where it stands, or when it knows what was decided.
class DyingAgreement final : public Agreement {
 public:
  using At = std::function<void(const std::string& where)>;
  DyingAgreement(MemoryStore& store, At at) : store_(store), at_(std::move(at)) {}

  Decision agree(uint64_t view, const std::vector<int>& members, int self, const MemberState& mine,
                 const Unreachable& unreachable, const Look& look) override {
    at_("before it stands");
    StoreAgreement inner(std::make_unique<SharedStore>(store_, [&] { at_("stands"); }));
    const Decision decision = inner.agree(view, members, self, mine, unreachable, look);
    at_("decided");
    return decision;
  }
  Decision propose(uint64_t view, int self, const Decision& decision) override {
    return StoreAgreement(std::make_unique<SharedStore>(store_, [&] { at_("proposes"); }))
        .propose(view, self, decision);
  }

 private:
  MemoryStore& store_;
  const At at_;
};

std::vector<float> gradient(int place, int step) {
  std::vector<float> values(kElements);
  for (std::size_t i = 0; i < kElements; ++i)
    values[i] = 1.0F / static_cast<float>(1 + place * 7 + step * 13 + static_cast<int>(i) % 101);
  return values;
}

struct Dead {};  // thrown by a rank that is killed

struct Member {
  int place;
  std::list<std::vector<float>>* memory;  // of its buckets: a rank that dies leaves operations under way
  std::shared_ptr<ElasticGroup> elastic;
  std::function<void()> die;
  // Where the rank dies: at the named place of a step.
  std::function<void(const std::string& where, int step)> at;

  // One step: two buckets, made again until it counts.
  std::vector<float> step(int number) {
    const std::vector<float> kept = gradient(place, number);
    std::vector<float>& first = memory->emplace_back();
    std::vector<float>& second = memory->emplace_back();
    for (;;) {
      const UnitScope scope;
      const uint64_t unit = elastic->begin_unit({.what = "a step"});
      const uint64_t view = elastic->view();
      try {
        first = second = kept;
        const auto group = elastic->group();
        at("before", number);
        const auto one = group->all_reduce(bytes_of(first), DType::kFloat32, ReduceOp::kAvg, {});
        at("between", number);
        const auto two = group->all_reduce(bytes_of(second), DType::kFloat32, ReduceOp::kAvg, {});
        group->wait(*one);
        group->wait(*two);
        at("reduced", number);
        elastic->commit(unit);
        at("left", number);
        return first;
      } catch (const Error& error) {
        if (!is_loss(error)) throw;
        if (elastic->change(unit, view) == ElasticGroup::Outcome::kCounts) return first;
      }
    }
  }
};

// What a plain group of these places makes of that step.
std::vector<float> plain(const std::vector<int>& places, int step, const AlgorithmTable& table) {
  std::vector<float> result;
  std::mutex mutex;
  run_job(static_cast<int>(places.size()), table, [&](Rank& self) {
    std::vector<float> mine = gradient(places[static_cast<std::size_t>(self.rank)], step);
    self.wait(self.group->all_reduce(bytes_of(mine), DType::kFloat32, ReduceOp::kAvg, {}));
    const std::lock_guard lock(mutex);
    result = mine;
  });
  return result;
}

struct Death {
  int place;
  std::string where;
  int step;  // kAnyStep: whichever is under way when it comes there
};
constexpr int kAnyStep = -1;

// All steps of all ranks that live to the end, and the last view.
struct Lived {
  std::map<int, std::vector<std::vector<float>>> means;  // by place
  std::map<int, std::vector<int>> sizes;                 // of the group after each step
};

Lived live(int world, int steps, const std::vector<Death>& deaths, const AlgorithmTable& table) {
  MemoryStore store;
  std::vector<std::atomic<bool>> cut(static_cast<std::size_t>(world));
  Lived lived;
  std::mutex mutex;
  const AlgorithmTables tables(table);
  run_ranks(world, [&](int place) {
    EngineOptions options;
    options.wrap_channel = [&, place](std::unique_ptr<Channel> channel, int peer) -> std::unique_ptr<Channel> {
      return std::make_unique<DeadChannel>(std::move(channel), cut[place], cut[peer]);
    };
    options.heal_ms = 0;  // a connection that is cut belongs to a rank that has died
    RendezvousOptions rendezvous = rendezvous_options(place, world);
    rendezvous.links.transport = transport_named("tcp");
    rendezvous.links.heals = false;
    std::list<std::vector<float>> memory;
    auto runtime = std::make_shared<Runtime>(store, rendezvous, options);
    Member member;
    member.place = place;
    member.memory = &memory;
    int now = 0;  // the step
    auto agreement = std::make_unique<DyingAgreement>(store, [&](const std::string& where) { member.at(where, now); });
    member.elastic = ElasticGroup::make(runtime, "all", everybody(world), kTimeoutMs, tables, std::move(agreement));
    member.at = [&](const std::string& where, int step) {
      for (const Death& death : deaths)
        if (death.place == place && death.where == where && (death.step == step || death.step == kAnyStep)) {
          cut[place] = true;
          throw Dead();
        }
    };
    std::vector<std::vector<float>> means;
    std::vector<int> sizes;
    try {
      for (int step = 0; step < steps; ++step) {
        now = step;
        means.push_back(member.step(step));
        sizes.push_back(member.elastic->size());
      }
    } catch (const Dead&) {
      return;
    }
    const std::lock_guard lock(mutex);
    lived.means[place] = means;
    lived.sizes[place] = sizes;
  });
  return lived;
}

std::vector<int> without(std::vector<int> places, const std::vector<int>& gone) {
  std::erase_if(places, [&](int place) { return std::find(gone.begin(), gone.end(), place) != gone.end(); });
  return places;
}

}  // namespace

CASE("a rank that is lost anywhere in a step costs no step, and leaves the bits of a group without it") {
  const AlgorithmTable table;
  for (const std::string where : {"before", "between"}) {
    for (const int victim : {0, 2}) {
      const Lived lived = live(3, 3, {{victim, where, 1}}, table);
      CHECK_EQ(lived.means.size(), 2U);
      const std::vector<int> left = without(everybody(3), {victim});
      const auto all = plain(everybody(3), 0, table), again = plain(left, 1, table), after = plain(left, 2, table);
      for (const auto& [place, means] : lived.means) {
        CHECK(means[0] == all);
        CHECK(means[1] == again);
        CHECK(means[2] == after);
        CHECK_EQ(lived.sizes.at(place)[2], 2);
      }
    }
  }
}

CASE("a rank that is lost between its means and the end of the step is in it or not, for all survivors alike") {
  const AlgorithmTable table;
  const auto with = plain(everybody(3), 1, table), without_it = plain({0, 2}, 1, table),
             after = plain({0, 2}, 2, table);
  for (int repeat = 0; repeat < 5; ++repeat) {
    const Lived lived = live(3, 3, {{1, "reduced", 1}}, table);
    CHECK_EQ(lived.means.size(), 2U);
    CHECK(lived.means.at(0) == lived.means.at(2));
    CHECK(lived.means.at(0)[1] == with || lived.means.at(0)[1] == without_it);
    CHECK(lived.means.at(0)[2] == after);
  }
}

CASE("a rank that is lost after it has left a step has its part in it") {
  const AlgorithmTable table;
  const Lived lived = live(3, 3, {{1, "left", 1}}, table);
  CHECK_EQ(lived.means.size(), 2U);
  const auto with = plain(everybody(3), 1, table), after = plain({0, 2}, 2, table);
  for (const auto& [place, means] : lived.means) {
    CHECK(means[1] == with);
    CHECK(means[2] == after);
  }
}

CASE("two are lost at once, and one after the other down to one") {
  const AlgorithmTable table;
  const Lived at_once = live(4, 3, {{0, "between", 1}, {3, "between", 1}}, table);
  CHECK_EQ(at_once.means.size(), 2U);
  for (const auto& [place, means] : at_once.means) {
    CHECK(means[1] == plain({1, 2}, 1, table));
    CHECK(means[2] == plain({1, 2}, 2, table));
  }
  const Lived in_turn = live(4, 5, {{0, "before", 1}, {1, "between", 2}, {3, "between", 3}}, table);
  CHECK_EQ(in_turn.means.size(), 1U);
  const auto& means = in_turn.means.at(2);
  CHECK(means[1] == plain({1, 2, 3}, 1, table));
  CHECK(means[2] == plain({2, 3}, 2, table));
  CHECK(means[3] == gradient(2, 3));
  CHECK(means[4] == gradient(2, 4));
}

CASE("a rank that is lost in a change is left out by the next one, also the one that decides") {
  const AlgorithmTable table;
  for (const std::string where : {"before it stands", "stands", "decided"}) {
    for (const int second : {1, 3}) {  // 1 collects what the others say
      // Some may notice the first loss while they leave the step before.
      const Lived lived = live(4, 3, {{0, "between", 1}, {second, where, kAnyStep}}, table);
      const std::vector<int> left = without(everybody(4), {0, second});
      CHECK_EQ(lived.means.size(), 2U);
      for (const auto& [place, means] : lived.means) {
        CHECK(means[1] == plain(left, 1, table));
        CHECK(means[2] == plain(left, 2, table));
      }
    }
  }
}

CASE("an operation outside units that is unfinished makes all survivors fail, and the group goes on") {
  MemoryStore store;
  std::vector<std::atomic<bool>> cut(3);
  std::atomic<int> told{0};
  run_ranks(3, [&](int place) {
    EngineOptions options;
    options.wrap_channel = [&, place](std::unique_ptr<Channel> channel, int peer) -> std::unique_ptr<Channel> {
      return std::make_unique<DeadChannel>(std::move(channel), cut[place], cut[peer]);
    };
    RendezvousOptions rendezvous = rendezvous_options(place, 3);
    rendezvous.links.transport = transport_named("tcp");
    auto runtime = std::make_shared<Runtime>(store, rendezvous, options);
    const auto elastic = ElasticGroup::make(runtime, "all", everybody(3), kTimeoutMs, {},
                                            std::make_unique<StoreAgreement>(std::make_unique<SharedStore>(store)));
    if (place == 1) {
      cut[place] = true;
      return;
    }
    std::vector<float> values(10, 1.0F);
    if (place == 2)
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it has called nothing when that happens
    const auto call = [&] {
      const auto group = elastic->group_for_call();
      const auto work = group->all_reduce(bytes_of(values), DType::kFloat32, ReduceOp::kSum, {});
      elastic->called({work}, true);
      try {
        group->wait(*work);
      } catch (const Error& error) {
        elastic->call_failed(group->id(), error);
        throw;
      }
    };
    const std::string text = CHECK_THROWS(ErrorKind::kMembership, call());
    CHECK(text.find("rank 1") != std::string::npos);
    ++told;
    values.assign(10, 1.0F);
    call();
    CHECK(values == std::vector<float>(10, 2.0F));
    CHECK_EQ(elastic->size(), 2);
  });
  CHECK_EQ(told.load(), 2);
}

CASE("an all-reduce that leaves its input has the bits of one in place") {
  for (const int world : {1, 2, 3, 4}) {
    for (const bool rank_order : {false, true}) {
      run_job(world, AlgorithmTable{}, [&](Rank& self) {
        if (rank_order) self.group->add_in_rank_order();
        for (const std::size_t elements : {1U, 7U, 1000U, 300'001U}) {
          std::vector<float> input(elements), result(elements, -1.0F);
          for (std::size_t i = 0; i < elements; ++i)
            input[i] = 1.0F / static_cast<float>(1 + self.rank + static_cast<int>(i % 977));
          const std::vector<float> before = input;
          std::vector<float> in_place = input;
          CallOptions options;
          options.input = std::as_bytes(std::span(input));
          self.wait(self.group->all_reduce(bytes_of(result), DType::kFloat32, ReduceOp::kAvg, std::move(options)));
          self.wait(self.group->all_reduce(bytes_of(in_place), DType::kFloat32, ReduceOp::kAvg, {}));
          CHECK(result == in_place);
          CHECK(input == before);
        }
        std::vector<float> two(2), three(3);
        CallOptions options;
        options.input = std::as_bytes(std::span(two));
        CHECK_THROWS(ErrorKind::kValue,
                     self.group->all_reduce(bytes_of(three), DType::kFloat32, ReduceOp::kSum, std::move(options)));
      });
    }
  }
}

CASE("what is decided of the survivors' states") {
  const auto state = [](uint64_t left, bool done, uint64_t called = 0, bool unfinished = false) {
    return MemberState{left, done, called, unfinished, {}, ""};
  };
  CHECK_EQ(decide({0, 1}, {state(4, true), state(4, true)}).committed, 5U);   // all have done it
  CHECK_EQ(decide({0, 1}, {state(4, true), state(4, false)}).committed, 4U);  // no member has left it
  CHECK_EQ(decide({0, 1}, {state(5, false), state(4, true)}).committed, 5U);  // one has left it
  CHECK(!decide({0, 1}, {state(5, false, 3), state(4, true, 3)}).replay);
  CHECK(decide({0, 1}, {state(5, false, 3), state(4, true, 2)}).replay);
  CHECK(decide({0, 1}, {state(5, false, 3, true), state(4, true, 3)}).replay);
  CHECK_THROWS(ErrorKind::kHandshake, Decision::decode("7 1 0 9999999999 1"));
  CHECK_THROWS(ErrorKind::kHandshake, MemberState::decode("nonsense"));
}

CASE("a decision names what counts and what is made again, the same for all, and what the lost ranks' batches weigh") {
  const auto state = [](uint64_t left, bool done, std::string unit, std::vector<double> weights = {}) {
    return MemberState{left, done, 0, false, {}, "", std::move(unit), true, std::move(weights)};
  };
  const Decision all_done = decide({0, 2}, {state(4, true, "step 5", {1, 2, 3}), state(4, true, "step 5", {1, 2, 3})});
  CHECK(all_done.counted == "step 5" && all_done.again.empty() && all_done.weights.empty());
  const Decision apart = decide({0, 2}, {state(5, false, "step 6"), state(4, true, "step 5", {1, 2, 3})});
  CHECK(apart.counted == "step 5" && apart.again == "step 6" && apart.weights.empty());
  // Not all have read the others' weights before the loss.
  const Decision again = decide({0, 2}, {state(5, false, "step 6"), state(5, false, "step 6", {1.5, 0.1, 3})});
  CHECK(again.counted.empty() && again.again == "step 6" && again.batches);
  const Decision nothing = decide({0, 2}, {state(5, false, ""), state(5, false, "")});
  CHECK(nothing.counted.empty() && nothing.again.empty());

  const MemberState told = MemberState::decode(state(5, false, "step 6", {1.5, 0.1, 3}).encode());
  CHECK(told.left == 5 && told.unit == "step 6" && told.batches && told.weights == std::vector<double>({1.5, 0.1, 3}));
  Decision written = again;
  written.members = {2, 5};
  written.committed = 7;
  written.replay = true;
  written.cause = "it was killed";
  const Decision read = Decision::decode(written.encode());
  CHECK(read.members == written.members && read.committed == 7 && read.replay && read.cause == "it was killed");
  CHECK(read.again == "step 6" && read.counted.empty() && read.batches && read.weights == again.weights);

  ViewChange change;
  change.view = 2;
  change.before = 3;
  change.decision = read;
  change.decision.replay = false;
  change.noticed_at = Clock::now();
  change.lost = {1};
  change.lost_names = {"rank 1 (host n1, pid 7)"};
  const auto says = [&](const std::string& words) {
    const std::string line = change.log_line(/*made=*/true);
    if (line.find(words) == std::string::npos) std::printf("%s\n", line.c_str());
    return line.find(words) != std::string::npos;
  };
  CHECK(
      says("rank 1 (host n1, pid 7) was lost (it was killed); 2 of 3 ranks go on, numbered from 0, as view 2; "
           "step 6 was made again without the part of rank 1: its batch is not in it; "));
  change.lost_weight = 1048577;
  CHECK(says("without the part of rank 1: its batch, of weight 1048577, is not in it; "));
  CHECK(change.log_line(/*made=*/false).find("; step 6 is made again without") != std::string::npos);
  change.decision.counted = "step 5";
  CHECK(says("as view 2; step 5 counts, with the part of rank 1; step 6 was made again without"));
  change.decision.again.clear();
  CHECK(says("as view 2; step 5 counts, with the part of rank 1; 0."));
  change.decision.counted.clear();
  CHECK(says("as view 2; nothing was under way; 0."));
  change.decision = again;
  change.lost = {0, 1, 4};
  CHECK(says("without the parts of ranks 0, 1 and 4: their batches, of weight 1048577 together, are not in it; "));
}

}  // namespace ringdp::testing
