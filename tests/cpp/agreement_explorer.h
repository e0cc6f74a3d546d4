// The explorer: all states that the members of a job can reach through losses of ranks, breadth first. The members run
// the real code (UnitProgress, MemberTurn). The explorer makes the events: a rank dies, or believes another lost,
// rightly or wrongly; the store takes a request at some time, also that of a dead rank, and its answer comes later, or
// never.
#pragma once

#include <algorithm>
#include <bit>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "membership/agreement.h"
#include "membership/member_turn.h"

namespace ringdp::testing {

struct Limits {
  int members = 3;
  int deaths = 1;
  int suspicions = 0;  // of ranks that live
  uint64_t units = 1;
  uint64_t views = 3;  // no change of the last one
  std::size_t most_states = 200'000;
  AgreementRules rules = {};
  bool freezes = true;
  bool waits_for_all_done = true;  // before a rank leaves a unit
};

// One rank, and what it did in each view. What it did stays when it dies.
struct Site {
  struct InView {
    std::vector<int> members;
    uint64_t begun = 0;    // it has sent its part of the units up to this one
    uint64_t entered = 0;  // whose barrier it has entered
    bool frozen = false;
    std::optional<Decision> decision;
  };
  enum class Asking { kNothing, kSent, kAnswered };

  UnitProgress progress;
  std::map<uint64_t, InView> views;
  std::map<uint64_t, uint64_t> results;  // of the units that it has left: the view of the members in them
  std::vector<int> lost;                 // it has no connection with these any more
  std::optional<MemberTurn> turn;
  Asking asking = Asking::kNothing;
  std::optional<std::string> answer;
  bool expelled = false;

  InView& now() { return views[progress.view()]; }
  const InView& now() const { return views.at(progress.view()); }
  bool member_of(uint64_t view) const { return views.contains(view); }
  std::string key() const;
};

inline std::string Site::key() const {
  std::string key;
  const auto add = [&](auto value) { key += std::to_string(static_cast<uint64_t>(value)) + ','; };
  add(progress.left()), add(progress.view()), add(progress.done()), add(progress.frozen()), add(expelled);
  for (const auto& [view, in] : views) {
    add(in.begun), add(in.entered), add(in.frozen);
    for (const int member : in.members) add(member);
    key += in.decision ? in.decision->encode() : "-";
  }
  for (const auto& [unit, view] : results) add(unit), add(view);
  for (const int member : lost) add(member);
  add(asking);
  key += answer.value_or("-");
  if (turn) key += turn->key();
  return key;
}

class Explorer {
 public:
  explicit Explorer(const Limits& limits) : limits_(limits) {}

  struct Result {
    std::size_t states = 0;
    bool to_the_end = false;
    std::size_t counted = 0,
                redone = 0;  // states in which a decision has counted a unit that a rank had not left, or has not
    std::string violation;
    std::vector<std::string> steps;  // that lead to it
  };
  Result run() {
    World first;
    std::vector<int> all;
    for (int place = 0; place < limits_.members; ++place) all.push_back(place);
    for (int place = 0; place < limits_.members; ++place) {
      Site site;
      site.progress = UnitProgress(limits_.freezes);
      site.now().members = all;
      site.now().begun = 1;
      first.sites.push_back(keep(std::move(site)));
    }
    first.store = keep(Contents{});
    add(first, 0, "start");
    std::size_t at = 0;
    for (; at < nodes_.size() && result_.violation.empty() && nodes_.size() < limits_.most_states; ++at) expand(at);
    result_.to_the_end = at == nodes_.size();
    result_.states = nodes_.size();
    return result_;
  }

 private:
  using Contents = std::map<std::string, std::string>;
  struct World {
    std::vector<uint32_t> sites;
    uint32_t store = 0, dead = 0, suspicions = 0;
    bool lives(int place) const { return (dead >> place & 1U) == 0; }
    std::u32string key() const {
      std::u32string key(sites.begin(), sites.end());
      for (const uint32_t number : {store, dead, suspicions}) key += static_cast<char32_t>(number);
      return key;
    }
  };
  struct Node {
    World world;
    std::size_t parent;
    std::string step;
  };

  uint32_t keep(Site site) {
    const auto [found, first] = site_numbers_.try_emplace(site.key(), static_cast<uint32_t>(sites_.size()));
    if (first) sites_.push_back(std::move(site));
    return found->second;
  }
  uint32_t keep(const Contents& contents) {
    std::string key;
    for (const auto& [name, value] : contents) key += name + "=" + value + ";";
    const auto [found, first] = store_numbers_.try_emplace(key, static_cast<uint32_t>(stores_.size()));
    if (first) stores_.push_back(contents);
    return found->second;
  }
  const Site& site(const World& world, int place) const { return sites_[world.sites[static_cast<std::size_t>(place)]]; }

  void add(const World& world, std::size_t parent, const std::string& step) {
    if (!result_.violation.empty() || !seen_.insert(world.key()).second) return;
    nodes_.push_back({world, parent, step});
    result_.violation = violation(world);
    if (result_.violation.empty()) return;
    for (std::size_t at = nodes_.size() - 1; at != 0; at = nodes_[at].parent)
      result_.steps.insert(result_.steps.begin(), nodes_[at].step);
  }

  template <typename Act>
  void step(std::size_t at, World world, int place, const std::string& what, Act act) {
    Site next = site(world, place);
    act(next);
    world.sites[static_cast<std::size_t>(place)] = keep(std::move(next));
    add(world, at, "rank " + std::to_string(place) + " " + what);
  }

  void expand(std::size_t at) {
    const World world = nodes_[at].world;
    for (int place = 0; place < limits_.members; ++place) {
      const Site& now = site(world, place);
      if (now.asking == Site::Asking::kSent) store_takes(at, world, place);
      if (!world.lives(place) || now.expelled) continue;
      if (std::popcount(world.dead) < limits_.deaths && std::popcount(world.dead) + 1 < limits_.members) {
        World next = world;
        next.dead |= 1U << place;
        add(next, at, "rank " + std::to_string(place) + " dies");
      }
      units(at, world, place);
      losses(at, world, place);
      if (now.asking == Site::Asking::kAnswered)
        step(at, world, place, "gets the store's answer", [&](Site& it) { receive(it, place); });
      else if (!now.turn && now.progress.view() < limits_.views && must_change(world, place))
        step(at, world, place, "says where it stands", [&](Site& it) { begin_turn(it, place); });
    }
  }

  void store_takes(std::size_t at, World world, int place) {
    Contents contents = stores_[world.store];
    const StoreRequest request = site(world, place).turn->request();
    if (request.kind == StoreRequest::Kind::kSet) contents[request.key] = request.value;
    if (request.kind == StoreRequest::Kind::kSetFirst) contents.try_emplace(request.key, request.value);
    world.store = keep(contents);
    step(at, world, place, "is served by the store: " + request.key, [&](Site& it) {
      const auto found = contents.find(request.key);
      it.asking = Site::Asking::kAnswered;
      it.answer = found == contents.end() ? std::nullopt : std::optional(found->second);
    });
  }

  // A rank has complete results when all members have sent their parts, and may leave when all have entered the
  // barrier.
  void units(std::size_t at, const World& world, int place) {
    const Site& now = site(world, place);
    const uint64_t unit = now.progress.left() + 1, view = now.progress.view();
    if (unit > limits_.units) return;
    const auto& members = now.now().members;
    const auto all = [&](auto holds) {
      return std::all_of(members.begin(), members.end(), [&](int member) {
        const Site& other = site(world, member);
        return other.member_of(view) && holds(other.views.at(view));
      });
    };
    if (!now.progress.done() && all([&](const auto& in) { return in.begun >= unit; }))
      step(at, world, place, "is done", [&](Site& it) {
        if (it.progress.enter(unit) == UnitProgress::Entry::kEntered) it.now().entered = unit;
      });
    if (now.progress.done() && (!limits_.waits_for_all_done || all([&](const auto& in) { return in.entered >= unit; })))
      step(at, world, place, "leaves the unit", [&](Site& it) {
        if (!it.progress.leave(unit, view)) return;
        it.results[unit] = view;
        if (!it.turn) it.now().begun = unit + 1;
      });
  }

  void losses(std::size_t at, const World& world, int place) {
    const Site& now = site(world, place);
    for (const int other : now.now().members) {
      if (other == place || std::find(now.lost.begin(), now.lost.end(), other) != now.lost.end()) continue;
      World next = world;
      if (world.lives(other) && !site(world, other).expelled &&
          ++next.suspicions > static_cast<uint32_t>(limits_.suspicions))
        continue;
      step(at, next, place, "loses rank " + std::to_string(other), [&](Site& it) {
        it.lost.push_back(other);
        std::sort(it.lost.begin(), it.lost.end());
        if (it.turn) it.turn->lose(it.lost);
      });
    }
  }

  // It has lost a member, or another rank reports that its view has failed.
  bool must_change(const World& world, int place) const {
    const Site& now = site(world, place);
    const auto& members = now.now().members;
    return std::any_of(members.begin(), members.end(), [&](int member) {
      const Site& other = site(world, member);
      return std::find(now.lost.begin(), now.lost.end(), member) != now.lost.end() ||
             (other.member_of(now.progress.view()) && other.views.at(now.progress.view()).frozen);
    });
  }

  void begin_turn(Site& it, int place) {
    MemberState mine = it.progress.freeze();
    mine.lost = it.lost;
    it.now().frozen = true;
    it.turn.emplace(it.progress.view(), it.now().members, place, mine, limits_.rules);
    it.asking = Site::Asking::kSent;
  }

  void receive(Site& it, int place) {
    it.turn->answer(it.answer);
    it.answer.reset();
    it.asking = Site::Asking::kSent;
    if (!it.turn->decision()) return;
    const Decision decision = *it.turn->decision();
    it.turn.reset();
    it.asking = Site::Asking::kNothing;
    const uint64_t before = it.progress.view();
    it.now().decision = decision;
    it.expelled = std::find(decision.members.begin(), decision.members.end(), place) == decision.members.end();
    if (it.expelled) return;
    if (decision.committed > it.progress.left()) it.results[decision.committed] = before;
    it.progress.install(before + 1, decision.committed);
    it.now().members = decision.members;
    it.now().begun = decision.committed + 1;
  }

  // What must hold in every state; empty if it does.
  std::string violation(const World& world) {
    std::map<uint64_t, const Decision*> decided;
    std::map<uint64_t, uint64_t> results;
    bool counted = false, redone = false;
    for (int place = 0; place < limits_.members; ++place) {
      const Site& it = site(world, place);
      for (const auto& [view, in] : it.views) {
        if (!in.decision) continue;
        const auto [found, first] = decided.try_emplace(view, &*in.decision);
        if (!first && found->second->encode() != in.decision->encode()) return "a view is decided in two ways";
      }
      for (const auto& [unit, view] : it.results)
        if (const auto [found, first] = results.try_emplace(unit, view); !first && found->second != view)
          return "a unit has two results";
    }
    for (const auto& [view, decision] : decided) {
      for (int place = 0; place < limits_.members; ++place) {
        const Site& it = site(world, place);
        if (!it.member_of(view)) continue;
        const auto result = it.results.find(decision->committed + 1);
        if (result != it.results.end() && result->second == view) return "a unit is redone that a rank has left";
        const bool kept =
            std::find(decision->members.begin(), decision->members.end(), place) != decision->members.end();
        const bool had =
            it.views.at(view).entered >= decision->committed || it.views.at(view).begun > decision->committed;
        if (kept && !had) return "a unit is committed that a member has not done";
        counted = counted || decision->committed > 0;
        redone = redone || it.views.at(view).begun == decision->committed + 1;
      }
    }
    result_.counted += counted ? 1 : 0;
    result_.redone += redone ? 1 : 0;
    return "";
  }

  const Limits limits_;
  Result result_;
  std::deque<Site> sites_;
  std::deque<Contents> stores_;
  std::unordered_map<std::string, uint32_t> site_numbers_;
  std::unordered_map<std::string, uint32_t> store_numbers_;
  std::unordered_set<std::u32string> seen_;
  std::deque<Node> nodes_;
};

}  // namespace ringdp::testing
