// The explorer: all states that the members of a job can reach through losses of ranks, breadth first. The members run
// the real code (UnitProgress, MemberTurn). The explorer makes the events: a rank dies, or believes another lost,
// rightly or wrongly; the store takes a request at some time, also that of a dead rank, and its answer comes later, or
// never. A unit can be a question (Ask): who has left it proposes what it asks for, as the members of an elastic Job
// do.
#pragma once

#include <algorithm>
#include <bit>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "membership/agreement.h"
#include "membership/member_turn.h"

namespace ringdp::testing {

// What the members ask in a unit. The answer is the same on all of them, and is yes where it can be.
enum class Ask { kNothing, kJoin, kLowestLeaves, kHighestLeaves };

struct Limits {
  int members = 3;
  int newcomers = 0;  // each question for newcomers names one more, and those before it that were not let in
  int deaths = 1;
  int suspicions = 0;  // of ranks that live
  uint64_t units = 1;
  std::vector<Ask> asks = {};  // of the first units
  uint64_t views = 3;          // no change of the last one
  std::size_t most_states = 200'000;
  AgreementRules rules = {};
  bool freezes = true;
  bool waits_for_all_done = true;  // before a rank leaves a unit
  AgreementRules proposal_rules = {};
  Decision (*proposal)(const UnitProgress&, Decision) = [](const UnitProgress& progress, Decision decision) {
    return progress.proposal(std::move(decision));
  };
  bool proposes_after_leaving = true;
  bool proposers_publish = false;  // their states too, before their proposals
  bool all_tell_newcomers = true;  // also members that have found the decision
  bool told_after_decision = true;
  bool newcomers_keep_worlds = true;  // until they know that the members do not go on in them
};

// A world's name is its view, a colon, the members, a plus and the newcomers: "1:02+3".
inline std::vector<int> digits_of(const std::string& text) {
  std::vector<int> digits;
  for (const char one : text)
    if (one >= '0' && one <= '9') digits.push_back(one - '0');
  return digits;
}

inline std::vector<int> newcomers_in(const std::string& world) {
  return world.empty() ? std::vector<int>() : digits_of(world.substr(world.find('+')));
}

inline bool holds(const std::vector<int>& list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// One rank, and what it did in each view. What it did stays when it dies.
struct Site {
  struct InView {
    std::vector<int> members;
    uint64_t begun = 0;    // it has sent its part of the units up to this one
    uint64_t entered = 0;  // whose barrier it has entered
    bool frozen = false;
    std::optional<uint64_t> proposed;  // the units that it had left then
    std::string decision;              // encoded; empty: not yet
  };
  enum class Asking { kNothing, kSent, kAnswered };

  UnitProgress progress;
  std::map<uint64_t, InView> views;
  std::map<uint64_t, uint64_t> results;  // of the units that it has left: the view of the members in them
  std::vector<int> lost;                 // it has no connection with these any more
  std::optional<Decision> asked;         // all members propose it; this one has left the question, and has not yet
  std::vector<StoreRequest> writes;      // it makes these before all others
  std::optional<StoreRequest> proposal;
  std::optional<MemberTurn> turn;
  Asking asking = Asking::kNothing;
  std::optional<std::string> answer;
  bool expelled = false;
  bool outside = false;  // a newcomer that is no member yet
  bool gave_up = false;  // a newcomer that has left its world
  bool ended = false;    // it has left the job

  StoreRequest request() const {
    if (!writes.empty()) return writes.front();
    return turn ? turn->request() : *proposal;
  }
  bool acts() const { return !expelled && !ended; }
  InView& now() { return views[progress.view()]; }
  const InView& now() const { return views.at(progress.view()); }
  bool member_of(uint64_t view) const { return views.contains(view); }
  std::string key() const;
};

inline std::string Site::key() const {
  std::string key;
  const auto add = [&](auto value) { key += std::to_string(static_cast<uint64_t>(value)) + ','; };
  add(progress.left()), add(progress.view()), add(progress.done()), add(progress.frozen()), add(expelled);
  add(outside), add(gave_up), add(ended);
  for (const auto& [view, in] : views) {
    add(in.begun), add(in.entered), add(in.frozen);
    for (const int member : in.members) add(member);
    add(in.proposed.value_or(0));
    key += in.decision + '-';
  }
  for (const auto& [unit, view] : results) add(unit), add(view);
  for (const int member : lost) add(member);
  add(asking);
  key += answer.value_or("-");
  if (asked) key += asked->encode();
  for (const StoreRequest& one : writes) key += one.key + "=" + one.value;
  if (proposal) key += "proposes" + proposal->value;
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
                redone = 0;   // states in which a decision has counted a unit that a rank had not left, or has not
    std::size_t changed = 0;  // states in which the members have decided to let newcomers in, or one go
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
    for (int place = 0; place < limits_.newcomers; ++place) {
      Site site;
      site.outside = true;
      first.sites.push_back(keep(std::move(site)));
    }
    first.store = keep(Contents{});
    add(first, 0, "start");
    std::size_t at = 0;
    for (; at < nodes_.size() && result_.violation.empty() && nodes_.size() < limits_.most_states; ++at) expand(at);
    result_.to_the_end = at == nodes_.size();
    result_.states = nodes_.size();
    if (result_.violation.empty()) find_stuck(at);
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
    if (!first) return found->second;
    stores_.push_back(contents);
    auto& decisions = decisions_.emplace_back();
    for (const auto& [name, value] : contents)
      if (name.ends_with("/decision")) decisions.emplace(std::stoull(name), Decision::decode(value));
    return found->second;
  }
  int places() const { return limits_.members + limits_.newcomers; }
  const Site& site(const World& world, int place) const { return sites_[world.sites[static_cast<std::size_t>(place)]]; }

  // `fault`: it need not happen.
  void add(const World& world, std::size_t parent, const std::string& step, bool fault = false) {
    if (!result_.violation.empty()) return;
    const auto [found, first] = seen_.try_emplace(world.key(), static_cast<uint32_t>(nodes_.size()));
    if (!fault && found->second != parent) edges_.emplace_back(found->second, static_cast<uint32_t>(parent));
    if (!first) return;
    nodes_.push_back({world, parent, step});
    result_.violation = violation(world);
    if (!result_.violation.empty()) tell_steps(nodes_.size() - 1);
  }

  void tell_steps(std::size_t at) {
    result_.steps.clear();
    for (; at != 0; at = nodes_[at].parent) result_.steps.insert(result_.steps.begin(), nodes_[at].step);
  }

  // `act` depends only on `what`, on the site and on the store.
  template <typename Act>
  void step(std::size_t at, World world, int place, const std::string& what, Act act, bool fault = false) {
    uint32_t& number = world.sites[static_cast<std::size_t>(place)];
    const std::string text = "rank " + std::to_string(place) + " " + what;
    const auto [known, first] = acts_[uint64_t{number} << 32 | world.store].try_emplace(text, 0);
    if (first) {
      Site next = site(world, place);
      act(next);
      known->second = keep(std::move(next));
    }
    number = known->second;
    add(world, at, text, fault);
  }

  void expand(std::size_t at) {
    const World world = nodes_[at].world;
    for (int place = 0; place < places(); ++place) {
      const Site& now = site(world, place);
      if (now.asking == Site::Asking::kSent) store_takes(at, world, place);
      if (!world.lives(place) || !now.acts()) continue;
      if (std::popcount(world.dead) < limits_.deaths && another_lives(world, place)) {
        World next = world;
        next.dead |= 1U << place;
        add(next, at, "rank " + std::to_string(place) + " dies", /*fault=*/true);
      }
      if (now.outside) {
        comes(at, world, place);
        continue;
      }
      units(at, world, place);
      losses(at, world, place);
      if (now.asking == Site::Asking::kAnswered)
        step(at, world, place, "gets the store's answer", [&](Site& it) { receive(it, place); });
      else if (now.asking == Site::Asking::kNothing)
        begins(at, world, place);
    }
  }

  bool another_lives(const World& world, int place) const {
    for (int other = 0; other < places(); ++other)
      if (other != place && world.lives(other) && !site(world, other).outside && !site(world, other).ended) return true;
    return false;
  }

  // A member that has no request at the store.
  void begins(std::size_t at, const World& world, int place) {
    const Site& now = site(world, place);
    if (now.asked && !holds(now.asked->members, place))
      return step(at, world, place, "leaves the job", [&](Site& it) { it.ended = true; });
    if (now.asked) return step(at, world, place, "proposes", [&](Site& it) { propose(it, place, *now.asked); });
    if (!limits_.proposes_after_leaving && now.progress.done())
      if (const auto asked = asks_for(world, place, now.progress.left() + 1))
        step(at, world, place, "proposes", [&](Site& it) { propose(it, place, *asked); });
    if (now.progress.view() < limits_.views && must_change(world, place))
      step(at, world, place, "says where it stands", [&](Site& it) { begin_turn(it, place); });
  }

  // What the members propose after this unit, which is a question. It depends only on the unit, on the view, and on the
  // decisions that have led to it.
  std::optional<Decision> asks_for(const World& world, int place, uint64_t unit) const {
    const uint64_t view = site(world, place).progress.view();
    if (unit > limits_.asks.size() || view >= limits_.views) return std::nullopt;
    const Ask ask = limits_.asks[unit - 1];
    Decision decision;
    decision.members = site(world, place).now().members;
    if (ask == Ask::kLowestLeaves || ask == Ask::kHighestLeaves) {
      if (decision.members.size() == 1) return std::nullopt;
      decision.planned = true;
      decision.members.erase(ask == Ask::kLowestLeaves ? decision.members.begin() : decision.members.end() - 1);
      return decision;
    }
    const auto joins = std::count(limits_.asks.begin(), limits_.asks.begin() + static_cast<int64_t>(unit), Ask::kJoin);
    std::string named;
    for (int one = limits_.members; one < limits_.members + std::min<int>(limits_.newcomers, static_cast<int>(joins));
         ++one)
      if (!named_before(world, view, one)) named += std::to_string(one);
    if (ask != Ask::kJoin || named.empty()) return std::nullopt;
    decision.world = std::to_string(view) + ":";
    for (const int member : decision.members) decision.world += std::to_string(member);
    decision.world += "+" + named;
    return decision;
  }

  bool named_before(const World& world, uint64_t view, int newcomer) const {
    for (const auto& [decided, decision] : decisions_[world.store])
      if (decided < view && holds(newcomers_in(decision.world), newcomer)) return true;
    return false;
  }

  void propose(Site& it, int place, const Decision& decision) {
    const uint64_t view = it.progress.view();
    it.now().proposed = it.progress.left();
    const Decision mine = limits_.proposal(it.progress, decision);
    if (limits_.proposers_publish) {
      MemberState state = it.progress.freeze();
      state.lost = it.lost;
      it.now().frozen = true;
      it.writes.push_back(MemberTurn(view, it.now().members, place, state).request());
    }
    if (!limits_.told_after_decision && !mine.world.empty()) it.writes.push_back(entry(view + 1, mine));
    it.proposal = decision_request(view, mine, limits_.proposal_rules);
    it.asking = Site::Asking::kSent;
  }

  // A newcomer has its connections, and becomes a member when it is told that the members go on over them.
  void comes(std::size_t at, const World& world, int place) {
    const Site& now = site(world, place);
    if (now.gave_up) return;
    for (const auto& [key, value] : stores_[world.store]) {
      if (!key.starts_with("entry/") || !holds(newcomers_in(key), place)) continue;
      const uint64_t view = std::stoull(value), left = std::stoull(value.substr(value.find(' ')));
      step(at, world, place, "enters view " + std::to_string(view), [&](Site& it) {
        it.outside = false;
        it.progress.install(view, left);
        it.now().members = digits_of(key.substr(key.find(':')));
        it.now().begun = left + 1;
      });
    }
    if (!limits_.newcomers_keep_worlds)
      step(at, world, place, "gives its world up", [&](Site& it) { it.gave_up = true; }, /*fault=*/true);
  }

  StoreRequest entry(uint64_t view, const Decision& decision) const {
    return {StoreRequest::Kind::kSet, "entry/" + decision.world,
            std::to_string(view) + " " + std::to_string(decision.committed)};
  }

  void store_takes(std::size_t at, World world, int place) {
    Contents contents = stores_[world.store];
    const StoreRequest request = site(world, place).request();
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
        if (it.turn || it.proposal) return;
        it.asked = asks_for(world, place, unit);
        if (!it.asked) it.now().begun = unit + 1;
      });
  }

  void losses(std::size_t at, const World& world, int place) {
    const Site& now = site(world, place);
    for (const int other : now.now().members) {
      if (other == place || holds(now.lost, other)) continue;
      World next = world;
      const bool wrongly = world.lives(other) && site(world, other).acts();
      if (wrongly && ++next.suspicions > static_cast<uint32_t>(limits_.suspicions)) continue;
      const auto lose = [&](Site& it) {
        it.lost.push_back(other);
        std::sort(it.lost.begin(), it.lost.end());
        if (it.turn) it.turn->lose(it.lost);
      };
      step(at, next, place, "loses rank " + std::to_string(other), lose, wrongly);
    }
  }

  // It has lost a member, or another rank reports that its view has failed.
  bool must_change(const World& world, int place) const {
    const Site& now = site(world, place);
    const auto& members = now.now().members;
    return std::any_of(members.begin(), members.end(), [&](int member) {
      const Site& other = site(world, member);
      return holds(now.lost, member) ||
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
    const auto answer = std::exchange(it.answer, std::nullopt);
    it.asking = Site::Asking::kSent;
    if (!it.writes.empty()) {
      it.writes.erase(it.writes.begin());
      if (!it.writes.empty() || it.turn || it.proposal) return;
      it.asking = Site::Asking::kNothing;  // it has told the newcomers
      it.now().begun = it.progress.left() + 1;
      return;
    }
    if (it.turn) it.turn->answer(answer);
    if (it.turn && !it.turn->decision()) return;
    const bool proposed = it.proposal.has_value();
    install(it, place, proposed ? Decision::decode(answer.value_or(it.proposal->value)) : *it.turn->decision(),
            proposed);
  }

  void install(Site& it, int place, const Decision& decision, bool proposed) {
    it.turn.reset();
    it.proposal.reset();
    it.asked.reset();
    it.asking = Site::Asking::kNothing;
    const uint64_t before = it.progress.view();
    it.now().decision = decision.encode();
    it.expelled = !holds(decision.members, place);
    if (it.expelled) return;
    if (decision.committed > it.progress.left()) it.results[decision.committed] = before;
    it.progress.install(before + 1, decision.committed);
    it.now().members = decision.members;
    it.now().begun = decision.committed + 1;
    if (decision.world.empty()) return;
    it.lost.clear();  // of the connections before
    for (const int newcomer : newcomers_in(decision.world)) it.now().members.push_back(newcomer);
    if (!limits_.all_tell_newcomers && !proposed) return;
    it.now().begun = decision.committed;
    it.writes.push_back(entry(before + 1, decision));
    it.asking = Site::Asking::kSent;
  }

  // What must hold in every state; empty if it does.
  std::string violation(const World& world) {
    std::map<uint64_t, const std::string*> decided;
    std::map<uint64_t, const std::vector<int>*> members;
    std::map<uint64_t, uint64_t> results;
    bool counted = false, redone = false;
    for (int place = 0; place < places(); ++place) {
      const Site& it = site(world, place);
      for (const auto& [view, in] : it.views) {
        if (const auto [found, first] = members.try_emplace(view, &in.members); !first && *found->second != in.members)
          return "a view has two lists of members";
        if (in.decision.empty()) continue;
        const auto [found, first] = decided.try_emplace(view, &in.decision);
        if (!first && *found->second != in.decision) return "a view is decided in two ways";
      }
      for (const auto& [unit, view] : it.results)
        if (const auto [found, first] = results.try_emplace(unit, view); !first && found->second != view)
          return "a unit has two results";
    }
    if (auto broken = violation_without_loss(world); !broken.empty()) return broken;
    for (const auto& [view, text] : decided) {
      const Decision* decision = &decoded(*text);
      for (int place = 0; place < places(); ++place) {
        const Site& it = site(world, place);
        if (!it.member_of(view)) continue;
        const auto result = it.results.find(decision->committed + 1);
        if (result != it.results.end() && result->second == view) return "a unit is redone that a rank has left";
        const bool kept = holds(decision->members, place);
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

  const Decision& decoded(const std::string& text) {
    const auto found = decoded_.find(text);
    return found == decoded_.end() ? decoded_.emplace(text, Decision::decode(text)).first->second : found->second;
  }

  // Of decisions that were proposed, installed or not, and of newcomers.
  std::string violation_without_loss(const World& world) {
    const auto& decisions = decisions_[world.store];
    bool changed = false;
    for (const auto& [view, decision] : decisions) {
      if (decision.world.empty() && !decision.planned) continue;
      changed = true;
      const auto in_all = [&](auto wrong) {
        for (int place = 0; place < places(); ++place)
          if (site(world, place).member_of(view) && wrong(site(world, place))) return true;
        return false;
      };
      if (in_all([&](const Site& it) {
            const auto result = it.results.find(decision.committed + 1);
            return result != it.results.end() && result->second == view;
          }))
        return "a unit is redone that a rank has left";
      if (in_all([&](const Site& it) { return it.views.at(view).entered < decision.committed; }))
        return "the members change after a question that one has not done";
      if (in_all([&](const Site& it) {
            return it.views.at(view).proposed.value_or(decision.committed) != decision.committed;
          }))
        return "a decision has another count of units than a member that has proposed";
    }
    for (int place = limits_.members; place < places(); ++place) {
      const Site& it = site(world, place);
      if (it.outside) continue;
      const auto& [view, in] = *it.views.begin();
      const auto decision = decisions.find(view - 1);
      if (decision == decisions.end() || !holds(newcomers_in(decision->second.world), place) ||
          decision->second.committed > it.progress.left())
        return "a newcomer enters a view that was not decided";
    }
    result_.changed += changed ? 1 : 0;
    return "";
  }

  // What must come, unless further ranks die or are believed lost: all that a decision names install it, and all
  // members leave all units. The states from `expanded` on may lead to that.
  void find_stuck(std::size_t expanded) {
    std::sort(edges_.begin(), edges_.end());
    std::vector<bool> comes(nodes_.size());
    std::vector<uint32_t> next;
    for (std::size_t at = 0; at < nodes_.size(); ++at)
      if (at >= expanded || unsettled(nodes_[at].world).empty())
        comes[at] = true, next.push_back(static_cast<uint32_t>(at));
    while (!next.empty()) {
      const uint32_t to = next.back();
      next.pop_back();
      for (auto edge = std::lower_bound(edges_.begin(), edges_.end(), std::pair(to, 0U));
           edge != edges_.end() && edge->first == to; ++edge)
        if (!comes[edge->second]) comes[edge->second] = true, next.push_back(edge->second);
    }
    for (std::size_t at = 0; at < nodes_.size(); ++at) {
      if (comes[at] || result_.violation == kNeverInstalled) continue;
      const std::string waits = unsettled(nodes_[at].world);
      if (!result_.violation.empty() && waits != kNeverInstalled) continue;
      result_.violation = waits;
      tell_steps(at);
    }
  }

  static constexpr const char* kNeverInstalled = "a rank that a decision names never installs it";
  std::string unsettled(const World& world) const {
    const char* waits = "";
    bool over = true;
    for (int place = 0; place < places(); ++place) {
      const Site& it = site(world, place);
      if (!world.lives(place) || !it.acts()) continue;
      for (const auto& [view, decision] : decisions_[world.store]) {
        const bool named = holds(decision.members, place) || holds(newcomers_in(decision.world), place);
        if (named && !it.member_of(view + 1)) waits = kNeverInstalled;
      }
      if (it.outside) continue;
      over = false;
      const bool acting = it.turn || it.proposal || it.asked || !it.writes.empty();
      const bool at_end = it.progress.left() >= limits_.units || it.progress.view() >= limits_.views;
      if (*waits == '\0' && (acting || !at_end)) waits = "a member waits for ever";
    }
    return over ? "" : waits;
  }

  const Limits limits_;
  Result result_;
  std::deque<Site> sites_;
  std::deque<Contents> stores_;
  std::deque<std::map<uint64_t, Decision>> decisions_;  // in each of stores_, by view
  std::unordered_map<std::string, uint32_t> site_numbers_;
  std::unordered_map<std::string, uint32_t> store_numbers_;
  std::unordered_map<std::string, Decision> decoded_;
  std::unordered_map<uint64_t, std::map<std::string, uint32_t>> acts_;  // by site and store: to which site each leads
  std::unordered_map<std::u32string, uint32_t> seen_;
  std::deque<Node> nodes_;
  std::vector<std::pair<uint32_t, uint32_t>> edges_;  // to a state, and from which; without faults
};

}  // namespace ringdp::testing
