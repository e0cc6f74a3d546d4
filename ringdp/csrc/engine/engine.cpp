// Threads and roles: which thread may drive, how operations come in and how waiting ends. The driver's work is in
// progress.cpp.
#include "engine/engine.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "engine/callback_gate.h"

namespace ringdp {
namespace {

constexpr auto kInterruptPeriod = std::chrono::milliseconds(100);
constexpr auto kIdleLookPeriod = std::chrono::milliseconds(250);
constexpr auto kPendingCopiesPeriod = std::chrono::milliseconds(2);
constexpr int64_t kGoodbyeMs = 1000;

}  // namespace

Error forked_error() {
  ErrorContext context;
  context.advice = "start worker processes with 'spawn', or do not call ringdp in them";
  return Error(
      ErrorKind::kState,
      "this process was forked from one that uses ringdp: the connections belong to the parent; " + context.advice,
      context);
}

Engine::Engine(int rank, std::vector<MetPeer> peers, EngineOptions options)
    : rank_(rank),
      options_(std::move(options)),
      links_(peers.size()),
      writing_(peers.size(), 0),
      farewells_(peers.size()),
      losses_(peers.size()) {
  for (MetPeer& peer : peers) peers_.push_back(peer.info);
  if (options_.rate_bytes_per_s > 0) limiter_.emplace(options_.rate_bytes_per_s);
  Link::Events events;
  events.aborted = [this](int from, uint64_t group, const AbortNotice& notice) { on_aborted(from, group, notice); };
  events.mismatched = [this](Link::Disagreement it) { on_mismatched(std::move(it)); };
  events.wanted = [this](int to) { options_.want_connection(to); };
  events.started = [this](uint64_t group, uint64_t sequence) { return find_started(group, sequence); };
  events.departed = [this](int from, const std::string& reason) { on_departed(from, reason); };
  events.asked = [this](int from, uint64_t group, uint64_t sequence) { questions_.push_back({from, group, sequence}); };
  events.answered = [this](int from, uint64_t group, uint64_t sequence, PeerState state) {
    on_answered(from, group, sequence, std::move(state));
  };
  for (MetPeer& peer : peers) {
    int place = peer.info.rank;
    if (place == rank_) continue;
    std::unique_ptr<Channel> channel = peer.channel ? adopt(std::move(peer.channel), place) : nullptr;
    links_[place] = std::make_unique<Link>(peers_[rank_], peer.info, std::move(channel), events, peer.checksums);
    links_[place]->limit_segments(options_.segment_bytes);
    links_[place]->watch_host(options_.host_silence_ms);
  }
}

std::unique_ptr<Channel> Engine::adopt(std::unique_ptr<Channel> channel, int peer) {
  poller_.add(channel->poll_fd(), static_cast<uint32_t>(peer));
  if (int bell = channel->bell_fd(); bell >= 0) poller_.add_bell(bell, static_cast<uint32_t>(peer));
  if (limiter_ && !channel->direct()) channel = std::make_unique<LimitedChannel>(std::move(channel), *limiter_);
  if (options_.wrap_channel) channel = options_.wrap_channel(std::move(channel), peer);
  some_streams_ |= !channel->direct();
  return channel;
}

void Engine::connect(int peer, std::unique_ptr<Channel> channel, bool checksums) {
  run_as_driver([&] {
    Link& link = *links_[peer];
    {
      std::lock_guard lock(mutex_);
      if (closed_ || link.connected() || !link.usable()) return;  // it was given up: the peer sees this connection end
    }
    link.connect(adopt(std::move(channel), peer), checksums);
    guarded(peer, [](Link& it) { return it.pump_send(); });
  });
}

void Engine::cannot_connect(int peer, const Error& error, bool gone) {
  run_as_driver([&] {
    Link& link = *links_[peer];
    {
      std::lock_guard lock(mutex_);
      if (closed_ || link.connected() || !link.usable()) return;
    }
    losses_[peer] = error;
    if (gone) {
      link.give_up();
      on_departed(peer, error.context().cause);
    } else {
      link.close();
      for (const GroupPtr& group : groups_with(peer)) queue_failure(group->id, error);
    }
    report_failures();
  });
}

void Engine::check_usable() const {
  if (closed_) throw Error(ErrorKind::kState, "this process group was shut down");
}

uint64_t Engine::add_group(uint64_t key, const GroupView& view, const std::string& name) {
  if (fork_generation() != generation_) throw forked_error();
  std::lock_guard lock(mutex_);
  check_usable();
  auto group = std::make_shared<Group>();
  group->id = hash_mix(key, ++made_[key]);
  group->view = view;
  group->name = name;
  if (auto early = early_failures_.extract(group->id)) group->failure = early.mapped();
  if (options_.want_connection) {
    for (int place : overlay_neighbours(view.rank, view.size)) group->neighbours.push_back(view.members[place]);
    for (int member : group->neighbours) options_.want_connection(member);
  }
  groups_[group->id] = group;
  return group->id;
}

void Engine::remove_group(uint64_t id, const std::string& how) {
  if (fork_generation() != generation_) return;
  run_as_driver([this, id, &how] {
    GroupPtr group = find_group(id);
    if (!group) return;
    take_inbox();
    bool in_flight = !group->idle();
    Error error(ErrorKind::kState, "the process group was " + how + " on rank " + std::to_string(rank_) +
                                       " while operations were in flight");
    if (in_flight) fail_group(*group, error, notice_of(error));
    for (int member : group->view.members)
      if (links_[member]) links_[member]->discard_group(id);
    std::lock_guard lock(mutex_);
    groups_.erase(id);
  });
}

std::shared_ptr<Work> Engine::submit(uint64_t group_id, Submission submission) {
  if (fork_generation() != generation_) throw forked_error();
  std::lock_guard lock(mutex_);
  check_usable();
  auto found = groups_.find(group_id);
  if (found == groups_.end()) throw Error(ErrorKind::kState, "this process group was destroyed");
  Group& group = *found->second;
  if (group.failure) std::rethrow_exception(group.failure);
  called_at_ = Clock::now();
  FlowIdentity& identity = submission.operation->mutable_identity();
  InFlight in_flight;
  if (submission.operation->point_to_point() != nullptr) {
    identity.sequence = kMessageBit;  // numbered when it meets its other end
  } else if (auto nested = CompletionQueue::nested_key(group_id)) {
    identity.sequence = nested->sequence;
    in_flight.callback = nested->callback;
  } else {
    identity.sequence = ++group.next_sequence;
  }
  if (auto gate = CallbackGate::current(); gate && submission.on_done)
    submission.on_done = [gate, follows = std::move(submission.on_done)](std::exception_ptr error) {
      gate->wait();
      follows(std::move(error));
    };
  in_flight.work = std::make_shared<Work>(group_id, identity.sequence, CompletionQueue::issuing_lane(), identity.text(),
                                          std::move(submission.on_done));
  in_flight.operation = std::move(submission.operation);
  in_flight.keep_alive = std::move(submission.keep_alive);
  in_flight.deadline = Deadline::after_ms(submission.timeout_ms);
  in_flight.timeout_ms = submission.timeout_ms;
  std::shared_ptr<Work> work = in_flight.work;
  inbox_.emplace_back(found->second, std::move(in_flight));
  ++unfinished_;
  if (driving_) {
    if (sleeping_) poller_.wake();
  } else if (!submission.caller_waits) {
    work_to_do_.notify_one();
  }
  return work;
}

void Engine::take_role(std::unique_lock<std::mutex>& lock) {
  driving_ = true;
  driver_ = std::this_thread::get_id();
  lock.unlock();
}

void Engine::leave_role(std::unique_lock<std::mutex>& lock) {
  bool flushing = anything_outgoing(), copies_pending = !pending_copies_.empty();
  lock.lock();
  driving_ = false;
  driver_ = {};
  flushing_ = flushing;
  copies_began_ |= copies_pending && !copies_pending_;
  copies_pending_ = copies_pending;
  if (unfinished_ > 0 || flushing_ || copies_began_) work_to_do_.notify_one();
  if (waiting_ > 0) waiters_.notify_all();
}

void Engine::wait(Work& work, Deadline deadline) {
  if (fork_generation() != generation_) throw forked_error();
  if (!work.finished()) {
    std::unique_lock lock(mutex_);
    while (!work.finished()) {
      if (!driving_) {
        take_role(lock);
        try {
          drive(&work, deadline, options_.spin_us);
        } catch (...) {
          leave_role(lock);
          throw;
        }
        leave_role(lock);
      } else {
        ++waiting_;
        auto status = waiters_.wait_for(
            lock, std::min<Clock::duration>(kInterruptPeriod, std::chrono::milliseconds(deadline.remaining_ms(100))));
        --waiting_;
        if (status == std::cv_status::timeout && options_.check_interrupt) {
          lock.unlock();
          options_.check_interrupt();
          lock.lock();
        }
      }
      if (!work.finished() && deadline.expired()) {
        ErrorContext context;
        peers_[rank_].fill_self(context);
        context.operation = work.text();
        throw Error(ErrorKind::kTimeout,
                    work.text() + ": wait Timed out on rank " + std::to_string(rank_) + "; the operation goes on",
                    context);
      }
    }
  }
  std::shared_ptr<void> buffers;  // dropped without the lock
  {
    std::lock_guard lock(mutex_);
    buffers = std::move(work.buffers_);
  }
  if (work.failed()) std::rethrow_exception(work.error());
}

// Runs `action` while no other thread touches the links: at once if no thread drives, else in the driver's next round.
void Engine::run_as_driver(const std::function<void()>& action) {
  std::unique_lock lock(mutex_);
  if (driving_ && driver_ == std::this_thread::get_id()) {  // a signal handler that runs while this thread waits
    lock.unlock();
    return action();
  }
  if (!driving_) {
    take_role(lock);
    try {
      action();
    } catch (...) {
      leave_role(lock);
      throw;
    }
    return leave_role(lock);
  }
  bool done = false;
  std::exception_ptr failure;
  requests_.push_back([&] {
    try {
      action();
    } catch (...) {
      failure = std::current_exception();
    }
    std::lock_guard inner(mutex_);
    done = true;
    waiters_.notify_all();
  });
  if (sleeping_) poller_.wake();
  ++waiting_;
  while (!done) {
    if (!driving_) {  // the driver left without seeing the request
      take_role(lock);
      take_inbox();
      leave_role(lock);
      continue;
    }
    waiters_.wait(lock);
  }
  --waiting_;
  lock.unlock();
  if (failure) std::rethrow_exception(failure);
}

void Engine::finish(InFlight& in_flight, std::exception_ptr error) {
  std::shared_ptr<Work> work = std::move(in_flight.work);
  auto on_done = std::move(work->on_done_);
  // The last holder of a tensor may need Python's lock, for which the driver must never wait. So a completion thread drops
  // the buffers, or the thread that waits for the work.
  std::shared_ptr<Staging> staging = in_flight.operation->staging();
  in_flight.operation.reset();
  std::shared_ptr<void> buffers = std::move(in_flight.keep_alive);
  if (staging) {
    --staged_;
    pending_copies_.wait_for(std::move(staging), buffers);
  }
  {
    std::lock_guard lock(mutex_);
    work->finish(error, on_done ? nullptr : std::move(buffers));
    --unfinished_;
    if (waiting_ > 0) waiters_.notify_all();
  }
  const int lane = work->lane();
  const uint64_t group = work->group(), sequence = work->sequence();
  if (on_done) {
    completions_.push(lane, group, sequence,
                      [on_done = std::move(on_done), error, buffers = std::move(buffers)] { on_done(error); });
  } else if (work.use_count() == 1) {  // no thread waits for it any more
    completions_.push(lane, group, sequence, [work = std::move(work)] {});
  }
}

// Also looks at the links now and then while nothing is in flight: a peer may ask something, say goodbye or be gone.
void Engine::run_communication_thread() {
  std::unique_lock lock(mutex_);
  for (;;) {
    auto busy = [this] { return unfinished_ > 0 || flushing_; };
    auto wanted = [&] { return stopping_ || (!driving_ && (busy() || copies_began_)); };
    bool idle =
        !work_to_do_.wait_for(lock, copies_pending_ && !driving_ ? kPendingCopiesPeriod : kIdleLookPeriod, wanted);
    if (stopping_) return;
    if (std::exchange(copies_began_, false) && !busy()) continue;  // from now on by the shorter period
    if (driving_) {
      look_due_.store(true, std::memory_order_relaxed);
      continue;
    }
    take_role(lock);
    try {
      idle ? look_while_idle() : drive(nullptr, Deadline::never(), 0);
    } catch (const std::exception& error) {
      notices_.post(LogLevel::kError, std::string("the communication thread failed: ") + error.what());
      failures_.clear();
      Error failure(ErrorKind::kSystem, error.what());
      for (const GroupPtr& group : std::vector<GroupPtr>(busy_)) fail_group(*group, failure, notice_of(failure));
    }
    leave_role(lock);
  }
}

void Engine::abort(const std::string& why) {
  if (fork_generation() != generation_) return;
  run_as_driver([&] {
    take_inbox();
    std::vector<GroupPtr> all;
    {
      std::lock_guard lock(mutex_);
      for (auto& [id, group] : groups_) all.push_back(group);
    }
    Error failure(ErrorKind::kState, why);
    for (const GroupPtr& group : all) fail_group(*group, failure, notice_of(failure));
    for (auto& link : links_)
      if (link) guarded(link->peer().rank, [](Link& it) { return it.pump_send(); });
  });
}

void Engine::set_farewell(const std::string& reason) {
  std::lock_guard lock(mutex_);
  farewell_ = reason;
}

void Engine::shut_down() {
  if (fork_generation() != generation_) return;
  run_as_driver([this] {
    take_inbox();
    Error failure(ErrorKind::kState, "rank " + std::to_string(rank_) + " shut down while operations were in flight");
    for (const GroupPtr& group : std::vector<GroupPtr>(busy_)) fail_group(*group, failure, notice_of(failure));
    std::string reason;
    {
      std::lock_guard lock(mutex_);
      reason = farewell_;
    }
    for (auto& link : links_)
      if (link) link->send_bye(reason);  // who is not connected sees that nothing listens here
    // A peer that does not read must not keep this rank from leaving.
    Deadline deadline = Deadline::after_ms(kGoodbyeMs);
    while (anything_outgoing() && !deadline.expired()) {
      bool moved = false;
      for (auto& link : links_)
        if (link && link->has_outgoing()) moved |= guarded(link->peer().rank, [](Link& it) { return it.pump_send(); });
      if (!moved) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (auto& link : links_) {
      if (!link || !link->connected()) continue;
      guarded(link->peer().rank, [](Link& it) { return it.pump_receive(kEagerWindowBytes); });
      if (link->connected()) link->channel().close_send();
    }
    auto drained = [](auto& link) { return !link || link->drained(); };
    while (!std::all_of(links_.begin(), links_.end(), drained) && !deadline.expired())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    while (!pending_copies_.empty() && !deadline.expired()) {
      look_at_copies();
      if (!pending_copies_.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    // A Work that the caller keeps keeps this engine too, perhaps for long: the descriptors are closed now.
    for (auto& link : links_)
      if (link) link->close();
    std::lock_guard lock(mutex_);
    poller_.close();
    closed_ = true;
    stopping_ = true;
    work_to_do_.notify_all();
  });
}

uint64_t Engine::bytes_sent() const {
  uint64_t sum = 0;
  for (const auto& link : links_) sum += link ? link->bytes_sent() : 0;
  return sum;
}

uint64_t Engine::bytes_sent_to(int peer) const {
  const auto& link = links_.at(static_cast<std::size_t>(peer));
  return link ? link->bytes_sent() : 0;
}

uint64_t Engine::bytes_received() const {
  uint64_t sum = 0;
  for (const auto& link : links_) sum += link ? link->bytes_received() : 0;
  return sum;
}

}  // namespace ringdp
