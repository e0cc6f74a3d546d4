#include "exchange.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>

namespace fake_cuda {
namespace {

using Bytes = Exchange::Bytes;
using Part = Exchange::Part;

constexpr std::chrono::milliseconds kPoll{10};

void write_all(int socket, const void* from, std::size_t bytes) {
  const auto* at = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    const ssize_t sent = send(socket, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno != EINTR) return;  // it is gone
    if (sent < 0) continue;
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
}

bool read_all(int socket, void* to, std::size_t bytes) {
  auto* at = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const ssize_t got = recv(socket, at, bytes, 0);
    if (got == 0 || (got < 0 && errno != EINTR)) return false;
    if (got < 0) continue;
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

void put(Bytes& frame, const void* from, std::size_t bytes) {
  const auto* first = static_cast<const std::byte*>(from);
  frame.insert(frame.end(), first, first + bytes);
}

void put_number(Bytes& frame, uint64_t number) { put(frame, &number, sizeof number); }

// [round][count of buffers], then of the operation's name and each buffer [bytes] and these.
Bytes frame_of(uint64_t round, const Part& part) {
  Bytes frame;
  put_number(frame, round);
  put_number(frame, part.buffers.size());
  put_number(frame, part.what.size());
  put(frame, part.what.data(), part.what.size());
  for (const Bytes& buffer : part.buffers) {
    put_number(frame, buffer.size());
    put(frame, buffer.data(), buffer.size());
  }
  return frame;
}

template <class Container>
bool read_sized(int socket, Container& into) {
  uint64_t bytes = 0;
  if (!read_all(socket, &bytes, sizeof bytes)) return false;
  into.resize(bytes);
  return read_all(socket, into.data(), bytes);
}

// In Linux's namespace of names without files, which ends with its socket.
std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

}  // namespace

void Exchange::connect(c10d::Store& store, std::chrono::milliseconds timeout) {
  static std::atomic<int> count{0};
  const auto end = std::chrono::steady_clock::now() + timeout;
  const auto wait_until = [&](auto&& done) {
    while (!done()) {
      {
        const std::lock_guard lock(mutex_);
        TORCH_CHECK_WITH(DistBackendError, !aborted_, "NCCL communicator was aborted on rank ", rank_);
      }
      TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < end, "[", rank_,
                       "] is setting up an NCCL communicator, and timed out: other ranks have not come");
      std::this_thread::sleep_for(kPoll);
    }
  };
  const std::string name = "fake-nccl-" + std::to_string(getpid()) + "-" + std::to_string(count++);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const auto [address, length] = address_of(name);
  TORCH_CHECK(bind(listener, reinterpret_cast<const sockaddr*>(&address), length) == 0 && listen(listener, size_) == 0,
              "fake NCCL: no socket");
  store.set("nccl/" + std::to_string(rank_), std::vector<uint8_t>(name.begin(), name.end()));
  for (int peer = 0; peer < rank_; ++peer) {
    const std::string key = "nccl/" + std::to_string(peer);
    wait_until([&] { return store.check({key}); });
    const std::vector<uint8_t> theirs = store.get(key);
    const auto [to, bytes] = address_of(std::string(theirs.begin(), theirs.end()));
    const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    wait_until(
        [&, to = to, bytes = bytes] { return ::connect(made, reinterpret_cast<const sockaddr*>(&to), bytes) == 0; });
    write_all(made, &rank_, sizeof rank_);
    links_[static_cast<std::size_t>(peer)].socket = made;
  }
  for (int left = size_ - 1 - rank_; left > 0; --left) {
    int made = -1, peer = -1;
    wait_until([&] { return (made = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)) >= 0; });
    TORCH_CHECK(read_all(made, &peer, sizeof peer), "fake NCCL: a rank ended while it connected");
    links_[static_cast<std::size_t>(peer)].socket = made;
  }
  close(listener);
  for (Link& link : links_)
    if (link.socket >= 0) readers_.emplace_back([this, &link] { read(link); });
}

Exchange::~Exchange() {
  for (const Link& link : links_)
    if (link.socket >= 0) shutdown(link.socket, SHUT_RDWR);  // what was sent arrives all the same
  for (std::thread& reader : readers_) reader.join();
  for (const Link& link : links_)
    if (link.socket >= 0) close(link.socket);
}

void Exchange::read(Link& link) {
  for (;;) {
    uint64_t round = 0, buffers = 0;
    Part part;
    if (!read_all(link.socket, &round, sizeof round) || !read_all(link.socket, &buffers, sizeof buffers) ||
        !read_sized(link.socket, part.what))
      return;
    part.buffers.resize(buffers);
    for (Bytes& buffer : part.buffers)
      if (!read_sized(link.socket, buffer)) return;
    arrive(link, round, std::move(part));
  }
}

void Exchange::arrive(Link& link, uint64_t round, Part part) {
  MarkPointer asked;
  {
    const std::lock_guard lock(mutex_);
    link.arrived.emplace(round, std::move(part));
    if (const auto found = expected_.find(round); found != expected_.end()) asked = found->second;
    changed_.notify_all();
  }
  if (asked) Machine::here().reached(asked);
}

void Exchange::expect(uint64_t round, MarkPointer mark) {
  bool there = false;
  {
    const std::lock_guard lock(mutex_);
    for (const Link& link : links_) there |= link.arrived.contains(round);
    expected_.emplace(round, mark);
  }
  if (there) Machine::here().reached(mark);
}

bool Exchange::all_in(uint64_t round, const std::string& what) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto& arrived = links_[static_cast<std::size_t>(peer)].arrived;
    const auto found = arrived.find(round);
    if (found == arrived.end() || found->second.what != what) return false;
  }
  return true;
}

std::vector<Part> Exchange::swap(uint64_t round, Part mine, std::chrono::milliseconds timeout,
                                 const std::function<void()>& late) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return {};
    ++in_flight_;
  }
  {
    const Bytes frame = frame_of(round, mine);
    const std::lock_guard lock(sending_);
    for (const Link& link : links_)
      if (link.socket >= 0) write_all(link.socket, frame.data(), frame.size());
  }
  std::unique_lock lock(mutex_);
  const auto over = [&] { return aborted_ || all_in(round, mine.what); };
  if (!changed_.wait_for(lock, timeout, over)) {
    late();
    changed_.wait(lock, over);
  }
  std::vector<Part> all;
  for (int peer = 0; peer < size_ && !aborted_; ++peer) {
    auto& arrived = links_[static_cast<std::size_t>(peer)].arrived;
    all.push_back(peer == rank_ ? std::move(mine) : std::move(arrived.at(round)));
    arrived.erase(round);
  }
  expected_.erase(round);
  --in_flight_;
  changed_.notify_all();
  return all;
}

void Exchange::abort() {
  std::unique_lock lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
  for (const Link& link : links_)
    if (link.socket >= 0) shutdown(link.socket, SHUT_RDWR);
  changed_.wait(lock, [&] { return in_flight_ == 0; });
}

}  // namespace fake_cuda
