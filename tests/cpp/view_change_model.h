// A job of a few ranks around the real ViewConsensus: what can happen to one of them, what it then sends and writes, and what has
// to hold over all of them. The explorer takes every step that is possible, the random schedules some.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "membership/view_consensus.h"

namespace ringdp::testing {

struct Limits {
  const char* name = "";
  int members = 2;
  uint64_t units = 1;                       // that each rank goes through
  uint64_t changes = 1;                     // of the view
  uint64_t rounds = 2;                      // of ballots
  int suspicions = 2;                       // of ranks that live
  std::vector<std::pair<int, int>> losses;  // who may suspect whom; empty: anybody
  int crashes = 0;
  bool pages = false;  // all ranks are on one host: the lowest that lives answers for the dead
  bool tie_by_store = false;
  bool resends = false;           // a leader repeats itself: of no use where every message can arrive at any time
  bool store_grants_all = false;  // a store that is wrong
  ViewRules rules;
  std::size_t most_states = 50'000;
};

// What a rank sends: the done of a unit, or a message of the agreement.
struct Mail {
  int from = 0;
  int to = 0;
  uint64_t view = 0;
  uint64_t done = 0;  // the unit; 0: `bytes`
  std::vector<std::byte> bytes;

  std::string key() const {
    std::string out(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    for (const uint64_t number : {static_cast<uint64_t>(from), static_cast<uint64_t>(to), view, done})
      out += std::to_string(number) + ",";
    return out;
  }
  std::string text() const {
    const std::string what = done != 0 ? "done with unit " + std::to_string(done) : ViewMessage::decode(bytes).text();
    return std::to_string(from) + " -> " + std::to_string(to) + ": " + what + ", view " + std::to_string(view);
  }
};

// A rank, and what is true of it whatever it knows.
struct Site {
  ViewConsensus change;
  std::vector<std::pair<uint64_t, uint64_t>> done;  // view, unit
  std::vector<std::pair<uint64_t, uint64_t>> left;  // by everybody's done
  std::map<uint64_t, uint64_t> results;             // by unit: the view whose members it is over
  std::vector<ViewDecision> decisions;              // of the views, from the first that the rank was in
  bool over = false;                                // expelled, or as far as the model goes
  bool expelled = false;                            // it never answers again, so another may answer for it

  bool is_done(uint64_t view, uint64_t unit) const {
    return std::find(done.begin(), done.end(), std::pair(view, unit)) != done.end();
  }
  bool has_left(uint64_t view, uint64_t unit) const {
    return std::find(left.begin(), left.end(), std::pair(view, unit)) != left.end();
  }
  std::string key() const {
    const std::vector<std::byte> state = state_bytes(change);
    std::string out(reinterpret_cast<const char*>(state.data()), state.size());
    const auto number = [&out](uint64_t value) { out += std::to_string(value) + ","; };
    for (const auto& [view, unit] : done) number(view), number(unit);
    out += "left";
    for (const auto& [view, unit] : left) number(view), number(unit);
    out += "results";
    for (const auto& [unit, view] : results) number(unit), number(view);
    for (const ViewDecision& decision : decisions) {
      ViewMessage message;
      message.type = ViewMessage::Type::kDecide;
      message.decision = decision;
      const auto raw = message.encode();
      out.append(reinterpret_cast<const char*>(raw.data()), raw.size());
    }
    return out + (over ? "over" : "");
  }
};

struct Effects {
  std::vector<Mail> mail;
  std::vector<std::pair<int, std::vector<std::byte>>> records;  // by place
  bool beyond = false;                                          // more ballots than the limits allow
};

class Model {
 public:
  explicit Model(const Limits& limits) : limits_(limits) {
    options_.tie_by_store = limits.tie_by_store;
    // Time says only that nobody waits any longer.
    options_.listen_ms = 0;
    options_.collect_ms = 1;
    options_.resend_ms = limits.resends ? 1 : ViewConsensus::kNever;
    options_.patience_ms = 2;
    options_.rules = &limits_.rules;
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const Limits& limits() const { return limits_; }

  Site start(int place, Effects& effects) const {
    MemberView view;
    for (int other = 0; other < limits_.members; ++other) view.places.push_back(other);
    Site site{ViewConsensus(view, place, options_), {}, {}, {}, {}, false, false};
    settle(site, place, effects);
    return site;
  }

  // The unit with which the rank could become done now; 0: none.
  uint64_t open_unit(const Site& site) const {
    if (site.over || site.change.units().frozen()) return 0;
    for (const auto& open : site.change.units().report().open)
      if (!open.done) return open.unit;
    return 0;
  }
  void become_done(Site& site, int place, uint64_t unit, Effects& effects) const {
    const uint64_t view = site.change.view().number;
    if (site.change.units().done(unit)) {
      site.done.emplace_back(view, unit);
      for (const int other : site.change.view().places)
        if (other != place) effects.mail.push_back({place, other, view, unit, {}});
    }
    settle(site, place, effects);
  }
  void suspect(Site& site, int place, int lost, Effects& effects) const {
    site.change.suspect(lost);
    settle(site, place, effects);
  }
  void answer_for(Site& site, int place, int dead, const std::vector<std::byte>& page, Effects& effects) const {
    site.change.answer_for(dead, page);
    settle(site, place, effects);
  }
  void tick(Site& site, int place, Effects& effects) const {
    site.change.tick(site.change.next_tick_ms());
    settle(site, place, effects);
  }
  void tie(Site& site, int place, const std::vector<int>& granted, Effects& effects) const {
    site.change.tie_granted(granted);
    settle(site, place, effects);
  }
  void deliver(Site& site, const Mail& mail, Effects& effects) const {
    if (mail.done != 0) {
      if (mail.view != site.change.view().number) return;
      site.change.units().done_by(mail.from, mail.done);
      return settle(site, mail.to, effects);
    }
    const ViewMessage message = ViewMessage::decode(mail.bytes);
    for (const ViewDecision& decision : site.decisions)  // the sender has not heard of it
      if (decision.view == mail.view + 1 && message.asks())
        effects.mail.push_back({mail.to, mail.from, mail.view, 0, ViewMessage::decided(decision).encode()});
    if (site.over || mail.view != site.change.view().number) return;
    site.change.message(mail.from, message);
    settle(site, mail.to, effects);
  }

 private:
  // What the engine does after each event.
  void settle(Site& site, int place, Effects& effects) const {
    while (true) {
      const MemberView view = site.change.view();
      Units& units = site.change.units();
      for (const uint64_t unit : units.leave()) {
        site.left.emplace_back(view.number, unit);
        site.results[unit] = view.number;
      }
      while (!units.frozen() && units.report().open.empty() && units.report().next <= limits_.units) units.begin();
      ViewConsensus::Output output = site.change.take_output();
      for (auto& record : output.records) effects.records.push_back(std::move(record));
      for (const auto& [to, message] : output.messages) {
        effects.mail.push_back({place, to, view.number, 0, message.encode()});
        effects.beyond = effects.beyond || message.ballot.round > limits_.rounds;
      }
      const auto& decision = site.change.decision();
      if (!decision || site.over) return;
      site.decisions.push_back(*decision);
      for (const UnitOutcome& outcome : decision->units)
        if (!outcome.redo && decision->keeps(place)) site.results.try_emplace(outcome.unit, view.number);
      site.expelled = !decision->keeps(place);
      site.over = site.expelled || view.number == limits_.changes;
      if (site.over) return;
      site.change = site.change.next();
    }
  }

  Limits limits_;
  ViewConsensusOptions options_;
};

// What is wrong with these ranks; empty: nothing.
template <typename Sites>  // pointers to sites, by place
std::string violation(const Sites& sites) {
  std::map<uint64_t, const ViewDecision*> made;
  std::map<uint64_t, uint64_t> results;
  for (std::size_t place = 0; place < sites.size(); ++place) {
    for (const ViewDecision& decision : sites[place]->decisions) {
      const std::string which = "view " + std::to_string(decision.view);
      const auto [known, first] = made.try_emplace(decision.view, &decision);
      if (!first) {
        if (!(*known->second == decision)) return which + " was decided in two ways";
        continue;
      }
      const uint64_t old = decision.view - 1;
      for (const UnitOutcome& outcome : decision.units) {
        const std::string unit = "unit " + std::to_string(outcome.unit) + " " + (outcome.redo ? "redone" : "committed");
        for (std::size_t other = 0; other < sites.size(); ++other) {
          const Site& site = *sites[other];
          const bool member = decision.keeps(static_cast<int>(other));
          if (!outcome.redo && member && !site.is_done(old, outcome.unit))
            return unit + " by " + which + ", rank " + std::to_string(other) + " is not done";
          if (outcome.redo && site.has_left(old, outcome.unit))
            return unit + " by " + which + ", rank " + std::to_string(other) + " has left it";
        }
      }
    }
    for (const auto& [unit, view] : sites[place]->results)
      if (const auto [known, first] = results.try_emplace(unit, view); !first && known->second != view)
        return "unit " + std::to_string(unit) + " has two results";
  }
  return {};
}

}  // namespace ringdp::testing
