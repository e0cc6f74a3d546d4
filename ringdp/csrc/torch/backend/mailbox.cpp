#include "torch/backend/mailbox.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/naming.h"

namespace ringdp {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr int64_t kLastMs = 1000;  // for a message on its way when the mailbox is closed

int other_of(const GroupHandle& pair) { return pair.view().rank == 0 ? 1 : 0; }

std::shared_ptr<std::byte> memory_of(std::size_t bytes) {
  const std::size_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, whole));
  if (memory == nullptr) throw std::bad_alloc();
  return {memory, std::free};
}

at::Tensor tensor_of(const std::shared_ptr<std::byte>& memory, std::size_t bytes) {
  if (bytes == 0) return at::empty({0}, at::kByte);
  return at::from_blob(memory.get(), {static_cast<int64_t>(bytes)}, [memory](void*) {}, at::kByte);
}

}  // namespace

std::shared_ptr<Mailbox> Mailbox::make(const ProcessGroupRing& ring, const std::string& name, std::size_t most_bytes) {
  std::shared_ptr<Mailbox> box(new Mailbox(most_bytes));
  box->open(ring, name);
  return box;
}

void Mailbox::open(const ProcessGroupRing& ring, const std::string& name) {
  const std::shared_ptr<GroupHandle> of_all = ring.group();
  const GroupView& view = of_all->view();
  for (int member = 0; member < view.size; ++member) {
    Peer& peer = peers_.emplace_back();
    if (member == view.rank) continue;
    const int low = std::min(member, view.rank), high = std::max(member, view.rank);
    const std::vector<int> pair{view.members[static_cast<std::size_t>(low)],
                                view.members[static_cast<std::size_t>(high)]};
    peer.group = std::make_unique<GroupHandle>(of_all->share_runtime(),
                                               name + ' ' + std::to_string(low) + '-' + std::to_string(high), pair,
                                               of_all->timeout_ms(), of_all->runtime().tables_in_use());
    peer.group->let_rest();
    peer.listener =
        std::make_shared<const FailureListener>([box = weak_from_this(), member](const std::exception_ptr& why) {
          if (const auto alive = box.lock()) alive->lost(member, why);
        });
    peer.group->on_failure(peer.listener);
  }
}

void Mailbox::expect(int from) {
  Peer& peer = peers_.at(static_cast<std::size_t>(from));
  const NamedScope unnamed("");
  const std::scoped_lock lock(mutex_);
  if (peer.expected || peer.lost || closed_) return;
  peer.expected = true;
  peer.incoming = std::make_shared<Incoming>();
  auto after = [box = weak_from_this(), from, incoming = std::weak_ptr(peer.incoming)] {
    const auto alive = box.lock();
    const auto there = incoming.lock();
    if (alive && there) alive->header_came(from, there);
  };
  try {
    peer.group->receive(peer.incoming->header, DType::kUint8, other_of(*peer.group), kHeaders,
                        options_of(peer.incoming, std::move(after)));
  } catch (const Error&) {
    peer.lost = std::current_exception();
    changed_.notify_all();
  }
}

void Mailbox::header_came(int from, const std::shared_ptr<Incoming>& incoming) {
  uint64_t bytes = 0;
  std::memcpy(&bytes, incoming->header.data(), kOwnBytes);
  if (bytes == 0) return came(from);
  Peer& peer = peers_[static_cast<std::size_t>(from)];
  const NamedScope unnamed("");  // this thread may drive while it waits for an operation that has a name
  try {
    if (bytes > most_bytes_)
      throw Error(ErrorKind::kMismatch, "a message of " + std::to_string(bytes) + " bytes came where at most " +
                                            std::to_string(most_bytes_) + " can");
    incoming->payload = memory_of(bytes);
    incoming->bytes = bytes;
    auto after = [box = weak_from_this(), from] {
      if (const auto alive = box.lock()) alive->came(from);
    };
    peer.group->receive({incoming->payload.get(), bytes}, DType::kUint8, other_of(*peer.group), kPayloads,
                        options_of(incoming, std::move(after)));
  } catch (...) {
    lost(from, std::current_exception());
  }
}

void Mailbox::came(int from) {
  const std::scoped_lock lock(mutex_);
  peers_[static_cast<std::size_t>(from)].ready = true;
  changed_.notify_all();
}

void Mailbox::lost(int from, const std::exception_ptr& why) {
  const std::scoped_lock lock(mutex_);
  Peer& peer = peers_[static_cast<std::size_t>(from)];
  if (!peer.lost) peer.lost = why;
  changed_.notify_all();
}

void Mailbox::require(int member) {
  const std::scoped_lock lock(mutex_);
  if (const auto& lost = peers_.at(static_cast<std::size_t>(member)).lost) std::rethrow_exception(lost);
}

std::optional<Mailbox::Message> Mailbox::next(int from, int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  const int count = static_cast<int>(peers_.size());
  int found = -1;
  auto there = [&](int member) {
    const Peer& peer = peers_[static_cast<std::size_t>(member)];
    return peer.ready || (peer.lost && (from >= 0 || !peer.told));
  };
  auto any = [&] {
    if (from >= 0) {
      found = there(from) ? from : -1;
    } else {
      for (int step = 1; step <= count && found < 0; ++step)
        if (const int member = (last_ + step) % count; there(member)) found = member;
    }
    return found >= 0 || closed_;
  };
  if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), any) || found < 0) return std::nullopt;
  Peer& peer = peers_[static_cast<std::size_t>(found)];
  if (!peer.ready) {
    peer.told = true;
    if (from >= 0) std::rethrow_exception(peer.lost);
    return Message{.from = found, .header = {}, .payload = {}, .lost = peer.lost};
  }
  const std::shared_ptr<Incoming> incoming = std::move(peer.incoming);
  peer.ready = peer.expected = false;
  if (from < 0) last_ = found;
  const auto* header = reinterpret_cast<const char*>(incoming->header.data());
  return Message{.from = found,
                 .header = std::string(header + kOwnBytes, kHeaderBytes - kOwnBytes),
                 .payload = tensor_of(incoming->payload, incoming->bytes)};
}

int64_t Mailbox::send(int to, std::string_view header, at::Tensor payload, bool waits) {
  struct Outgoing {
    std::array<std::byte, kHeaderBytes> header{};
    at::Tensor payload;
  };
  if (header.size() > kHeaderBytes - kOwnBytes) throw Error(ErrorKind::kValue, "a header is too long");
  if (payload.defined() && !(payload.is_cpu() && payload.is_contiguous()))
    throw Error(ErrorKind::kValue, "a payload has to be contiguous, on the CPU");
  Peer& peer = peers_.at(static_cast<std::size_t>(to));
  const NamedScope unnamed("");
  const auto began = Clock::now();
  int64_t waited_ns = 0;
  std::vector<std::shared_ptr<Work>> done;  // dropped without the locks
  const std::scoped_lock order(peer.order);
  if (!peer.group) throw Error(ErrorKind::kState, "this mailbox is closed");
  done = take_done(peer);
  while (waits && peer.on_their_way >= kWindowBytes) {
    const std::shared_ptr<Work> oldest = peer.sent.front().first;
    peer.group->wait(*oldest);
    const auto more = take_done(peer);
    done.insert(done.end(), more.begin(), more.end());
    waited_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began).count();
  }
  auto outgoing = std::make_shared<Outgoing>();
  const uint64_t bytes = payload.defined() ? payload.nbytes() : 0;
  outgoing->payload = std::move(payload);
  std::memcpy(outgoing->header.data(), &bytes, kOwnBytes);
  std::memcpy(outgoing->header.data() + kOwnBytes, header.data(), header.size());
  std::shared_ptr<Work> last =
      peer.group->send(outgoing->header, DType::kUint8, other_of(*peer.group), kHeaders, options_of(outgoing, nullptr));
  if (bytes > 0) {
    auto* data = static_cast<std::byte*>(outgoing->payload.data_ptr());
    peer.sent.emplace_back(std::move(last), 0);
    last =
        peer.group->send({data, bytes}, DType::kUint8, other_of(*peer.group), kPayloads, options_of(outgoing, nullptr));
  }
  peer.sent.emplace_back(std::move(last), bytes);
  peer.on_their_way += bytes;
  return waited_ns;
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

CallOptions Mailbox::options_of(std::shared_ptr<void> keep_alive, std::function<void()> after) {
  CallOptions options;
  options.keep_alive = std::move(keep_alive);
  options.after = std::move(after);
  return options;
}

void Mailbox::close() {
  {
    const std::scoped_lock lock(mutex_);
    if (std::exchange(closed_, true)) return;
    changed_.notify_all();
  }
  for (Peer& peer : peers_) {
    const std::scoped_lock order(peer.order);
    if (!peer.group) continue;
    try {  // the last answers
      for (const auto& [work, bytes] : peer.sent) peer.group->wait(*work, kLastMs);
    } catch (const Error&) {  // that member is lost, or does not take them
    }
    peer.group->close("closed");
    peer.group.reset();
  }
}

}  // namespace ringdp
