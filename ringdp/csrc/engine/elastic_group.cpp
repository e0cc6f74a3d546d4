#include "engine/elastic_group.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "meet/store.h"

namespace ringdp {
namespace {

constexpr std::size_t kMostCauseBytes = 500;
constexpr std::size_t kMostUnitBytes = 200;
constexpr auto kFirstNotice = std::chrono::seconds(10);

// The group's failure, if it is a loss.
std::optional<Error> loss_of(const std::exception_ptr& failure) {
  if (!failure) return std::nullopt;
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    if (is_loss(error)) return error;
  } catch (...) {
  }
  return std::nullopt;
}

}  // namespace

bool is_loss(const std::exception_ptr& failure) { return loss_of(failure).has_value(); }

int& UnitScope::depth() {
  thread_local int depth = 0;
  return depth;
}

std::string ViewChange::text() const {
  std::ostringstream out;
  out << (lost.empty() ? std::string("a member") : join(lost_names, ", "));
  if (decision.planned)
    out << " left";
  else
    out << (lost.size() > 1 ? " were" : " was") << " lost";
  out << " (" << decision.cause << "); " << decision.members.size() << " of " << before
      << " ranks go on, numbered from 0, as view " << view;
  return out.str();
}

std::string ViewChange::part() const { return (lost.size() > 1 ? "the parts of " : "the part of ") + ranks_text(lost); }

std::string ViewChange::batch() const {
  const bool several = lost.size() > 1;
  std::ostringstream out;
  out.precision(std::numeric_limits<double>::digits10);
  out << (several ? "their batches" : "its batch");
  if (lost_weight) out << ", of weight " << *lost_weight << (several ? " together," : ",");
  out << (several ? " are" : " is") << " not in it";
  return out.str();
}

std::string ViewChange::log_line(bool made) const {
  std::ostringstream out;
  out << text();
  if (!decision.counted.empty()) out << "; " << decision.counted << " counts, with " << part();
  if (decision.replay) {
    out << "; an operation of the program's own was unfinished, so all of them get MembershipChanged";
  } else if (!decision.again.empty()) {
    out << "; " << decision.again << (made ? " was" : " is") << " made again without " << part();
    if (decision.batches) out << ": " << batch();
  } else if (decision.counted.empty()) {
    out << "; nothing was under way";
  }
  if (!also_lost.empty()) out << "; " << also_lost;
  out.setf(std::ios::fixed);
  out.precision(3);
  out << "; " << std::chrono::duration<double>(Clock::now() - noticed_at).count() << " s";
  return out.str();
}

ElasticGroup::ElasticGroup(std::shared_ptr<Runtime> runtime, std::string name, int64_t timeout_ms,
                           const AlgorithmTables& tables, std::unique_ptr<Agreement> agreement)
    : runtime_(std::move(runtime)),
      name_(std::move(name)),
      tables_(tables),
      agreement_(std::move(agreement)),
      timeout_ms_(timeout_ms) {}

std::shared_ptr<ElasticGroup> ElasticGroup::make(std::shared_ptr<Runtime> runtime, std::string name,
                                                 const std::vector<int>& members, int64_t timeout_ms,
                                                 const AlgorithmTables& tables, std::unique_ptr<Agreement> agreement) {
  std::shared_ptr<ElasticGroup> made(
      new ElasticGroup(std::move(runtime), std::move(name), timeout_ms, tables, std::move(agreement)));
  made->places_.resize(static_cast<std::size_t>(made->runtime_->engine().world()));
  std::iota(made->places_.begin(), made->places_.end(), 0);
  made->group_ = made->make_view(1, members);  // after `made` exists, to which the view belongs
  made->rank_ = made->group_->view().rank;
  made->size_ = made->group_->view().size;
  return made;
}

// The number on the wire is made of the name and the members, so that no frame of one view reaches another.
std::shared_ptr<GroupHandle> ElasticGroup::make_view(uint64_t view, const std::vector<int>& members) {
  const std::string name = view == 1 ? name_ : name_ + "/view " + std::to_string(view);
  return std::make_shared<GroupHandle>(runtime_, name, members, timeout_ms_, tables_, shared_from_this());
}

std::shared_ptr<GroupHandle> ElasticGroup::group() const {
  std::lock_guard lock(mutex_);
  return group_;
}

void ElasticGroup::on_change(OnChange listener) {
  std::lock_guard lock(mutex_);
  on_change_ = std::move(listener);
}

void ElasticGroup::on_install(std::function<void(const std::shared_ptr<GroupHandle>&)> installed) {
  std::lock_guard changing(change_mutex_);
  installed_ = std::move(installed);
}

void ElasticGroup::set_timeout_ms(int64_t timeout_ms) {
  std::lock_guard lock(mutex_);
  timeout_ms_ = timeout_ms;
  group_->set_timeout_ms(timeout_ms);
}

void ElasticGroup::close(const std::string& how) {
  write_log_line(/*made=*/false);
  group()->close(how);
}

// ---- Units.

void ElasticGroup::run_unit(const std::function<UnitDescription()>& describe,
                            const std::function<void(bool again)>& body) {
  const UnitScope scope;
  for (bool again = false;; again = true) {
    const uint64_t unit = begin_unit(describe());
    const uint64_t before = view();
    try {
      body(again);
      return commit(unit);
    } catch (const Error& error) {
      if (!is_loss(error)) throw;
    }
    if (change(unit, before) == Outcome::kCounts) return;
  }
}

uint64_t ElasticGroup::begin_unit(UnitDescription unit) {
  throw_if_untold();
  std::lock_guard lock(mutex_);
  if (unit.also_lost.empty()) unit.also_lost = std::move(unit_.also_lost);
  unit_ = std::move(unit);
  weights_.clear();
  return left_ + 1;
}

void ElasticGroup::set_weights(std::vector<double> weights) {
  std::lock_guard lock(mutex_);
  if (weights.size() == static_cast<std::size_t>(size_)) weights_ = std::move(weights);
}

void ElasticGroup::commit(uint64_t unit) {
  std::shared_ptr<GroupHandle> group;
  uint64_t view = 0;
  {
    std::lock_guard lock(mutex_);
    const auto entry = progress_.enter(unit);
    if (entry == UnitProgress::Entry::kLeft) return;
    if (entry == UnitProgress::Entry::kFrozen) throw Error(ErrorKind::kPeerLost, "the members are about to change");
    group = group_;
    view = view_;
  }
  CallOptions options;
  options.caller_waits = true;
  const auto barrier = group->barrier(std::move(options));
  group->wait(*barrier);
  {
    std::lock_guard lock(mutex_);
    if (!progress_.leave(unit, view)) throw Error(ErrorKind::kPeerLost, "the members have changed");
    left_ = progress_.left();
  }
  write_log_line(/*made=*/true);
  if (has_last_world_.exchange(false)) {
    std::lock_guard changing(change_mutex_);
    last_view_.reset();
  }
}

void ElasticGroup::write_log_line(bool made) {
  ViewChange change;
  {
    std::lock_guard lock(mutex_);
    if (!std::exchange(unlogged_, false)) return;
    change = last_;
  }
  log(LogLevel::kWarning, change.log_line(made));
}

ElasticGroup::Outcome ElasticGroup::change(uint64_t unit, uint64_t view, bool calling) {
  const auto noticed = Clock::now();
  std::lock_guard changing(change_mutex_);
  if (view == view_) {
    const auto group = this->group();
    const std::exception_ptr failure = group->failure();
    const auto loss = loss_of(failure);
    if (failure && !loss) std::rethrow_exception(failure);
    if (!loss) throw Error(ErrorKind::kState, "a change of members was asked for, and no member is lost");
    MemberState mine = freeze(group, unit, calling);
    mine.cause = clean_text(loss->context().cause.empty() ? loss->what() : loss->context().cause, kMostCauseBytes);
    const std::vector<int> before = group->view().members;
    const int self = group->engine()->rank();
    const Deadline deadline = Deadline::after_ms(group->timeout_ms());
    auto next_notice = noticed + kFirstNotice;
    const Decision decision = agreement_->agree(
        view, before, self, mine, [&] { return group->engine()->unreachable(before); },
        [&](const std::vector<int>& waiting_for) { look(waiting_for, deadline, next_notice); });
    ViewChange change = describe(view + 1, decision);
    change.counted = decision.committed > mine.left;
    change.noticed_at = noticed;
    write_log_line(/*made=*/change.counted);  // of the change before, if this one has stopped its unit
    install(std::move(change));
  }
  if (unit > 0 && left_ >= unit) return Outcome::kCounts;  // an unreported change is reported by the next call
  throw_if_untold();
  return Outcome::kAgain;
}

ViewChange ElasticGroup::describe(uint64_t view, const Decision& decision) const {
  const auto group = this->group();
  const std::vector<int>& before = group->view().members;
  ViewChange change;
  change.view = view;
  change.before = static_cast<int>(before.size());
  change.decision = decision;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const int member = before[i];
    if (std::find(decision.members.begin(), decision.members.end(), member) != decision.members.end()) continue;
    change.lost.push_back(member);
    change.lost_names.push_back(group->engine()->peer(member).text());
    if (decision.weights.size() == before.size())
      change.lost_weight = change.lost_weight.value_or(0) + decision.weights[i];
  }
  return change;
}

// From now on this rank starts no operation in that view and completes no unit.
MemberState ElasticGroup::freeze(const std::shared_ptr<GroupHandle>& group, uint64_t unit, bool calling) {
  std::vector<std::shared_ptr<Work>> calls;
  MemberState mine;
  {
    std::lock_guard lock(mutex_);
    mine = progress_.freeze();
    mine.called = called_;
    mine.unfinished = calling;
    if (unit > 0) {
      mine.unit = clean_text(unit_.what, kMostUnitBytes);
      mine.batches = unit_.batches;
      mine.weights = weights_;
    }
    calls = calls_;
  }
  for (const auto& work : calls) {
    try {
      group->wait(*work);
    } catch (const Error&) {
      mine.unfinished = true;
    }
  }
  mine.lost = group->engine()->unreachable(group->view().members);
  return mine;
}

void ElasticGroup::install(ViewChange change) {
  const Decision& decision = change.decision;
  const auto before = group();
  const int self = before->engine()->rank();
  if (std::find(decision.members.begin(), decision.members.end(), self) == decision.members.end()) {
    ErrorContext context;
    context.rank = self;
    context.cause = decision.cause;
    context.view = static_cast<int64_t>(change.view);
    context.survivors = decision.members;
    context.advice =
        "this process has to end, because its state is older than theirs now; look at the network of its host, and "
        "start the job again where it should have all ranks";
    throw Error(ErrorKind::kExpelled,
                ranks_text(decision.members) + " of the job could not reach rank " + std::to_string(self) +
                    " and have gone on without it, as view " + std::to_string(change.view) + " (" + decision.cause +
                    "): " + context.advice,
                context);
  }
  std::vector<int> members = decision.members;
  if (!decision.world.empty()) {
    if (!next_world_ || next_world_->name != decision.world)
      throw Error(ErrorKind::kState, "the members of the job go on in a world that this rank has not met");
    last_view_ = before;
    has_last_world_ = true;
    move_to(std::move(*next_world_));
    members.resize(static_cast<std::size_t>(runtime_->engine().world()));
    std::iota(members.begin(), members.end(), 0);
  }
  const auto now = make_view(change.view, members);
  if (before->adds_in_rank_order()) now->add_in_rank_order();
  OnChange listener;
  {
    std::lock_guard lock(mutex_);
    change.places = places_of(*now);
    group_ = now;
    group_->set_timeout_ms(timeout_ms_);
    progress_.install(change.view, decision.committed);
    left_ = base_ = decision.committed;
    unreported_ = unreported_ || decision.replay;
    called_ = 0;
    calls_.clear();
    weights_.clear();
    change.also_lost = unit_.also_lost;
    last_ = change;
    unlogged_ = !change.lost.empty() || decision.replay;
    rank_ = now->view().rank;
    size_ = now->view().size;
    view_ = change.view;
    listener = on_change_;
  }
  if (installed_) installed_(now);
  if (decision.world.empty()) before->close("left: its members have changed");
  if (listener) listener(change);  // before the log line, since it may change the log's destination
  if (decision.replay || decision.again.empty()) write_log_line(/*made=*/false);
}

// Under change_mutex_.
void ElasticGroup::move_to(NextWorld world) {
  std::lock_guard lock(mutex_);
  runtime_ = std::move(world.runtime);
  name_ = std::move(world.name);
  tables_ = runtime_->tables_in_use();
  agreement_ = std::move(world.agreement);
  places_ = std::move(world.places);
  next_world_.reset();
}

// ---- Changes without a loss.

std::vector<int> ElasticGroup::places() const {
  std::lock_guard lock(mutex_);
  return places_of(*group_);
}

std::vector<int> ElasticGroup::places_of(const GroupHandle& view) const {
  std::vector<int> places;
  for (const int member : view.view().members) places.push_back(places_.at(static_cast<std::size_t>(member)));
  return places;
}

void ElasticGroup::set_places(std::vector<int> of_runtime) {
  std::lock_guard lock(mutex_);
  places_ = std::move(of_runtime);
}

std::vector<int> ElasticGroup::places_of_runtime() const {
  std::lock_guard lock(mutex_);
  return places_;
}

void ElasticGroup::lose(int place, const std::string& cause) {
  std::shared_ptr<GroupHandle> group;
  int peer = -1;
  {
    std::lock_guard lock(mutex_);
    group = group_;
    for (const int member : group->view().members)
      if (places_[static_cast<std::size_t>(member)] == place) peer = member;
  }
  if (peer >= 0 && peer != group->engine()->rank()) group->engine()->healing().lose(peer, cause);
}

void ElasticGroup::prepare(NextWorld world) {
  std::lock_guard changing(change_mutex_);
  next_world_ = std::move(world);
}

bool ElasticGroup::go_on_in(const std::string& world, uint64_t view) {
  std::lock_guard changing(change_mutex_);
  Decision decision;
  decision.world = world;
  decision.members = group()->view().members;
  return decide(view, std::move(decision));
}

bool ElasticGroup::go_on_without(const std::vector<int>& ranks, uint64_t view, const std::string& cause) {
  std::lock_guard changing(change_mutex_);
  Decision decision;
  decision.cause = clean_text(cause, kMostCauseBytes);
  decision.planned = true;
  const std::vector<int> members = group()->view().members;
  for (std::size_t rank = 0; rank < members.size(); ++rank)
    if (std::find(ranks.begin(), ranks.end(), static_cast<int>(rank)) == ranks.end())
      decision.members.push_back(members[rank]);
  return decide(view, std::move(decision));
}

// Under change_mutex_. In the view after `view` this rank has found the decision of another one.
bool ElasticGroup::decide(uint64_t view, Decision decision) {
  if (view_ == view + 1) {
    std::lock_guard lock(mutex_);
    return last_.decision.world == decision.world && last_.decision.planned == decision.planned;
  }
  if (view_ != view) return false;
  const auto before = group();
  {
    std::lock_guard lock(mutex_);
    decision = progress_.proposal(std::move(decision));
  }
  const Decision found = agreement_->propose(view, before->engine()->rank(), decision);
  ViewChange change = describe(view + 1, found);
  change.noticed_at = Clock::now();
  write_log_line(/*made=*/true);
  install(std::move(change));
  return found.world == decision.world && found.planned == decision.planned;
}

void ElasticGroup::enter(uint64_t view, uint64_t left) {
  std::lock_guard changing(change_mutex_);
  if (!next_world_) throw Error(ErrorKind::kState, "this rank has not met the members of the job");
  ViewChange change;
  change.view = view;
  change.before = 1;
  change.decision.members = group()->view().members;
  change.decision.committed = left;
  change.decision.world = next_world_->name;
  change.noticed_at = Clock::now();
  install(std::move(change));
}

void ElasticGroup::look(const std::vector<int>& waiting_for, Deadline deadline, Clock::time_point& next_notice) const {
  const auto engine = group()->engine();
  engine->check_interrupt();
  const auto now = Clock::now();
  if (now < next_notice && !deadline.expired()) return;
  const bool one = waiting_for.size() == 1;
  const std::string text = "a member is lost, and the others are about to go on without it; this rank waits for " +
                           (one ? engine->peer(waiting_for.front()).text() : ranks_text(waiting_for)) +
                           (one ? ", which lives and has" : ", which live and have") +
                           " not come to the next operation";
  if (deadline.expired()) {
    ErrorContext context;
    context.peer = waiting_for.empty() ? -1 : waiting_for.front();
    context.advice = "look at what it does (its log, py-spy dump), or give ringdp.init() a longer timeout";
    throw Error(ErrorKind::kTimeout, text + ": Timed out; " + context.advice, context);
  }
  log(LogLevel::kWarning, text);
  next_notice = now + kFirstNotice;
}

// ---- Outside units.

std::shared_ptr<GroupHandle> ElasticGroup::group_for_call() {
  throw_if_untold();
  auto present = group();
  const uint64_t view = view_;
  if (!is_loss(present->failure())) return present;
  change(0, view, /*calling=*/true);
  return group();
}

void ElasticGroup::called(const std::vector<std::shared_ptr<Work>>& operations, bool in_order) {
  std::lock_guard lock(mutex_);
  std::erase_if(calls_, [](const auto& it) { return it->finished() && !it->failed(); });
  if (in_order) ++called_;
  calls_.insert(calls_.end(), operations.begin(), operations.end());
}

bool ElasticGroup::has_calls_in_flight() const {
  std::lock_guard lock(mutex_);
  return std::any_of(calls_.begin(), calls_.end(), [](const auto& it) { return !it->finished(); });
}

void ElasticGroup::call_failed(uint64_t group, const Error& error) {
  if (!is_loss(error)) return;
  const auto present = this->group();
  if (present->id() == group) change(0, view_);
  // The operation is unfinished here, so the change has reported it to this rank, unless it was one of an earlier
  // view.
  throw changed_error();
}

void ElasticGroup::throw_if_untold() {
  {
    std::lock_guard lock(mutex_);
    if (!std::exchange(unreported_, false)) return;
  }
  throw changed_error();
}

Error ElasticGroup::changed_error() const {
  std::lock_guard lock(mutex_);
  ErrorContext context;
  context.rank = rank_;
  context.cause = last_.decision.cause;
  context.view = static_cast<int64_t>(last_.view);
  context.survivors = last_.decision.members;
  context.advice =
      "the process group has its new members now, and ranks may be an operation apart: load the last checkpoint on all "
      "of them, or end, and the launcher does";
  return Error(ErrorKind::kMembership, last_.text() + "; " + context.advice, context);
}

}  // namespace ringdp
