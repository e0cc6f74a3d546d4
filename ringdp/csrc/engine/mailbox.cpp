#include "engine/mailbox.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/naming.h"

namespace ringdp {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr int64_t kLastMs = 1000;  // for a message on its way when the mailbox is closed
constexpr auto kGrace = std::chrono::microseconds(200);
constexpr auto kDoze = std::chrono::milliseconds(1);
constexpr auto kOften = std::chrono::milliseconds(5);  // the program's thread has waited so shortly before

int other_of(const GroupHandle& pair) { return pair.view().rank == 0 ? 1 : 0; }

int32_t first_of(Mailbox::Box box) { return 2 * box; }  // tags
int32_t payload_of(Mailbox::Box box) { return 2 * box + 1; }

std::byte* allocated(std::size_t bytes) {
  const std::size_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, whole));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

std::shared_ptr<std::byte> first_message() { return {allocated(Mailbox::kFirstBytes), std::free}; }

CallOptions options_of(std::shared_ptr<void> keep_alive, std::function<void()> after = {}) {
  CallOptions options;
  options.caller_waits = true;  // `answer` drives, and `send` moves on
  options.keep_alive = std::move(keep_alive);
  options.after = std::move(after);
  return options;
}

}  // namespace

void PayloadPool::Free::operator()(std::byte* memory) const { std::free(memory); }

std::shared_ptr<std::byte> PayloadPool::take(std::size_t bytes) {
  if (bytes < kLeastBytes) return {allocated(bytes), std::free};
  std::byte* memory = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& it) { return it.first == bytes; });
    if (found != free_.end()) {
      memory = found->second.release();
      free_.erase(found);
    }
  }
  if (memory == nullptr) memory = allocated(bytes);
  return {memory, [pool = weak_from_this(), bytes](std::byte* unused) {
            std::unique_ptr<std::byte, Free> owned(unused);
            const auto alive = pool.lock();
            if (!alive) return;
            const std::scoped_lock lock(alive->mutex_);
            if (alive->free_.size() >= kMost) alive->free_.erase(alive->free_.begin());
            alive->free_.emplace_back(bytes, std::move(owned));
          }};
}

std::shared_ptr<Mailbox> Mailbox::make(const GroupHandle& of_all, const std::string& name, std::size_t most_bytes) {
  std::shared_ptr<Mailbox> box(new Mailbox(most_bytes));
  box->open(of_all, name);
  return box;
}

void Mailbox::open(const GroupHandle& of_all, const std::string& name) {
  const GroupView& view = of_all.view();
  engine_ = of_all.engine();
  for (int member = 0; member < view.size; ++member) {
    Peer& peer = peers_.emplace_back();
    if (member == view.rank) continue;
    const int low = std::min(member, view.rank), high = std::max(member, view.rank);
    const std::vector<int> pair{view.members[static_cast<std::size_t>(low)],
                                view.members[static_cast<std::size_t>(high)]};
    peer.group = std::make_shared<GroupHandle>(of_all.share_runtime(),
                                               name + ' ' + std::to_string(low) + '-' + std::to_string(high), pair,
                                               of_all.timeout_ms(), of_all.share_runtime()->tables_in_use());
    peer.group->let_rest();
    peer.listener =
        std::make_shared<const FailureListener>([box = weak_from_this(), member](const std::exception_ptr& why) {
          if (const auto alive = box.lock()) alive->lost(member, why);
        });
    peer.group->on_failure(peer.listener);
  }
}

void Mailbox::expect(Box box, int from) {
  Peer& peer = this->peer(from);
  std::shared_ptr<GroupHandle> group;
  const NamedScope unnamed("");
  auto incoming = std::make_shared<Incoming>();
  incoming->first = first_message();
  {
    const std::scoped_lock lock(mutex_);
    Slot& slot = peer.slots[box];
    if (slot.expected || peer.lost || closed_ || !peer.group) return;
    slot.expected = true;
    slot.incoming = incoming;
    group = peer.group;
  }
  auto after = [mailbox = weak_from_this(), box, from, there = std::weak_ptr(incoming)] {
    const auto alive = mailbox.lock();
    const auto message = there.lock();
    if (alive && message) alive->header_came(box, from, message);
  };
  try {
    hold(peer.slots[box], 0,
         group->receive({incoming->first.get(), kFirstBytes}, DType::kUint8, other_of(*group), first_of(box),
                        options_of(incoming, std::move(after))));
    if (box == kRequests && !waiter_serves_.load(std::memory_order_relaxed)) engine_->move_on();  // it may be here
  } catch (const Error&) {
    lost(from, std::current_exception());
  }
}

void Mailbox::hold(Slot& slot, std::size_t which, std::shared_ptr<Work> receive) {
  const std::scoped_lock lock(mutex_);
  slot.receives[which].swap(receive);  // what was there is released without the lock
}

void Mailbox::land(int from, std::shared_ptr<std::byte> memory, std::size_t bytes) {
  std::pair landing(std::move(memory), bytes);  // what was there is released without the lock
  const std::scoped_lock lock(mutex_);
  peer(from).landing.swap(landing);
}

void Mailbox::header_came(Box box, int from, const std::shared_ptr<Incoming>& incoming) {
  uint64_t bytes = 0;
  std::memcpy(&bytes, incoming->first.get(), sizeof bytes);
  incoming->bytes = bytes;
  if (bytes <= kInlineBytes) {
    if (bytes > 0) incoming->payload = {incoming->first, incoming->first.get() + kHeaderBytes};
    return came(box, from);
  }
  Peer& peer = this->peer(from);
  const NamedScope unnamed("");  // this thread may drive while it waits for an operation that has a name
  try {
    if (bytes > most_bytes_)
      throw Error(ErrorKind::kMismatch, "a message of " + std::to_string(bytes) + " bytes came where at most " +
                                            std::to_string(most_bytes_) + " can");
    if (box == kAnswers) {
      const std::scoped_lock lock(mutex_);
      if (peer.landing.second == bytes) incoming->payload = peer.landing.first;
    }
    if (!incoming->payload) incoming->payload = pool_->take(bytes);
    auto after = [mailbox = weak_from_this(), box, from] {
      if (const auto alive = mailbox.lock()) alive->came(box, from);
    };
    hold(peer.slots[box], 1,
         peer.group->receive({incoming->payload.get(), bytes}, DType::kUint8, other_of(*peer.group), payload_of(box),
                             options_of(incoming, std::move(after))));
  } catch (...) {
    lost(from, std::current_exception());
  }
}

void Mailbox::came(Box box, int from) {
  const std::scoped_lock lock(mutex_);
  peer(from).slots[box].ready = true;
  requests_ += box == kRequests;
  changed(box == kRequests);
}

void Mailbox::lost(int from, const std::exception_ptr& why) {
  const std::scoped_lock lock(mutex_);
  if (peer(from).lost) return;
  peer(from).lost = why;
  ++requests_;
  changed(true);
}

void Mailbox::changed(bool for_server) {
  changes_.fetch_add(1, std::memory_order_release);
  if (!for_server || answer_awaited_ || (dozes_ && Clock::now() < left_to_program_)) return;
  served_.notify_all();
}

void Mailbox::require(int member) {
  const std::scoped_lock lock(mutex_);
  if (const auto& lost = peer(member).lost) std::rethrow_exception(lost);
}

Mailbox::Message Mailbox::take(Box box, int from) {
  Slot& slot = peer(from).slots[box];
  const std::shared_ptr<Incoming> incoming = std::move(slot.incoming);
  slot.ready = slot.expected = false;
  slot.receives = {};  // their buffers are `incoming`
  const auto* header = reinterpret_cast<const char*>(incoming->first.get());
  return Message{.box = box,
                 .from = from,
                 .header = std::string(header + sizeof(uint64_t), kMostHeaderBytes),
                 .payload = incoming->payload,
                 .bytes = incoming->bytes};
}

std::optional<Mailbox::Message> Mailbox::take_request() {
  const int count = static_cast<int>(peers_.size());
  for (int step = 1; step <= count; ++step) {
    const int member = (last_ + step) % count;
    Peer& peer = this->peer(member);
    if (peer.slots[kRequests].ready) {
      last_ = member;
      --requests_;
      return take(kRequests, member);
    }
    if (peer.lost && !std::exchange(peer.told, true)) {
      --requests_;
      return Message{.from = member, .header = {}, .payload = {}, .lost = peer.lost};
    }
  }
  return std::nullopt;
}

std::optional<Mailbox::Message> Mailbox::request(int64_t timeout_ms) {
  const auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
  std::unique_lock lock(mutex_);
  while (!closed_) {
    const auto now = Clock::now();
    if (!answer_awaited_ && now >= left_to_program_)
      if (auto found = take_request()) return found;
    if (now >= end) break;
    dozes_ = !answer_awaited_ && now < left_to_program_ + kOften;
    served_.wait_until(lock, dozes_ ? std::min(end, now + kDoze) : end);
    dozes_ = false;
  }
  return std::nullopt;
}

std::optional<Mailbox::Message> Mailbox::answer(int from, int64_t timeout_ms, bool serves) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  struct Awaiting {
    Mailbox& box;
    const bool serves;
    ~Awaiting() {
      if (!serves) return;
      const std::scoped_lock lock(box.mutex_);
      box.answer_awaited_ = false;
      box.left_to_program_ = Clock::now() + kGrace;
      if (!box.dozes_ && box.requests_ > 0) box.served_.notify_all();
    }
  };
  std::optional<Message> found;
  const bool unstarted = waiter_serves_.exchange(false, std::memory_order_relaxed);  // a receive, perhaps
  {
    const Awaiting awaiting{*this, serves};
    for (bool more = true; more;) {
      uint64_t seen = 0;
      {
        const std::scoped_lock lock(mutex_);
        answer_awaited_ = serves || answer_awaited_;
        if (peer(from).slots[kAnswers].ready) {
          found = take(kAnswers, from);
          break;
        }
        if (serves && (found = take_request())) {
          waiter_serves_.store(true, std::memory_order_relaxed);
          break;
        }
        if (peer(from).lost) std::rethrow_exception(peer(from).lost);
        if (closed_) break;
        seen = changes_.load(std::memory_order_relaxed);
      }
      more = engine_->wait_until([&] { return changes_.load(std::memory_order_acquire) != seen; }, deadline);
    }
  }
  if (found && found->box == kAnswers) {
    land(from, nullptr, 0);
    expect(kAnswers, from);
    if (unstarted) engine_->move_on();  // this thread may not come here again for long
  }
  return found;
}

int64_t Mailbox::send(int to, Box box, std::string_view header, std::span<std::byte> payload,
                      std::shared_ptr<void> keep_alive, bool waits) {
  if (header.size() > kMostHeaderBytes) throw Error(ErrorKind::kValue, "a header is too long");
  Peer& peer = this->peer(to);
  const NamedScope unnamed("");
  const auto began = Clock::now();
  int64_t waited_ns = 0;
  std::vector<std::shared_ptr<Work>> done;  // dropped without the locks
  {
    const std::scoped_lock order(peer.order);
    const std::shared_ptr<GroupHandle> group = group_of(to);
    done = take_done(peer);
    while (waits && peer.on_their_way >= kWindowBytes) {
      const std::shared_ptr<Work> oldest = peer.sent.front().first;
      group->wait(*oldest);
      const auto more = take_done(peer);
      done.insert(done.end(), more.begin(), more.end());
      waited_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began).count();
    }
    const std::shared_ptr<std::byte> first = first_message();
    std::memset(first.get(), 0, kFirstBytes);
    const uint64_t bytes = payload.size();
    std::memcpy(first.get(), &bytes, sizeof bytes);
    std::memcpy(first.get() + sizeof bytes, header.data(), header.size());
    const bool small = bytes <= kInlineBytes;
    if (small && bytes > 0) std::memcpy(first.get() + kHeaderBytes, payload.data(), bytes);
    std::shared_ptr<Work> last =
        group->send({first.get(), kFirstBytes}, DType::kUint8, other_of(*group), first_of(box), options_of(first));
    if (!small) {
      peer.sent.emplace_back(std::move(last), 0);
      last = group->send(payload, DType::kUint8, other_of(*group), payload_of(box), options_of(std::move(keep_alive)));
    }
    peer.sent.emplace_back(std::move(last), small ? 0 : bytes);
    peer.on_their_way += small ? 0 : bytes;
  }
  engine_->move_on();
  return waited_ns;
}

std::shared_ptr<GroupHandle> Mailbox::group_of(int member) {
  const std::scoped_lock lock(mutex_);
  if (closed_ || !peer(member).group) throw Error(ErrorKind::kState, "this mailbox is closed, or has no such peer");
  return peer(member).group;
}

std::vector<std::shared_ptr<Work>> Mailbox::take_done(Peer& peer) {
  std::vector<std::shared_ptr<Work>> done;
  while (!peer.sent.empty() && peer.sent.front().first->finished()) {
    peer.on_their_way -= peer.sent.front().second;
    done.push_back(std::move(peer.sent.front().first));
    peer.sent.pop_front();
  }
  return done;
}

void Mailbox::close() {
  {
    const std::scoped_lock lock(mutex_);
    if (std::exchange(closed_, true)) return;
    changes_.fetch_add(1, std::memory_order_release);
    served_.notify_all();
  }
  for (Peer& peer : peers_) {
    const std::scoped_lock order(peer.order);
    if (!peer.group) continue;
    std::shared_ptr<GroupHandle> group;
    try {  // the last answers
      for (const auto& [work, bytes] : peer.sent) peer.group->wait(*work, kLastMs);
    } catch (const Error&) {  // that member is lost, or does not take them
    }
    peer.group->close("closed");  // the driver's thread uses it no more
    const std::scoped_lock lock(mutex_);
    group.swap(peer.group);
  }
}

}  // namespace ringdp
