#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"
#include "engine/completion.h"

namespace ringdp {
namespace {

constexpr int kInterruptMs = 100;
constexpr int64_t kGoodbyeMs = 1000;

using std::chrono::milliseconds;

constexpr milliseconds kUnread{400};  // an idle engine looks at its links four times a second
constexpr milliseconds kUnsent{1000};

milliseconds patience_with(Link& link, int64_t heal_ms) {
  if (link.healing()) return milliseconds(heal_ms);
  return link.has_outgoing() || !link.drained() ? kUnsent : link.repair().possible() ? kUnread : milliseconds(0);
}

void say_goodbye(PeerLinks& links, const std::string& reason) {
  for (auto& link : links.all())
    if (link) link->send_bye(reason);  // a rank without a connection sees that nothing listens here
  links.send_all();
}

// Whether every peer has read the goodbye and all bytes before it, or has ended. It does not wait long for a peer whose
// connection is intact and whose host has acknowledged all bytes, since it may be stopped. `heal_ms`: how long
// replacing a connection may take.
bool parted(const PeerLinks& links, Clock::time_point since, int64_t heal_ms) {
  const auto waited = Clock::now() - since;
  const auto all = links.all();
  return std::all_of(all.begin(), all.end(), [&](auto& link) {
    if (!link || !link->usable() || (!link->connected() && !link->healing())) return true;
    return waited >= patience_with(*link, heal_ms);
  });
}

// Returns at the deadline at the latest.
void end_connections(PeerLinks& links, Deadline deadline) {
  // A peer that does not read must not keep this rank from leaving.
  while (links.anything_outgoing() && !deadline.expired())
    if (!links.send_all()) std::this_thread::sleep_for(milliseconds(1));
  for (auto& link : links.all()) {
    if (!link || !link->connected()) continue;
    links.guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kEagerWindowBytes); });
    if (link->connected()) link->channel().close_send();
  }
  const auto all = links.all();
  auto drained = [](auto& link) { return !link || link->drained(); };
  while (!std::all_of(all.begin(), all.end(), drained) && !deadline.expired())
    std::this_thread::sleep_for(milliseconds(1));
}

void check_usable(const DriverRole& role) RINGDP_REQUIRES(role.mutex()) {
  if (role.closed()) throw Error(ErrorKind::kState, "this process group was shut down");
}

}  // namespace

Error forked_error() {
  ErrorContext context;
  context.advice = "start worker processes with 'spawn', or do not call ringdp in them";
  return Error(
      ErrorKind::kState,
      "this process was forked from one that uses ringdp: the connections belong to the parent; " + context.advice,
      context);
}

Engine::Engine(int rank, std::vector<MeshPeer> peers, EngineOptions options)
    : options_(std::move(options)),
      recorder_(static_cast<int>(peers.size()) - 1),
      diagnosis_(recorder_, notices_, options_.dump_folder),
      role_(poller_, watcher_,
            [this](bool watched) {
              const bool bytes_there = watched && !links_.before_sleep();
              const bool soon = copies_.under_way() || !failures_.next_deadline().is_never();
              return DriverRole::Leftover{links_.anything_outgoing() || bytes_there, soon};
            }),
      groups_(role_),
      threads_(role_),
      links_(rank, std::move(peers), options_, role_, {&poller_, &watcher_}, link_events(),
             {.lost = [this](int peer, const Error& error) { failures_.on_lost(peer, error); },
              .broken = [this](int peer, const ConnectionBroken& error) { healing_.on_broken(peer, error); },
              .silent = [this](int peer) { healing_.on_silent(peer); }}),
      failures_(
          role_, groups_, links_, options_.listen_ms,
          [this](GroupState& group, const std::exception_ptr& failure, uint64_t cause) {
            progress_.end_operations(group, failure, cause);
          },
          [this](const GroupState& group, const Error& error, uint64_t cause) {
            diagnosis_.note_failure(group.id, error, cause);
          }),
      healing_(role_, links_, failures_, notices_, options_),
      stalls_(role_, groups_, threads_, links_, notices_, diagnosis_, options_.stall_notice_ms),
      copies_(role_, groups_, failures_, completions_,
              [this](GroupState& group, InFlight& it) { progress_.start(group, it); }),
      progress_(role_, poller_, groups_, links_, failures_, stalls_, copies_, completions_, recorder_, options_) {
  diagnosis_.start(links_.peers().self(), links_.peers().world());
}

LinkEvents Engine::link_events() {
  LinkEvents events;
  events.aborted = [this](int from, uint64_t group, const AbortNotice& notice) {
    failures_.on_aborted(from, group, notice);
  };
  events.mismatched = [this](Disagreement it) {
    it.beside = stalls_.several_callers(it.mine.group);
    failures_.on_mismatched(std::move(it));
  };
  events.wanted = [this](int to) { options_.want_connection(to); };
  events.started = [this](uint64_t id, uint64_t sequence) {
    const GroupPtr group = groups_.find(id);
    return group ? group->find_started(sequence) : StartedOperation{};
  };
  events.departed = [this](int from, const std::string& reason) { failures_.on_departed(from, reason); };
  events.asked = [this](int from, uint64_t group, uint64_t sequence, bool with_stacks) {
    stalls_.on_asked(from, group, sequence, with_stacks);
  };
  events.on_stacks = [this](int from, uint64_t group, uint64_t sequence, const std::string& stacks) {
    stalls_.on_stacks(from, group, sequence, stacks);
  };
  events.answered = [this](int from, uint64_t group, uint64_t sequence, const PeerState& state) {
    if (!failures_.on_named(from, group, sequence, state.name)) stalls_.on_answered(from, group, sequence, state);
  };
  return events;
}

uint64_t Engine::add_group(uint64_t key, const GroupView& view, const std::string& name, bool outlives_losses) {
  if (fork_generation() != generation_) throw forked_error();
  std::vector<int> neighbours;
  if (options_.want_connection)
    for (int place : overlay_neighbours(view.rank, view.size)) neighbours.push_back(view.members[place]);
  GroupPtr group;
  {
    MutexLock lock(role_.mutex());
    check_usable(role_);
    group = groups_.add(key, view, std::move(neighbours), name);
    group->outlives_losses = outlives_losses;
    recorder_.add_group(group->id, name, view.members);
  }
  for (int member : group->neighbours) options_.want_connection(member);
  return group->id;
}

void Engine::remove_group(uint64_t id, const std::string& how) {
  if (fork_generation() != generation_) return;
  role_.run([this, id, &how] {
    GroupPtr group = groups_.find(id);
    if (!group) return;
    progress_.take_inbox();
    const bool in_flight = !group->idle();
    const Error error(ErrorKind::kState, "the process group was " + how + " on rank " + std::to_string(rank()) +
                                             " while operations were in flight");
    if (in_flight && group->outlives_losses)
      failures_.leave({group}, error, "its process group was " + how);  // the job continues without this rank
    else if (in_flight)
      failures_.fail(*group, error);
    links_.discard_group(id, group->view.members);
    groups_.remove(id);
    recorder_.remove_group(id);
  });
}

std::shared_ptr<Work> Engine::submit(uint64_t group_id, Submission submission) {
  if (fork_generation() != generation_) throw forked_error();
  MutexLock lock(role_.mutex());
  check_usable(role_);
  if (broken_) throw *broken_;
  const GroupPtr group = groups_.find(group_id);
  if (!group) throw Error(ErrorKind::kState, "this process group was destroyed");
  if (auto failure = groups_.failure_of(*group); failure && !group->outlives_losses) std::rethrow_exception(failure);
  const Clock::time_point now = Clock::now();
  stalls_.note_call(now);
  FlowIdentity& identity = submission.operation->mutable_identity();
  InFlight in_flight;
  if (submission.operation->point_to_point() != nullptr) {
    identity.sequence = kMessageBit;  // numbered when its other end is known
  } else if (auto nested = CompletionQueue::nested_key(group_id)) {
    identity.sequence = nested->sequence;
    in_flight.callback = nested->callback;
  } else {
    identity.sequence = groups_.next_sequence(*group);
    threads_.note_call(*group, identity.sequence);
  }
  if (auto gate = CallbackGate::current(); gate && submission.on_done)
    submission.on_done = [gate, follows = std::move(submission.on_done)](std::exception_ptr error) {
      gate->wait();
      follows(std::move(error));
    };
  in_flight.work = std::make_shared<Work>(group_id, identity.sequence, CompletionQueue::issuing_lane(), identity.text(),
                                          std::move(submission.on_done));
  in_flight.moved_at = in_flight.asked_at = now;
  if (!group->rests) in_flight.record = recorder_.begin(group_id, identity, now, submission.call_site);
  in_flight.rests = group->rests && submission.operation->point_to_point() != nullptr &&
                    !submission.operation->point_to_point()->sends;
  in_flight.operation = std::move(submission.operation);
  in_flight.keep_alive = std::move(submission.keep_alive);
  in_flight.deadline = group->rests ? Deadline::never() : Deadline::after_ms(submission.timeout_ms, now);
  in_flight.timeout_ms = submission.timeout_ms;
  std::shared_ptr<Work> work = in_flight.work;
  progress_.submit(group, std::move(in_flight), submission.caller_waits);
  return work;
}

void Engine::wait(Work& work, Deadline deadline) {
  if (fork_generation() != generation_) throw forked_error();
  if (!work.finished()) {
    MutexLock lock(role_.mutex());
    std::optional<ProgramThreads::Waiting> waiting;
    if (deadline.is_never()) waiting.emplace(threads_, lock, work);
    while (!work.finished()) {
      drive_until(lock, [&work] { return work.finished(); }, deadline);
      if (!work.finished() && deadline.expired()) {
        ErrorContext context;
        links_.peers().self().fill_self(context);
        context.operation = work.text();
        throw Error(ErrorKind::kTimeout,
                    work.text() + ": wait Timed out on rank " + std::to_string(rank()) + "; the operation goes on",
                    context);
      }
    }
  }
  std::shared_ptr<void> buffers;  // dropped without the lock
  {
    MutexLock lock(role_.mutex());
    buffers = std::move(work.buffers_);
  }
  if (work.failed()) std::rethrow_exception(work.error());
}

// Once, or waits for the thread that drives.
void Engine::drive_until(MutexLock& lock, const Progress::Over& over, Deadline deadline) {
  if (!role_.held()) {
    role_.drive(lock, [&] {
      try {
        progress_.drive(over, deadline, options_.spin_us);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kSystem) throw;
        break_down(error.what());
      } catch (const std::bad_alloc& error) {
        break_down(error.what());
      }
    });
  } else if (!role_.wait_for_change(lock, std::chrono::milliseconds(deadline.remaining_ms(kInterruptMs))) &&
             options_.check_interrupt) {
    lock.unlock();
    options_.check_interrupt();
    lock.lock();
  }
}

bool Engine::wait_until(const Progress::Over& over, Deadline deadline) {
  if (fork_generation() != generation_) throw forked_error();
  MutexLock lock(role_.mutex());
  while (!over()) {
    if (role_.closed() || broken_ || deadline.expired()) return false;
    drive_until(lock, over, deadline);
  }
  return true;
}

void Engine::move_on() {
  if (fork_generation() != generation_) throw forked_error();
  MutexLock lock(role_.mutex());
  if (role_.held())
    role_.wake();
  else if (!role_.closed())
    role_.drive(lock, [this] { progress_.move_on(); });
}

void Engine::run_communication_thread() {
  MutexLock lock(role_.mutex());
  for (;;) {
    const DriverRole::Turn turn = role_.wait_for_turn(lock);
    if (turn == DriverRole::Turn::kEnd) return;
    role_.drive(lock, [&] {
      try {
        switch (turn) {
          case DriverRole::Turn::kLook:
            return progress_.look_at_all();
          case DriverRole::Turn::kWatch:
            return progress_.look_for_events();
          default:
            return progress_.drive(nullptr, Deadline::never(), 0);
        }
      } catch (const std::exception& error) {
        break_down(error.what());
      }
    });
    if (broken_) return role_.stop_watching();
    if (turn == DriverRole::Turn::kWatch) role_.watch(lock);
  }
}

// All groups fail, the peers get this rank's error, and no operation starts any more.
void Engine::break_down(const std::string& why) {
  const PeerInfo& self = links_.peers().self();
  ErrorContext context;
  self.fill_self(context);
  context.cause = why;
  const Error error(ErrorKind::kSystem, self.text() + ": its communication has failed: " + why, context);
  notices_.post(LogLevel::kError, error.what());
  {
    MutexLock lock(role_.mutex());
    broken_ = error;
  }
  progress_.take_inbox();
  failures_.forget_queued();
  failures_.end_by(groups_.all(), error);
  say_goodbye(links_, error.what());
  end_connections(links_, Deadline::after_ms(kGoodbyeMs));
  links_.close();
  failures_.forget_queued();
}

void Engine::listen(uint64_t id, std::weak_ptr<const FailureListener> listener) { groups_.listen(id, listener); }

std::vector<int> Engine::unreachable(const std::vector<int>& places) {
  if (fork_generation() != generation_) throw forked_error();
  std::vector<int> found;
  role_.run([&] {
    progress_.look_at_all();
    for (const int place : places)
      if (const Link* link = links_[place]; link != nullptr && !link->usable()) found.push_back(place);
  });
  return found;
}

void Engine::let_rest(uint64_t id) {
  if (const GroupPtr group = groups_.find(id)) group->rests = true;
}

std::exception_ptr Engine::failure_of(uint64_t id) const {
  const GroupPtr group = groups_.find(id);
  return group ? groups_.failure_of(*group) : nullptr;
}

std::map<int, NetworkPath::Carried> Engine::carried() {
  std::map<int, NetworkPath::Carried> found;
  if (fork_generation() == generation_) role_.run([&] { found = carried_by(links_); });
  return found;
}

void Engine::abort(const std::string& why) {
  if (fork_generation() != generation_) return;
  role_.run([&] {
    progress_.take_inbox();
    failures_.fail_all(groups_.all(), Error(ErrorKind::kState, why));
    links_.send_all();
  });
}

void Engine::set_farewell(const std::string& reason) {
  MutexLock lock(role_.mutex());
  farewell_ = reason;
}

void Engine::set_farewell_if_none(const std::string& reason) {
  MutexLock lock(role_.mutex());
  if (farewell_.empty()) farewell_ = reason;
}

void Engine::say_bye() {
  progress_.take_inbox();
  std::string reason;
  {
    MutexLock lock(role_.mutex());
    reason = farewell_;
  }
  Error failure(ErrorKind::kState, "rank " + std::to_string(rank()) + " shut down while operations were in flight");
  failures_.leave(std::vector<GroupPtr>(groups_.busy()), failure, reason);
  say_goodbye(links_, reason);
}

void Engine::take_leave() {
  if (fork_generation() != generation_) return;
  bool over = false;
  role_.run([&] {
    {
      MutexLock lock(role_.mutex());
      over = role_.closed();
    }
    if (over) return;
    say_bye();
  });
  const int64_t heal_ms = options_.heal_connection ? options_.heal_ms : 0;
  for (const auto since = Clock::now(); !over;) {
    role_.run([&] {
      links_.receive_all();
      links_.send_all();
      failures_.report();
      over = parted(links_, since, heal_ms);
    });
    if (!over) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void Engine::shut_down() {
  if (fork_generation() != generation_) return;
  role_.run([this] {
    say_bye();  // unless that was done; operations submitted meanwhile fail
    Deadline deadline = Deadline::after_ms(kGoodbyeMs);
    end_connections(links_, deadline);
    while (copies_.under_way() && !deadline.expired()) {
      copies_.look();
      if (copies_.under_way()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    // A caller may keep a Work, and with it this engine, for long: the descriptors are closed now.
    links_.close();
    MutexLock lock(role_.mutex());
    role_.close(lock);
  });
  diagnosis_.stop();
  diagnosis_.join();
}

}  // namespace ringdp
