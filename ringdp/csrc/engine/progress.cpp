// What the driver of the engine does: start operations, move bytes, retire what is complete, sleep when nothing moves.
#include <sched.h>

#include <algorithm>

#include "engine/engine.h"
#include "kernels/float_mode.h"

namespace ringdp {
namespace {

constexpr std::size_t kActivePerGroup = 8;  // operations of a group that share the links at a time
constexpr std::size_t kReceiveBudgetBytes = 1024 * 1024;
constexpr int kPolledLinks = 8;                            // up to so many peers asking each beats asking the poller
constexpr std::size_t kHistory = 64;                       // operations of a group that are known after they have ended
constexpr unsigned kDeadlineTurns = 256;                   // a driver that never rests looks at deadlines this often
constexpr auto kUsedYield = std::chrono::microseconds(4);  // one that nobody uses takes half a microsecond
constexpr int kUsedYields = 4;                             // in a row: no passing interrupt
constexpr auto kCrowdedPeriod = std::chrono::milliseconds(2);
constexpr auto kLongYield = std::chrono::milliseconds(1);  // a program that computes
constexpr auto kLongCrowdedPeriod = std::chrono::milliseconds(50);
constexpr int kSleepMs = 100;  // a sleeping driver looks at deadlines and signals this often

}  // namespace

void Engine::drive(const Work* until, Deadline deadline, int64_t spin_us) {
  const FloatModeScope float_mode;
  auto last_move = Clock::now();
  bool spinning = spin_us > 0;
  for (;;) {
    take_inbox();
    bool moved = advance_groups();
    if (staged_ > 0 || !landing_.empty()) moved |= look_at_copies();
    if (until != nullptr ? until->finished() : busy_.empty() && !anything_outgoing()) return;
    moved |= pump_links();
    settle_failures();
    if (!questions_.empty()) answer_questions();
    if (look_due_.load(std::memory_order_relaxed)) look_while_idle();
    if (++turns_ % kDeadlineTurns == 0) {
      serve(poller_.wait(0));  // whoever never sleeps would not hear that a direct channel's peer is gone
      check_deadlines();
    }
    if (moved) {
      spinning = spin_us > 0;
      if (spinning) last_move = Clock::now();
      continue;
    }
    if (spinning && poll_on(last_move + std::chrono::microseconds(spin_us))) continue;
    check_deadlines();
    if (deadline.expired() || (until != nullptr && until->finished())) return;
    sleep(until, deadline);
    spinning = false;
  }
}

// Between two looks of a polling driver: others may want this core, the rank that is waited for among them, so it yields.
// Where every rank can have a core of its own, and a yield shows that somebody else runs on this one, polling does harm:
// another program keeps the core for milliseconds once it has it, and two ranks that take turns on one core are left there
// by the kernel while another core is idle. A sleeper is woken at once, on a core that is idle. False: sleep now.
bool Engine::poll_on(Clock::time_point end) {
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

void Engine::take_inbox() {
  std::vector<std::pair<GroupPtr, Slot>> arrived;
  std::vector<std::function<void()>> requests;
  {
    std::lock_guard lock(mutex_);
    if (inbox_.empty() && requests_.empty()) return;
    arrived.swap(inbox_);
    requests.swap(requests_);
  }
  for (auto& [group, slot] : arrived) {
    if (slot.operation->staging()) {
      ++staged_;
      copies_moved_at_ = Clock::now();
    }
    std::exception_ptr failure;
    {
      std::lock_guard lock(mutex_);
      failure = group->failure;
    }
    if (failure) {
      finish(slot, failure);
      continue;
    }
    if (std::find(busy_.begin(), busy_.end(), group) == busy_.end()) busy_.push_back(group);
    if (slot.operation->point_to_point() != nullptr) {
      take_message(*group, std::move(slot));
      continue;
    }
    if (in_order(slot.work->sequence())) {
      group->queued.push_back(std::move(slot));
      continue;
    }
    // Its parent waits for it inside a callback, so it may not wait for its turn behind later operations.
    group->nested.push_back(std::move(slot));
    start(*group, group->nested.back());
  }
  for (auto& request : requests) request();
}

bool Engine::advance_groups() {
  bool changed = false;
  for (std::size_t i = 0; i < busy_.size();) {
    GroupPtr group = busy_[i];
    if (!group->unbound.empty()) changed |= bind_receives(*group);
    while (start_next(*group)) changed = true;
    while (retire(*group)) {
      changed = true;
      while (start_next(*group)) {
      }
    }
    if (group->idle() && i < busy_.size() && busy_[i] == group)
      busy_.erase(busy_.begin() + static_cast<std::ptrdiff_t>(i));
    else
      ++i;
  }
  return changed;
}

// Operations of a group overlap as long as they use different memory; two on the same memory keep their order.
bool Engine::start_next(Group& group) {
  if (group.queued.empty() || group.active.size() >= kActivePerGroup || group.doom) return false;
  const Operation& next = *group.queued.front().operation;
  for (const Slot& slot : group.active)
    if (next.conflicts(*slot.operation)) return false;
  group.active.push_back(std::move(group.queued.front()));
  group.queued.pop_front();
  start(group, group.active.back());
  return true;
}

// What the callback that issued this operation has issued before it, on the same memory.
const Engine::Slot* Engine::in_the_way(const Group& group, const Slot& nested) {
  if (!nested.callback) return nullptr;
  for (const Slot& earlier : group.nested) {
    if (&earlier == &nested) break;
    if (earlier.callback == nested.callback && nested.operation->conflicts(*earlier.operation)) return &earlier;
  }
  return nullptr;
}

// Not in a group that is about to fail: what has not started then fails with it. Nor before its input has come:
// look_at_copies calls again; nor while an earlier one is in the way: retire calls again.
void Engine::start(Group& group, Slot& slot) {
  Operation& operation = *slot.operation;
  if (group.doom || !operation.can_start() || in_the_way(group, slot) != nullptr) return;
  OperationContext context{group.id, slot.work->sequence(), links_, &scratch_};
  remember(group, operation.identity());
  slot.moved_at = slot.asked_at = Clock::now();
  try {
    operation.start(context);
    for (int member : group.view.members)
      if (links_[member]) links_[member]->settle_early(operation.identity());
  } catch (const Error& error) {
    fail_later(group.id, error);
    return;
  } catch (const std::exception& error) {  // the caller's buffers: no memory for a copy, for example
    fail_later(group.id, Error(ErrorKind::kSystem, operation.identity().text() + ": " + error.what()));
    return;
  }
  for (int member : group.view.members) {
    Link* link = links_[member].get();
    if (link == nullptr || !(link->departed() || link->broken()) || !operation.needs(member)) continue;
    fail_later(group.id, explain_departure(group, member));
    return;
  }
}

// Frames may come for an operation from which this rank expects none: Link asks what it was.
void Engine::remember(Group& group, const FlowIdentity& identity) {
  if (!in_order(identity.sequence)) {
    if (group.nested_history.size() == kHistory) group.nested_history.pop_front();
    group.nested_history.push_back(identity);
    group.nested_history.back().group = group.id;
    return;
  }
  group.history.resize(kHistory);
  FlowIdentity& kept = group.history[identity.sequence % kHistory];
  kept = identity;
  kept.group = group.id;
  group.started_upto = std::max(group.started_upto, identity.sequence);
}

Link::Started Engine::find_started(uint64_t group_id, uint64_t sequence) const {
  GroupPtr group = find_group(group_id);
  if (!group) return {};
  if (!in_order(sequence)) {
    for (const FlowIdentity& identity : group->nested_history)
      if (identity.sequence == sequence) return {true, &identity};
    return {};
  }
  if (sequence > group->started_upto) return {};
  for (const Slot& slot : group->active)  // still waiting for its input, while a later one has started
    if (slot.work->sequence() == sequence && !slot.operation->started()) return {};
  const FlowIdentity& kept = group->history[sequence % kHistory];
  return {true, kept.sequence == sequence ? &kept : nullptr};
}

bool Engine::retire(Group& group) {
  if (group.doom) return false;
  auto first_of_callback = [&](const Slot& slot) {  // what one issued ends in order, too
    auto same = [&](const Slot& other) { return other.callback == slot.callback; };
    return !slot.callback || &*std::find_if(group.nested.begin(), group.nested.end(), same) == &slot;
  };
  auto nested = std::find_if(group.nested.begin(), group.nested.end(),
                             [&](const Slot& slot) { return slot.operation->complete() && first_of_callback(slot); });
  if (nested != group.nested.end()) {
    Slot done = std::move(*nested);
    group.nested.erase(nested);
    conclude(done);
    if (!done.callback) return true;
    for (Slot& slot : group.nested)
      if (slot.callback == done.callback && !slot.operation->started()) start(group, slot);
    return true;
  }
  if (group.active.empty() || !group.active.front().operation->complete()) return false;
  Slot done = std::move(group.active.front());
  group.active.pop_front();
  conclude(done);
  return true;
}

void Engine::conclude(Slot& slot) {
  std::exception_ptr failure;
  try {
    slot.operation->conclude();
  } catch (...) {
    failure = std::current_exception();
  }
  finish(slot, failure);
}

bool Engine::anything_outgoing() const {
  return std::any_of(links_.begin(), links_.end(), [](const auto& link) { return link && link->has_outgoing(); });
}

bool Engine::pump_links() {
  bool moved = false;
  bool few = world() <= kPolledLinks;
  const std::size_t first = first_link_;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    const std::size_t place = first + i < links_.size() ? first + i : first + i - links_.size();
    auto& link = links_[place];
    if (!link || link->broken() || link->departed()) continue;
    bool ask = few || link->direct();
    if (link->has_outgoing() && (ask || !link->wants_write())) {
      bool sent = guarded(link->peer().rank, [](Link& it) { return it.pump_send(); });
      if (sent && limiter_) first_link_ = (place + 1) % links_.size();
      moved |= sent;
    }
    if (ask && link->expects() && !link->broken())
      moved |= guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kReceiveBudgetBytes); });
  }
  if (few || !some_streams_) return moved;
  watch_blocked();
  return moved | serve(poller_.wait(0));
}

bool Engine::serve(const std::vector<Poller::Event>& events) {
  bool moved = false;
  for (const Poller::Event& event : events) {
    int peer = static_cast<int>(event.token);
    if (event.readable)
      moved |= guarded(peer, [](Link& it) {
        it.channel().noticed();
        return it.pump_receive(kReceiveBudgetBytes);
      });
    if (event.writable) moved |= guarded(peer, [](Link& it) { return it.pump_send(); });
  }
  return moved;
}

void Engine::watch_blocked() {
  for (auto& link : links_) {
    if (!link || link->direct() || link->broken() || link->departed()) continue;
    int peer = link->peer().rank;
    if (link->wants_write() == static_cast<bool>(writing_[peer])) continue;
    writing_[peer] = link->wants_write();
    poller_.want_write(link->channel().poll_fd(), static_cast<uint32_t>(peer), link->wants_write());
  }
}

void Engine::sleep(const Work* until, Deadline deadline) {
  watch_blocked();
  set_timer();
  {
    std::lock_guard lock(mutex_);
    if (!inbox_.empty() || !requests_.empty()) return;
    sleeping_ = true;
  }
  int timeout_ms = std::min(deadline.remaining_ms(kSleepMs), next_deadline().remaining_ms(kSleepMs));
  if (!lie_down()) timeout_ms = 0;
  const auto& events = poller_.wait(timeout_ms);
  {
    std::lock_guard lock(mutex_);
    sleeping_ = false;
  }
  for (auto& link : links_)
    if (link && link->direct() && !link->broken()) link->channel().after_sleep();
  serve(events);
  settle_failures();
  if (!events.empty() || until == nullptr || !options_.check_interrupt) return;
  if (const auto now = Clock::now(); now - interrupt_check_ >= std::chrono::milliseconds(kSleepMs)) {
    interrupt_check_ = now;
    options_.check_interrupt();
  }
}

// Direct channels are told that this thread is about to sleep. False if something waits in one of them: it is taken in, for
// the driver asks only those of which an operation expects something.
bool Engine::lie_down() {
  bool quiet = true;
  for (auto& link : links_) {
    if (!link || !link->direct() || link->broken() || link->departed()) continue;
    if (link->channel().before_sleep(link->wants_write())) continue;
    quiet = false;
    guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kReceiveBudgetBytes); });
  }
  return quiet;
}

bool Engine::Group::any_running(const std::function<bool(const Slot&)>& look) const {
  return std::any_of(active.begin(), active.end(), look) || std::any_of(nested.begin(), nested.end(), look) ||
         std::any_of(unbound.begin(), unbound.end(), look);
}

Deadline Engine::next_deadline() const {
  Deadline first = Deadline::never();
  for (const GroupPtr& group : doomed_) first = std::min(first, group->doom->end);
  for (const GroupPtr& group : busy_) {
    if (group->doom) continue;
    group->any_running([&](const Slot& slot) {
      first = std::min(first, slot.deadline);
      return false;
    });
  }
  return first;
}

void Engine::check_deadlines() {
  settle_doomed();
  for (const GroupPtr& group : busy_) {
    const Slot* late = nullptr;
    group->any_running([&](const Slot& slot) {
      if (slot.deadline.expired()) late = &slot;
      return late != nullptr;
    });
    if (late != nullptr && !group->doom) fail_later(group->id, explain_timeout(*late));
  }
  settle_failures();
  look_around();
}

}  // namespace ringdp
