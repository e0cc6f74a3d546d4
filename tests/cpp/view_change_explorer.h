// The explorer: every state that a model of a few ranks can reach, breadth first. A message that was sent can be delivered at
// any time, again too, and never has to be: that covers loss, delay, repetition and any order.
#pragma once

#include <bit>
#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "view_change_model.h"

namespace ringdp::testing {

class Explorer {
 public:
  explicit Explorer(const Limits& limits) : model_(limits), limits_(limits) {}

  struct Result {
    std::size_t states = 0;
    bool to_the_end = false;
    std::size_t decided = 0;  // states in which a rank has decided
    std::size_t redone = 0;   // and of these: by which a unit is redone
    std::string violation;
    std::vector<std::string> steps;  // that lead to it
  };
  Result run() {
    World first(limits_.members);
    for (int place = 0; place < limits_.members; ++place) {
      Effects effects;
      first.site(place) = keep(model_.start(place, effects));
      for (const Mail& mail : effects.mail) first.add_mail(keep(mail));
      for (const auto& [page, bytes] : effects.records)
        if (limits_.pages) first.page(page) = keep_page(bytes);
    }
    Result result;
    add(first, 0, "start", result);
    for (std::size_t at = 0; at < nodes_.size() && result.violation.empty(); ++at) {
      if (nodes_.size() >= limits_.most_states) break;
      result.to_the_end = at + 1 == nodes_.size();
      expand(at, result);
      result.to_the_end = at + 1 == nodes_.size();
    }
    result.states = nodes_.size();
    return result;
  }

 private:
  // A state of all ranks, as numbers: sites, mail and pages are kept once.
  class World {
   public:
    World(int members, std::u32string numbers)
        : members_(static_cast<std::size_t>(members)), numbers_(std::move(numbers)) {}
    explicit World(int members) : World(members, std::u32string(2 * static_cast<std::size_t>(members) + 3, 0)) {}

    char32_t& site(int place) { return numbers_[static_cast<std::size_t>(place)]; }
    char32_t& page(int place) { return numbers_[members_ + static_cast<std::size_t>(place)]; }  // 0: nothing written
    char32_t& dead() { return numbers_[2 * members_]; }                                         // bits
    char32_t& suspicions() { return numbers_[2 * members_ + 1]; }
    char32_t& granted() { return numbers_[2 * members_ + 2]; }  // the set of places that has the tie vote, as bits
    std::u32string_view mail() const { return std::u32string_view(numbers_).substr(2 * members_ + 3); }
    void add_mail(uint32_t number) {
      const auto at = std::lower_bound(numbers_.begin() + static_cast<std::ptrdiff_t>(2 * members_ + 3), numbers_.end(),
                                       char32_t(number));
      if (at == numbers_.end() || *at != number) numbers_.insert(at, number);
    }
    bool lives(int place) { return (dead() >> place & 1U) == 0; }
    const std::u32string& key() const { return numbers_; }

   private:
    std::size_t members_;
    std::u32string numbers_;
  };
  struct Node {
    const std::u32string* world;
    uint32_t parent;
    const std::string* step;
  };
  struct Step {
    uint32_t site;
    std::vector<uint32_t> mail;
    std::vector<std::pair<int, uint32_t>> pages;
    bool beyond;
  };

  uint32_t keep(Site site) {
    const auto [found, first] = site_numbers_.try_emplace(site.key(), static_cast<uint32_t>(sites_.size()));
    if (first) sites_.push_back(std::move(site));
    return found->second;
  }
  uint32_t keep(Mail mail) {
    const auto [found, first] = mail_numbers_.try_emplace(mail.key(), static_cast<uint32_t>(mail_.size()));
    if (first) mail_.push_back(std::move(mail));
    return found->second;
  }
  uint32_t keep_page(const std::vector<std::byte>& bytes) {
    const std::string key(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const auto [found, first] = page_numbers_.try_emplace(key, static_cast<uint32_t>(pages_.size() + 1));
    if (first) pages_.push_back(bytes);
    return found->second;
  }
  void add(World& world, std::size_t parent, const std::string& step, Result& result) {
    const auto [known, first] = seen_.insert(world.key());
    if (!first) return;
    nodes_.push_back({&*known, static_cast<uint32_t>(parent), &*texts_.insert(step).first});
    std::vector<const Site*> sites;
    bool decided = false;
    bool redone = false;
    for (int place = 0; place < limits_.members; ++place) {
      sites.push_back(&sites_[world.site(place)]);
      for (const ViewDecision& decision : sites.back()->decisions) {
        decided = true;
        for (const UnitOutcome& outcome : decision.units) redone = redone || outcome.redo;
      }
    }
    result.decided += decided ? 1 : 0;
    result.redone += redone ? 1 : 0;
    result.violation = violation(sites);
    if (result.violation.empty()) return;
    for (std::size_t at = nodes_.size() - 1; at != 0; at = nodes_[at].parent)
      result.steps.insert(result.steps.begin(), *nodes_[at].step);
  }

  // `act` changes a copy of the rank's site; done once for each site and kind of step.
  template <typename Act>
  void step(std::size_t at, World next, int place, const std::string& what, const std::string& text, Result& result,
            Act act) {
    if (!result.violation.empty()) return;
    const uint32_t number = next.site(place);
    const auto [found, first] = steps_.try_emplace(std::to_string(number) + what);
    Step& step = found->second;
    if (first) {
      Site site = sites_[number];
      Effects effects;
      act(site, effects);
      step.beyond = effects.beyond;
      step.site = keep(std::move(site));
      for (const Mail& mail : effects.mail) step.mail.push_back(keep(mail));
      for (const auto& [page, bytes] : effects.records)
        if (limits_.pages) step.pages.emplace_back(page, keep_page(bytes));
    }
    if (step.beyond || (step.site == number && step.mail.empty() && step.pages.empty())) return;
    next.site(place) = step.site;
    for (const uint32_t mail : step.mail) next.add_mail(mail);
    for (const auto& [page, bytes] : step.pages) next.page(page) = bytes;
    add(next, at, text, result);
  }

  void expand(std::size_t at, Result& result) {
    World world(limits_.members, *nodes_[at].world);
    for (int place = 0; place < limits_.members; ++place)
      if (world.lives(place)) expand_rank(at, world, place, result);
  }

  void expand_rank(std::size_t at, World& world, int place, Result& result) {
    const std::string rank = "rank " + std::to_string(place);
    const Site& now = sites_[world.site(place)];
    int living = 0;
    for (int other = 0; other < limits_.members; ++other) living += world.lives(other) ? 1 : 0;
    if (limits_.members - living < limits_.crashes && living > 1) {
      World next = world;
      next.dead() |= 1U << place;
      add(next, at, rank + " dies", result);
    }
    if (now.over) return;
    if (const uint64_t unit = model_.open_unit(now); unit != 0)
      step(at, world, place, "d" + std::to_string(unit), rank + " is done with unit " + std::to_string(unit), result,
           [&](Site& site, Effects& effects) { model_.become_done(site, place, unit, effects); });
    for (const char32_t number : world.mail()) {
      const Mail& mail = mail_[number];
      if (mail.to != place || mail.view != now.change.view().number) continue;
      step(at, world, place, "m" + std::to_string(uint32_t(number)), mail.text(), result,
           [&](Site& site, Effects& effects) { model_.deliver(site, mail, effects); });
    }
    if (now.change.next_tick_ms() != ViewConsensus::kNever)
      step(at, world, place, "t", rank + " has waited", result,
           [&](Site& site, Effects& effects) { model_.tick(site, place, effects); });
    for (int other = 0; other < limits_.members; ++other)
      if (other != place) expand_loss(at, world, place, other, result);
    if (const auto wanted = now.change.wants_tie()) expand_tie(at, world, place, rank, *wanted, result);
  }

  bool answers(World& world, int place) { return world.lives(place) && !sites_[world.site(place)].expelled; }
  bool may_lose(World& world, int place, int other) {
    const auto& losses = limits_.losses;
    return static_cast<int>(world.suspicions()) < limits_.suspicions &&
           (losses.empty() || std::find(losses.begin(), losses.end(), std::pair(place, other)) != losses.end());
  }

  void expand_loss(std::size_t at, World& world, int place, int other, Result& result) {
    int lowest = 0;
    while (!answers(world, lowest)) ++lowest;
    const std::string rank = "rank " + std::to_string(place);
    const std::string whom = std::to_string(other);
    if (!answers(world, other) && limits_.pages && place == lowest) {
      const uint32_t page = world.page(other);
      step(at, world, place, "a" + whom + "," + std::to_string(page), rank + " answers for rank " + whom, result,
           [&](Site& site, Effects& effects) {
             model_.answer_for(site, place, other, page == 0 ? std::vector<std::byte>() : pages_[page - 1], effects);
           });
    } else if (!world.lives(other) || may_lose(world, place, other)) {
      World next = world;
      if (world.lives(other)) ++next.suspicions();
      step(at, next, place, "s" + whom, rank + " loses rank " + whom, result,
           [&](Site& site, Effects& effects) { model_.suspect(site, place, other, effects); });
    }
  }

  void expand_tie(std::size_t at, World& world, int place, const std::string& rank, const std::vector<int>& wanted,
                  Result& result) {
    World next = world;
    if (world.granted() == 0 || limits_.store_grants_all) {
      next.granted() = 0;
      for (const int other : wanted) next.granted() |= 1U << other;
    }
    std::vector<int> places;
    for (int other = 0; other < limits_.members; ++other)
      if ((next.granted() >> other & 1U) != 0) places.push_back(other);
    step(at, next, place, "g" + std::to_string(uint32_t(next.granted())), rank + " asks the store for the tie", result,
         [&](Site& site, Effects& effects) { model_.tie(site, place, places, effects); });
  }

  Model model_;
  Limits limits_;
  std::deque<Site> sites_;
  std::deque<Mail> mail_;
  std::deque<std::vector<std::byte>> pages_;
  std::unordered_map<std::string, uint32_t> site_numbers_;
  std::unordered_map<std::string, uint32_t> mail_numbers_;
  std::unordered_map<std::string, uint32_t> page_numbers_;
  std::unordered_map<std::string, Step> steps_;
  std::unordered_set<std::u32string> seen_;
  std::unordered_set<std::string> texts_;
  std::deque<Node> nodes_;
};

}  // namespace ringdp::testing
