#include "engine/stall_monitor.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "base/process_stacks.h"
#include "base/text.h"

namespace ringdp {
namespace {

constexpr auto kLookPeriod = std::chrono::milliseconds(50);
constexpr int64_t kAskMs = 1000;           // at most how often peers get a ping about an operation that does not move
constexpr int64_t kDeadlockMs = 10'000;    // without notices: when a deadlock becomes an error
constexpr int64_t kSilentMs = 1000;        // a living engine answers sooner, even if its program is stuck
constexpr std::size_t kWatchedNested = 4;  // of a group's operations inside callbacks
constexpr int64_t kStacksMs = 1500;        // for a rank to answer with its stacks; a notice waits for them that long
constexpr std::size_t kMostStacks = 4;     // missing ranks that are asked for stacks
constexpr std::size_t kMostExplained = 8;  // of the others a text has the number
// of reports forwarded from rank to rank: twice the distance across 256 ranks
constexpr int kMostHops = 16;

int64_t ms_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(to - from).count();
}

std::string seconds(int64_t ms) {
  char text[32];
  std::snprintf(text, sizeof(text), ms < 10'000 ? "%.1f s" : "%.0f s", static_cast<double>(ms) / 1000.0);
  return text;
}

std::string last_call(const PeerState& state) {
  std::string out = state.last.empty() ? "it has called nothing in this group" : "its last one here was " + state.last;
  if (state.since_call_ms >= 0) out += ", its last call " + seconds(state.since_call_ms) + " ago";
  if (!state.elsewhere.empty()) out += "; it is in " + state.elsewhere;
  return out;
}

// Whether the operation cannot end before that rank has called it.
bool needs_call_of(const InFlight& in_flight, const GroupState& group, int rank) {
  const std::vector<int> missing = in_flight.operation->missing();
  const std::vector<int>& members = group.view.members;
  const Collective kind = in_flight.operation->identity().shape.what;
  const bool of_all = !missing.empty() && (kind == Collective::kBarrier || kind == Collective::kAllReduce);
  const std::vector<int>& needed = of_all ? members : missing;
  return std::find(needed.begin(), needed.end(), rank) != needed.end();
}

std::string in_group(const std::string& operation, const GroupState& group) {
  return operation + " of group '" + group.name + "'";
}

}  // namespace

StallMonitor::StallMonitor(DriverRole& role, const GroupTable& groups, const ProgramThreads& threads, PeerLinks& links,
                           NoticeBoard& notices, Diagnosis& diagnosis, int64_t notice_ms)
    : role_(role),
      groups_(groups),
      threads_(threads),
      links_(links),
      peers_(links.peers()),
      notices_(notices),
      diagnosis_(diagnosis),
      notice_ms_(notice_ms) {}

void StallMonitor::look(Clock::time_point now) {
  role_.assert_held();
  if (now < next_look_) return;
  next_look_ = now + kLookPeriod;
  for (const GroupPtr& group : groups_.busy()) {
    if (group->failing || group->rests) continue;
    if (!group->active.empty()) watch(*group, group->active.front(), now);
    for (std::size_t i = 0; i < std::min(group->nested.size(), kWatchedNested); ++i)
      if (group->in_the_way(group->nested[i]) == nullptr) watch(*group, group->nested[i], now);
    if (!group->unbound.empty()) watch(*group, group->unbound.front(), now);
  }
}

void StallMonitor::watch(GroupState& group, InFlight& in_flight, Clock::time_point now) {
  if (uint64_t progress = in_flight.operation->progress(); progress != in_flight.progress) {
    in_flight.progress = progress;
    in_flight.moved_at = in_flight.asked_at = now;
    in_flight.answers.clear();
    in_flight.stacks.clear();
    return;
  }
  int64_t ask_ms = std::min(in_flight.timeout_ms / 8, notice_ms_ > 0 ? notice_ms_ / 4 : kAskMs);
  if (ms_between(in_flight.asked_at, now) >= std::clamp<int64_t>(ask_ms, 50, kAskMs))
    ask_members(group, in_flight, now);
  int64_t stalled_ms = ms_between(in_flight.moved_at, now);
  if (stalled_ms >= std::min(notice_ms_ > 0 ? notice_ms_ : kDeadlockMs, in_flight.timeout_ms / 2) &&
      find_deadlock(group, in_flight))
    return;
  if (notice_ms_ == 0 || stalled_ms < notice_ms_ || ms_between(group.noticed_at, now) < notice_ms_) return;
  std::vector<MissingRank> missing = find_missing(in_flight);
  auto pending = [&](const auto& answer) { return answer.second.awaited; };
  if (missing.empty() && std::any_of(in_flight.answers.begin(), in_flight.answers.end(), pending))
    return;  // the answers will come soon
  if (await_stacks(group, in_flight, missing, now)) return;
  group.noticed_at = now;
  const std::string notice = peers_.self().text() + " has waited " + seconds(stalled_ms) + " in " +
                             in_flight.work->text() + "\nfor " + explain_wait(in_flight, missing, "\nand ");
  notices_.post(LogLevel::kWarning, notice);
  log_stacks(in_flight, notice);
}

bool StallMonitor::await_stacks(const GroupState& group, InFlight& in_flight, const std::vector<MissingRank>& missing,
                                Clock::time_point now) {
  bool awaited = false;
  for (std::size_t i = 0; i < std::min(missing.size(), kMostStacks); ++i) {
    const int peer = missing[i].rank;
    Link* link = links_[peer];
    const auto answer = in_flight.answers.find(peer);
    if (link == nullptr || !link->usable() || !link->connected()) continue;
    if (answer == in_flight.answers.end() || !answer->second.state) continue;
    // its process is stopped
    if (answer->second.awaited && ms_between(answer->second.asked_at, now) >= kSilentMs) continue;
    PeerStacks& stacks = in_flight.stacks[peer];
    if (stacks.asked_at <= group.noticed_at) {
      stacks = {now, ""};
      link->send_ping(group.id, in_flight.sequence(), true);
    }
    awaited |= stacks.text.empty() && ms_between(stacks.asked_at, now) < kStacksMs;
  }
  return awaited;
}

void StallMonitor::log_stacks(const InFlight& in_flight, const std::string& notice) {
  std::string text;
  for (const auto& [peer, stacks] : in_flight.stacks)
    if (!stacks.text.empty()) text += "\nThe threads of " + peers_.info(peer).text() + ":\n" + stacks.text;
  if (text.empty()) return;
  const std::time_t now = std::time(nullptr);
  char when[32] = "";
  struct tm parts{};
  if (localtime_r(&now, &parts) != nullptr) std::strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S ", &parts);
  diagnosis_.log_stall(when + notice + text + "\n");
}

void StallMonitor::on_stacks(int peer, uint64_t group_id, uint64_t sequence, const std::string& stacks) {
  role_.assert_held();
  const GroupPtr group = groups_.find(group_id);
  if (!group) return;
  auto take = [&](InFlight& in_flight) {
    const auto asked = in_flight.stacks.find(peer);
    if (in_flight.sequence() != sequence || asked == in_flight.stacks.end()) return;
    std::string text;  // line by line, which clean_text would join
    for (std::size_t at = 0; at < stacks.size();) {
      const std::size_t end = std::min(stacks.find('\n', at), stacks.size());
      text += clean_text(std::string_view(stacks).substr(at, end - at), kStacksBytes) + "\n";
      at = end + 1;
    }
    asked->second.text = text.empty() ? "(it knows none)\n" : std::move(text);
  };
  for (InFlight& in_flight : group->active) take(in_flight);
  for (InFlight& in_flight : group->nested) take(in_flight);
  for (InFlight& in_flight : group->unbound) take(in_flight);
}

// Asks all connected members, not only those that it waits for directly, which may themselves wait for others.
void StallMonitor::ask_members(const GroupState& group, InFlight& in_flight, Clock::time_point now) {
  in_flight.asked_at = now;
  for (int member : group.view.members) {
    Link* link = links_[member];
    if (link == nullptr || !link->usable() || !link->connected()) continue;
    auto [answer, first] = in_flight.answers.try_emplace(member);
    if (!first && answer->second.awaited) continue;
    answer->second.asked_at = now;
    answer->second.awaited = true;
    link->send_ping(group.id, in_flight.sequence());
  }
}

void StallMonitor::on_answered(int peer, uint64_t group_id, uint64_t sequence, const PeerState& state) {
  role_.assert_held();
  GroupPtr group = groups_.find(group_id);
  if (!group) return;
  auto take = [&](InFlight& in_flight) {
    if (in_flight.sequence() != sequence) return;
    auto answer = in_flight.answers.find(peer);
    if (answer == in_flight.answers.end()) return;
    answer->second.awaited = false;
    answer->second.state = state;
  };
  for (InFlight& in_flight : group->active) take(in_flight);
  for (InFlight& in_flight : group->nested) take(in_flight);
  for (InFlight& in_flight : group->unbound) take(in_flight);
}

void StallMonitor::on_asked(int peer, uint64_t group, uint64_t sequence, bool with_stacks) {
  role_.assert_held();
  pings_.push_back({peer, group, sequence});
  if (with_stacks) answer_with_stacks(pings_.back());
}

// On the diagnosis's thread, since Python may be stuck and the driver must not wait. The driver sends the answer in
// its next round.
void StallMonitor::answer_with_stacks(const Ping& ping) {
  diagnosis_.run([this, ping] {
    std::string stacks = process_stacks();
    MutexLock lock(role_.mutex());
    stacks_.emplace_back(ping, std::move(stacks));
    stacks_there_.store(true, std::memory_order_relaxed);
  });
}

void StallMonitor::answer() {
  role_.assert_held();
  if (stacks_there_.load(std::memory_order_relaxed)) send_stacks();
  if (pings_.empty()) return;
  std::vector<Ping> asked;
  asked.swap(pings_);
  for (const Ping& it : asked)
    links_[it.peer]->send_pong(it.group, it.sequence, state_of(it.peer, it.group, it.sequence).encode());
}

void StallMonitor::send_stacks() {
  std::vector<std::pair<Ping, std::string>> found;
  {
    MutexLock lock(role_.mutex());
    found.swap(stacks_);
    stacks_there_.store(false, std::memory_order_relaxed);
  }
  for (const auto& [it, stacks] : found)
    if (Link* link = links_[it.peer]; link != nullptr && link->usable() && link->connected())
      link->send_pong(it.group, it.sequence, stacks, true);
}

PeerState StallMonitor::state_of(int asker, uint64_t group_id, uint64_t sequence) const {
  PeerState state;
  GroupPtr group = groups_.find(group_id);
  if (const auto called_at = called_at_.load(std::memory_order_relaxed); called_at != 0)
    state.since_call_ms = ms_between(Clock::time_point(Clock::duration(called_at)), Clock::now());
  for (const GroupPtr& other : groups_.busy()) {
    const InFlight* in_flight = other->oldest();
    if (other == group || other->rests || in_flight == nullptr) continue;
    state.elsewhere = in_group(in_flight->work->text(), *other);
    break;
  }
  if (!group) return state;
  state.last = group->last_called();
  {
    MutexLock lock(role_.mutex());
    if (const std::string callers = threads_.several(*group); !callers.empty())
      state.last += ", and several of its threads call this group: " + callers;
  }
  auto running = [&](const InFlight& in_flight) {
    state.progress = PeerState::Progress::kRunning;
    state.waits_for = in_flight.operation->missing();
    state.missing = find_missing(in_flight);
    state.name = in_flight.operation->identity().name;
  };
  auto is_it = [&](const InFlight& in_flight) { return in_flight.sequence() == sequence; };
  state.progress = PeerState::Progress::kNotCalled;
  if (!group->active.empty()) state.waits_for = group->active.front().operation->missing();  // it may be stuck there
  if (StartedOperation known = group->find_started(sequence); known.started) {
    state.progress = PeerState::Progress::kDone;
    if (known.identity != nullptr) state.name = known.identity->name;
  }
  if (auto queued = std::find_if(group->queued.begin(), group->queued.end(), is_it); queued != group->queued.end()) {
    if (!group->active.empty()) running(group->active.front());  // it waits for this one first
    state.progress = PeerState::Progress::kQueued;
    state.name = queued->operation->identity().name;
  }
  if (auto it = std::find_if(group->active.begin(), group->active.end(), is_it); it != group->active.end())
    running(*it);
  if (auto it = std::find_if(group->nested.begin(), group->nested.end(), is_it); it != group->nested.end()) {
    const InFlight* first = group->in_the_way(*it);
    running(first != nullptr ? *first : *it);
    if (first != nullptr) state.progress = PeerState::Progress::kQueued;
    state.name = it->operation->identity().name;
  }
  if (groups_.failure_of(*group)) state.progress = PeerState::Progress::kFailed;
  if (state.progress == PeerState::Progress::kNotCalled && in_order(sequence)) note_blocked(asker, *group, state);
  return state;
}

void StallMonitor::note_blocked(int asker, const GroupState& group, PeerState& state) const {
  uint64_t blocked = 0;
  {
    MutexLock lock(role_.mutex());
    blocked = threads_.blocked_in();
  }
  const GroupPtr other = groups_.find(blocked);
  if (!other || other->id == group.id || other->active.empty() || other->failing) return;
  const InFlight& front = other->active.front();  // no later operation of that group ends before it
  if (!front.operation->started()) return;
  state.blocked_group = blocked;
  state.blocked_sequence = front.sequence();
  state.needs_asker = needs_call_of(front, *other, asker);
  state.elsewhere = in_group(front.work->text(), *other);
}

// The answers cannot be out of date: the other rank continues only after this one has called the operation, and this
// one has not.
bool StallMonitor::find_deadlock(const GroupState& group, const InFlight& in_flight) {
  if (!in_order(in_flight.sequence()) || &in_flight != &group.active.front()) return false;
  for (const auto& [peer, answer] : in_flight.answers) {
    if (!answer.state || answer.state->progress != PeerState::Progress::kNotCalled || !answer.state->needs_asker)
      continue;
    const GroupPtr other = groups_.find(answer.state->blocked_group);
    if (!other || other->id == group.id || other->failing || groups_.failure_of(*other)) continue;
    if (groups_.called_upto(*other) >= answer.state->blocked_sequence) continue;
    if (!needs_call_of(in_flight, group, peer)) continue;
    {
      MutexLock lock(role_.mutex());
      if (threads_.blocked_in() != group.id) continue;
    }
    const PeerInfo& self = peers_.self();
    const PeerInfo& its = peers_.info(peer);
    const std::string mine = in_group(in_flight.work->text(), group);
    auto step = [](const PeerInfo& who, const std::string& where, const PeerInfo& whom) {
      return who.text() + " waits in " + where + " for rank " + std::to_string(whom.rank) + ", which has not called it";
    };
    const std::string own_step = step(self, mine, its), its_step = step(its, answer.state->elsewhere, self);
    ErrorContext context;
    self.fill_self(context);
    its.fill_peer(context);
    context.cause = "deadlock of two groups: " +
                    (self.rank < its.rank ? own_step + ", and " + its_step : its_step + ", and " + own_step);
    context.advice =
        "all members of a group must make the same calls in the same order, also across groups: look for a collective "
        "that only some ranks call, as under 'if rank == 0'";
    context.operation = in_flight.work->text();
    context.name = in_flight.operation->identity().name;
    context.sequence = static_cast<int64_t>(in_flight.sequence());
    const std::string text = context.cause + "; " + context.advice;
    deadlocks_.emplace_back(group.id, Error(ErrorKind::kMismatch, text, context));
    context.operation = answer.state->elsewhere;
    context.name.clear();
    context.sequence = static_cast<int64_t>(answer.state->blocked_sequence);
    deadlocks_.emplace_back(other->id, Error(ErrorKind::kMismatch, text, context));
    return true;
  }
  return false;
}

std::vector<std::pair<uint64_t, Error>> StallMonitor::take_deadlocks() {
  role_.assert_held();
  return std::exchange(deadlocks_, {});
}

std::string StallMonitor::several_callers(uint64_t group_id) const {
  const GroupPtr group = groups_.find(group_id);
  if (!group) return "";
  MutexLock lock(role_.mutex());
  const std::string callers = threads_.several(*group);
  if (callers.empty()) return "";
  return "several threads of rank " + std::to_string(peers_.rank()) + " call this group: " + callers +
         ", and their order is not the same on every rank unless the program sees to it; give each thread a group of "
         "its own";
}

// Follows the chain of ranks that wait for one another, from the peers' answers, to the missing ranks.
std::vector<MissingRank> StallMonitor::find_missing(const InFlight& in_flight) const {
  std::vector<MissingRank> found;
  std::vector<int> next = in_flight.operation->missing();
  // Other ranks may report a missing one that is not in the chains of this rank's peers.
  for (const auto& [peer, answer] : in_flight.answers)
    if (answer.state)
      for (const MissingRank& it : answer.state->missing) next.push_back(it.rank);
  std::set<int> seen{peers_.rank()};
  auto now = Clock::now();
  int64_t silent_ms = std::min<int64_t>(kSilentMs, in_flight.timeout_ms / 4);
  for (std::size_t i = 0; i < next.size(); ++i) {
    int peer = next[i];
    if (peer < 0 || peer >= peers_.world() || !seen.insert(peer).second) continue;
    if (links_[peer]->healing() && links_[peer]->usable()) {
      found.push_back(
          {peer, 0,
           "the connection with it broke " + seconds(links_[peer]->broken_for_ms()) + " ago and is being made again"});
      continue;
    }
    auto answer = in_flight.answers.find(peer);
    if (answer == in_flight.answers.end()) continue;
    const auto& [asked_at, awaited, state] = answer->second;
    if (awaited && ms_between(asked_at, now) >= silent_ms) {
      int64_t host_ms = links_[peer] && !links_[peer]->broken() ? links_[peer]->host_silence_ms() : 0;
      found.push_back(
          {peer, 0,
           host_ms < silent_ms
               ? "its host answers, its process does not: stopped or overloaded? Its stack cannot be fetched"
               : "its host has not answered for " + seconds(host_ms)});
      continue;
    }
    if (!state) continue;
    if (std::find(state->waits_for.begin(), state->waits_for.end(), peer) != state->waits_for.end()) {
      found.push_back({peer, 0, "its process answers; its own device has not handed over the input yet"});
      continue;
    }
    switch (state->progress) {
      case PeerState::Progress::kNoGroup:
        found.push_back({peer, 0, "its process answers; it has not created this group, or has destroyed it"});
        break;
      case PeerState::Progress::kNotCalled:
        // It is in an earlier operation that waits for other ranks: those are the missing ones.
        if (std::any_of(state->waits_for.begin(), state->waits_for.end(),
                        [&](int it) { return it != peers_.rank(); })) {
          next.insert(next.end(), state->waits_for.begin(), state->waits_for.end());
          break;
        }
        found.push_back({peer, 0, "its process answers; it has not called this yet, " + last_call(*state)});
        break;
      case PeerState::Progress::kQueued:
      case PeerState::Progress::kRunning:
        next.insert(next.end(), state->waits_for.begin(), state->waits_for.end());
        break;
      case PeerState::Progress::kDone:
      case PeerState::Progress::kFailed:
        break;
    }
  }
  add_reported_by_others(in_flight, found);
  std::sort(found.begin(), found.end(), [](const MissingRank& a, const MissingRank& b) { return a.rank < b.rank; });
  return found;
}

// Peers report the missing ranks to which this one has no connection, also from others' reports. An outdated report
// circulates until it has passed kMostHops ranks.
void StallMonitor::add_reported_by_others(const InFlight& in_flight, std::vector<MissingRank>& found) const {
  for (const auto& [peer, answer] : in_flight.answers) {
    if (!answer.state) continue;
    for (const MissingRank& it : answer.state->missing) {
      if (it.rank < 0 || it.rank >= peers_.world() || it.rank == peers_.rank() || it.hops >= kMostHops) continue;
      if (links_[it.rank]->connected() || !links_[it.rank]->usable()) continue;
      auto known = std::find_if(found.begin(), found.end(), [&](const auto& other) { return other.rank == it.rank; });
      if (known == found.end())
        found.push_back({it.rank, it.hops + 1, it.why});
      else if (it.hops + 1 < known->hops)
        *known = {it.rank, it.hops + 1, it.why};
    }
  }
}

std::string StallMonitor::explain_wait(const InFlight& in_flight, const std::vector<MissingRank>& missing,
                                       const char* between) const {
  std::string out = missing.empty() ? in_flight.operation->waiting_for() : "";
  for (const MissingRank& it : std::span(missing).first(std::min(missing.size(), kMostExplained))) {
    std::string peer = peers_.info(it.rank).text();
    std::string frame;
    if (const auto stacks = in_flight.stacks.find(it.rank); stacks != in_flight.stacks.end())
      frame = frame_of_script(stacks->second.text);
    peer.insert(peer.size() - 1, "; " + it.why + (frame.empty() ? "" : "; its script is at " + frame));
    out += (out.empty() ? "" : between) + peer;
  }
  if (const std::size_t more = missing.size() - std::min(missing.size(), kMostExplained); more > 0)
    out += between + std::to_string(more) + " more ranks";
  const std::string callers = several_callers(in_flight.work->group());
  return out + slow_paths_text(links_, in_flight.operation->missing()) + (callers.empty() ? "" : "; " + callers);
}

Error StallMonitor::explain_timeout(const InFlight& in_flight) const {
  role_.assert_held();
  ErrorContext context;
  peers_.self().fill_self(context);
  context.operation = in_flight.work->text();
  context.sequence = static_cast<int64_t>(in_flight.sequence());
  context.name = in_flight.operation->identity().name;
  std::vector<MissingRank> missing = find_missing(in_flight);
  std::vector<int> open = in_flight.operation->missing();
  int guilty = !missing.empty() ? missing.front().rank : !open.empty() ? open.front() : -1;
  if (guilty >= 0) peers_.info(guilty).fill_peer(context);
  context.cause = "waiting for " + explain_wait(in_flight, missing, ", ");
  context.advice = "check what that rank is doing; if it is only slow, give a longer timeout";
  return Error(ErrorKind::kTimeout,
               in_flight.work->text() + " on rank " + std::to_string(peers_.rank()) + " Timed out after " +
                   std::to_string(in_flight.timeout_ms) + " ms: " + context.cause + "; " + context.advice,
               context);
}

}  // namespace ringdp
