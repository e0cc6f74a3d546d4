#include "membership/units.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace ringdp {

Units::Units(const MemberView& view, int place, uint64_t next)
    : view_(view), self_(view.member_of(place)), next_(next) {}

uint64_t Units::begin() {
  if (frozen_) throw Error(ErrorKind::kState, "a unit was begun while the group's membership changes");
  if (std::count_if(units_.begin(), units_.end(), [](const auto& it) { return it.second.begun; }) >=
      static_cast<std::ptrdiff_t>(kMaxOpenUnits))
    throw Error(ErrorKind::kState, "more than " + std::to_string(kMaxOpenUnits) + " units are open at once");
  units_[next_].begun = true;
  return next_++;
}

bool Units::done(uint64_t unit) {
  const auto found = units_.find(unit);
  if (found == units_.end() || !found->second.begun)
    throw Error(ErrorKind::kState, "unit " + std::to_string(unit) + " is done, but it is not open");
  if (frozen_) return false;
  found->second.done.set(static_cast<std::size_t>(self_));
  return true;
}

void Units::done_by(int place, uint64_t unit) {
  const int member = view_.member_of(place);
  if (member < 0 || unit == 0 || unit >= next_ + kMaxOpenUnits)
    throw Error(ErrorKind::kHandshake, "received that place " + std::to_string(place) + " is done with unit " +
                                           std::to_string(unit) + ", which nobody can be in view " +
                                           std::to_string(view_.number));
  if (unit < next_ && !units_.contains(unit)) return;  // left, so this is a repetition
  units_[unit].done.set(static_cast<std::size_t>(member));
}

std::vector<uint64_t> Units::leave() {
  std::vector<uint64_t> left;
  if (frozen_) return left;
  const MemberSet everybody = view_.everybody();
  for (const auto& [number, unit] : units_)
    if (unit.begun && unit.done == everybody) left.push_back(number);
  for (const uint64_t number : left) units_.erase(number);
  return left;
}

void Units::count_plain(uint64_t called, uint64_t finished) {
  if (frozen_) return;
  plain_called_ = called;
  plain_finished_ = finished;
}

UnitReport Units::report() const {
  UnitReport out;
  out.next = next_;
  for (const auto& [number, unit] : units_)
    if (unit.begun) out.open.push_back({number, unit.done[static_cast<std::size_t>(self_)]});
  out.plain_called = plain_called_;
  out.plain_finished = plain_finished_;
  return out;
}

Units Units::after(const ViewDecision& decision, int place) const {
  Units out(decision.view_made(), place, next_);
  for (const auto& [number, unit] : units_) {
    const auto stands = std::any_of(decision.units.begin(), decision.units.end(),
                                    [&, id = number](const auto& it) { return it.unit == id && !it.redo; });
    if (unit.begun && !stands) out.units_[number].begun = true;
  }
  return out;
}

}  // namespace ringdp
