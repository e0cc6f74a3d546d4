#include "engine/progress.h"

#include <sched.h>

#include <algorithm>

#include "kernels/float_mode.h"

namespace ringdp {
namespace {

constexpr std::size_t kActivePerGroup = 8;  // operations of a group that share the links at a time
// a driver that never sleeps checks deadlines every so many turns
constexpr unsigned kDeadlineTurns = 256;
// a yield without another runnable thread takes half a microsecond
constexpr auto kUsedYield = std::chrono::microseconds(4);
constexpr int kUsedYields = 4;  // in a row: not an interrupt
constexpr auto kCrowdedPeriod = std::chrono::milliseconds(2);
constexpr auto kLongYield = std::chrono::milliseconds(1);  // a program that computes
constexpr auto kLongCrowdedPeriod = std::chrono::milliseconds(50);
constexpr auto kBusyCheckPeriod = std::chrono::milliseconds(1000);  // of signals, while events keep coming
constexpr int kSleepMs = 100;  // a sleeping driver checks deadlines and signals this often

}  // namespace

Progress::Progress(DriverRole& role, Poller& poller, GroupTable& groups, PeerLinks& links, FailureAgreement& failures,
                   StallMonitor& stalls, StagedCopies& copies, CompletionQueue& completions,
                   OperationRecorder& recorder, const EngineOptions& options)
    : role_(role),
      poller_(poller),
      groups_(groups),
      links_(links),
      failures_(failures),
      stalls_(stalls),
      copies_(copies),
      completions_(completions),
      recorder_(recorder),
      options_(options),
      messages_(links, failures, options.want_connection,
                [this](GroupState& group, InFlight& in_flight) { start(group, in_flight); }) {}

void Progress::submit(const GroupPtr& group, InFlight in_flight, bool caller_waits) {
  role_.mutex().assert_held();
  inbox_.emplace_back(group, std::move(in_flight));
  role_.operation_began(caller_waits, inbox_.back().second.rests);
}

void Progress::drive(const Over& over, Deadline deadline, int64_t spin_us) {
  role_.assert_held();
  links_.after_sleep();
  const FloatModeScope float_mode;
  auto last_move = Clock::now();
  bool spinning = spin_us > 0;
  for (;;) {
    take_inbox();
    bool moved = advance_groups();
    moved |= copies_.look();
    if (over ? over() : working_ == 0 && !links_.anything_outgoing()) return;
    moved |= links_.pump();
    failures_.report();
    stalls_.answer();
    if (role_.look_due()) look_at_all();
    if (++turns_ % kDeadlineTurns == 0) {
      links_.poll();  // otherwise a driver that never sleeps would not notice the death of a direct channel's peer
      check_deadlines();
    }
    if (moved) {
      spinning = spin_us > 0;
      if (spinning) last_move = Clock::now();
      continue;
    }
    if (spinning && poll_on(last_move + std::chrono::microseconds(spin_us))) continue;
    check_deadlines();
    if (deadline.expired() || (over && over())) return;
    sleep(over, deadline);
    spinning = false;
  }
}

void Progress::move_on() {
  role_.assert_held();
  const FloatModeScope float_mode;
  links_.after_sleep();
  for (bool moved = true; moved;) {
    take_inbox();
    moved = advance_groups();
    moved |= copies_.look();
    moved |= links_.pump();
    failures_.report();
    stalls_.answer();
  }
}

void Progress::look_for_events() {
  role_.assert_held();
  role_.will_watch();
  links_.after_sleep();
  links_.poll();
  move_on();
  check_deadlines();
}

void Progress::look_at_all() {
  role_.assert_held();
  const FloatModeScope float_mode;
  role_.looked();
  take_inbox();
  advance_groups();
  copies_.look();
  links_.poll();
  links_.receive_all();
  check_deadlines();
  stalls_.answer();
  links_.send_all();
  failures_.report();
}

// Between two rounds of a polling driver. It yields, because another process may need this core, perhaps the rank that
// it waits for. If every rank can have its own core, and a yield shows that another process runs on this one, polling
// is harmful: another program keeps the core for milliseconds, and the kernel leaves two ranks that alternate on one
// core there while another core is idle. A sleeper is woken at once, on an idle core. False: sleep now.
bool Progress::poll_on(Clock::time_point end) {
  auto before = Clock::now();
  if (before >= end || before < crowded_until_) return false;
  sched_yield();
  if (options_.shares_cores) return true;
  auto after = Clock::now();
  yields_used_ = after - before > kUsedYield ? yields_used_ + 1 : 0;
  if (after - before > kLongYield)
    crowded_until_ = after + kLongCrowdedPeriod;
  else if (yields_used_ >= kUsedYields)
    crowded_until_ = after + kCrowdedPeriod;
  return true;
}

void Progress::take_inbox() {
  role_.assert_held();
  std::vector<std::pair<GroupPtr, InFlight>> arrived;
  std::vector<std::function<void()>> requests;
  {
    MutexLock lock(role_.mutex());
    arrived.swap(inbox_);
    requests = role_.take_requests();
  }
  for (auto& [group, in_flight] : arrived) {
    copies_.add(in_flight.operation->staging().get());
    if (!in_flight.rests) ++working_;
    if (auto failure = groups_.failure_of(*group)) {
      finish(in_flight, failure);
      continue;
    }
    groups_.make_busy(group);
    if (in_flight.operation->point_to_point() != nullptr) {
      messages_.take(*group, std::move(in_flight));
      continue;
    }
    if (in_order(in_flight.sequence())) {
      group->queued.push_back(std::move(in_flight));
      continue;
    }
    // A callback may wait for it, so it must not wait for later operations.
    group->nested.push_back(std::move(in_flight));
    start(*group, group->nested.back());
  }
  for (auto& request : requests) request();
}

bool Progress::advance_groups() {
  bool changed = false;
  std::vector<GroupPtr>& busy = groups_.busy();
  for (std::size_t i = 0; i < busy.size();) {
    GroupPtr group = busy[i];
    if (!group->unbound.empty()) changed |= messages_.bind_receives(*group);
    while (start_next(*group)) changed = true;
    while (retire(*group)) {
      changed = true;
      while (start_next(*group)) {
      }
    }
    if (group->idle() && i < busy.size() && busy[i] == group)
      busy.erase(busy.begin() + static_cast<std::ptrdiff_t>(i));
    else
      ++i;
  }
  return changed;
}

// Operations of a group overlap as long as they use different memory; two on the same memory keep their order.
bool Progress::start_next(GroupState& group) {
  if (group.queued.empty() || group.active.size() >= kActivePerGroup || group.failing) return false;
  const Operation& next = *group.queued.front().operation;
  for (const InFlight& in_flight : group.active)
    if (next.conflicts(*in_flight.operation)) return false;
  group.active.push_back(std::move(group.queued.front()));
  group.queued.pop_front();
  start(group, group.active.back());
  return true;
}

void Progress::start(GroupState& group, InFlight& in_flight) {
  role_.assert_held();
  Operation& operation = *in_flight.operation;
  if (group.failing || !operation.can_start() || group.in_the_way(in_flight) != nullptr) return;
  OperationContext context{group.id, in_flight.sequence(), &links_, &scratch_};
  group.remember(operation.identity());
  in_flight.moved_at = in_flight.asked_at = Clock::now();
  OperationRecorder::start(in_flight.record, in_flight.sequence(), operation, in_flight.moved_at);
  try {
    operation.start(context);
    for (int member : group.view.members)
      if (Link* link = links_[member]) link->incoming().check_early_frames(operation.identity());
  } catch (const Error& error) {
    failures_.queue(group.id, error);
    return;
  } catch (const std::exception& error) {  // the caller's buffers: no memory for a copy, for example
    failures_.queue(group.id, Error(ErrorKind::kSystem, operation.identity().text() + ": " + error.what()));
    return;
  }
  for (int member : group.view.members) {
    Link* link = links_[member];
    if (link == nullptr || link->usable() || !operation.needs(member)) continue;
    failures_.queue(group.id, failures_.explain_departure(group, member));
    return;
  }
}

bool Progress::retire(GroupState& group) {
  if (group.failing) return false;
  auto first_of_callback = [&](const InFlight& in_flight) {  // operations of one callback also end in order
    auto same = [&](const InFlight& other) { return other.callback == in_flight.callback; };
    return !in_flight.callback || &*std::find_if(group.nested.begin(), group.nested.end(), same) == &in_flight;
  };
  auto nested = std::find_if(group.nested.begin(), group.nested.end(), [&](const InFlight& in_flight) {
    return in_flight.operation->complete() && first_of_callback(in_flight);
  });
  if (nested != group.nested.end()) {
    InFlight done = std::move(*nested);
    group.nested.erase(nested);
    conclude(done);
    if (!done.callback) return true;
    for (InFlight& in_flight : group.nested)
      if (in_flight.callback == done.callback && !in_flight.operation->started()) start(group, in_flight);
    return true;
  }
  if (group.active.empty() || !group.active.front().operation->complete()) return false;
  InFlight done = std::move(group.active.front());
  group.active.pop_front();
  conclude(done);
  return true;
}

void Progress::conclude(InFlight& in_flight) {
  std::exception_ptr failure;
  try {
    in_flight.operation->conclude();
  } catch (...) {
    failure = std::current_exception();
  }
  finish(in_flight, failure);
}

void Progress::finish(InFlight& in_flight, const std::exception_ptr& error) {
  recorder_.end(in_flight.record, error != nullptr);
  const bool rests = in_flight.rests;
  if (!rests) --working_;
  std::shared_ptr<Work> work = std::move(in_flight.work);
  auto on_done = std::move(work->on_done_);
  // The last holder of a tensor may need Python's lock, for which the driver must never wait. So a completion thread
  // drops the buffers, or the thread that waits for the work.
  std::shared_ptr<Staging> staging = in_flight.operation->staging();
  in_flight.operation.reset();
  std::shared_ptr<void> buffers = std::move(in_flight.keep_alive);
  copies_.retire(std::move(staging), buffers);
  {
    MutexLock lock(role_.mutex());
    work->finish(error, on_done ? nullptr : std::move(buffers));
    role_.operation_ended(rests);
  }
  const int lane = work->lane();
  const uint64_t group = work->group(), sequence = work->sequence();
  if (on_done) {
    completions_.push(lane, group, sequence,
                      [on_done = std::move(on_done), error, buffers = std::move(buffers)] { on_done(error); });
  } else if (work.use_count() == 1) {  // no thread waits for it
    completions_.push(lane, group, sequence, [work = std::move(work)] {});
  }
}

// When a sleeping driver must wake up without an event.
void Progress::set_timer() {
  const auto next = std::min(links_.next_send(), copies_.next_look());
  if (next != Clock::time_point::max()) poller_.wake_at(next);
}

void Progress::sleep(const Over& over, Deadline deadline) {
  set_timer();
  {
    MutexLock lock(role_.mutex());
    if (!inbox_.empty() || !role_.begin_sleep()) return;
  }
  int timeout_ms = std::min(deadline.remaining_ms(kSleepMs), next_deadline().remaining_ms(kSleepMs));
  if (!links_.before_sleep()) timeout_ms = 0;
  const auto& events = poller_.wait(timeout_ms);
  {
    MutexLock lock(role_.mutex());
    role_.end_sleep();
  }
  links_.after_sleep();
  links_.serve(events);
  failures_.report();
  if (!over || !options_.check_interrupt) return;
  const auto period = events.empty() ? std::chrono::milliseconds(kSleepMs) : kBusyCheckPeriod;
  if (const auto now = Clock::now(); now - interrupt_check_ >= period) {
    interrupt_check_ = now;
    options_.check_interrupt();
  }
}

void Progress::end_operations(GroupState& group, const std::exception_ptr& failure, uint64_t cause) {
  role_.assert_held();
  auto survives = [&](const InFlight& in_flight) {
    return (cause == 0 || in_flight.sequence() < cause) && in_flight.operation->complete();
  };
  std::vector<InFlight> done, failed;
  for (InFlight& in_flight : group.active) (survives(in_flight) ? done : failed).push_back(std::move(in_flight));
  for (InFlight& in_flight : group.nested) failed.push_back(std::move(in_flight));
  for (InFlight& in_flight : failed) in_flight.operation->abandon();
  for (InFlight& in_flight : group.unbound) failed.push_back(std::move(in_flight));
  for (InFlight& in_flight : group.queued) failed.push_back(std::move(in_flight));
  group.nested.clear();
  group.active.clear();
  group.unbound.clear();
  group.queued.clear();
  links_.discard_group(group.id, group.view.members);
  for (InFlight& in_flight : done) conclude(in_flight);
  for (InFlight& in_flight : failed) finish(in_flight, failure);
}

Deadline Progress::next_deadline() const {
  Deadline first = failures_.next_deadline();
  for (const GroupPtr& group : groups_.busy()) {
    if (group->failing) continue;
    group->any_running([&](const InFlight& in_flight) {
      first = std::min(first, in_flight.deadline);
      return false;
    });
  }
  return first;
}

void Progress::check_deadlines() {
  failures_.end_pending();
  for (const GroupPtr& group : groups_.busy()) {
    const InFlight* late = nullptr;
    group->any_running([&](const InFlight& in_flight) {
      if (in_flight.deadline.expired()) late = &in_flight;
      return late != nullptr;
    });
    if (late != nullptr && !group->failing) failures_.queue(group->id, stalls_.explain_timeout(*late));
  }
  failures_.report();
  const auto now = Clock::now();
  stalls_.look(now);
  for (auto& [group, error] : stalls_.take_deadlocks()) failures_.queue(group, std::move(error));
  failures_.report();
  if (links_.check_hosts(now)) failures_.report();
}

}  // namespace ringdp
