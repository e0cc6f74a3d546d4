// The channel through shared memory: bytes in order through a small ring, sleeping and waking, ends and deaths.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/stream_copy.h"
#include "testing.h"
#include "transport/shm.h"

namespace ringdp::testing {
namespace {

constexpr std::size_t kRingBytes = 64 * 1024;
constexpr int kBellMs = 5000;  // nobody who sleeps may have to wait for so long

struct Ends {
  std::unique_ptr<Channel> a, b;
  std::optional<PairMemory> memory;  // a third mapping of the same, to look at and to spoil
};

Ends make_ends() {
  std::string problem;
  Fd memory = PairMemory::create(kRingBytes, problem);
  REQUIRE(memory);
  int sockets[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets) == 0);
  auto map = [&] {
    auto mapped = PairMemory::map(memory, kRingBytes, problem);
    REQUIRE(mapped.has_value());
    return std::move(*mapped);
  };
  Ends ends;
  ends.a = make_shm_channel({map(), Fd(sockets[0]), 0, "rank 1"});
  ends.b = make_shm_channel({map(), Fd(sockets[1]), 1, "rank 0"});
  ends.memory = map();
  return ends;
}

// Byte i of the stream.
std::byte byte_at(uint64_t i) { return static_cast<std::byte>((i * 2654435761ULL) >> 13); }

// Whether the channel's bell rings, or its peer is gone, within that time.
bool rung(Channel& channel, int ms) {
  pollfd descriptors[2] = {{channel.direct()->bell_fd(), POLLIN, 0}, {channel.poll_fd(), POLLRDHUP, 0}};
  if (poll(descriptors, 2, ms) <= 0) return false;
  uint64_t times = 0;
  if ((descriptors[0].revents & POLLIN) != 0)
    CHECK(read(channel.direct()->bell_fd(), &times, sizeof(times)) == sizeof(times));
  return true;
}

void wait_for(Channel& channel, bool for_room) {
  if (channel.direct()->before_sleep(for_room)) {
    CHECK(rung(channel, kBellMs));
    channel.direct()->noticed();
  }
  channel.direct()->after_sleep();
}

void send_stream(Channel& channel, uint64_t total, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes;
  for (uint64_t at = 0; at < total;) {
    std::size_t length = std::min<uint64_t>(total - at, 1 + random() % (random() % 8 == 0 ? 200'000 : 700));
    bytes.resize(length);
    for (std::size_t i = 0; i < length; ++i) bytes[i] = byte_at(at + i);
    for (std::size_t done = 0; done < length;) {
      std::size_t middle = done + (length - done) / 3;
      iovec pieces[2] = {{bytes.data() + done, middle - done}, {bytes.data() + middle, length - middle}};
      IoResult result = channel.send(pieces);
      if (result.status == IoStatus::kWouldBlock) {
        wait_for(channel, true);
        continue;
      }
      REQUIRE(result.status == IoStatus::kOk);
      done += result.bytes;
    }
    at += length;
    if (random() % 64 == 0) std::this_thread::yield();
  }
}

uint64_t receive_stream(Channel& channel, uint64_t total, uint64_t seed) {
  std::mt19937_64 random(seed);
  uint64_t at = 0, wrong = 0;
  while (at < total) {
    std::span<const std::byte> bytes;
    IoStatus status = channel.direct()->peek(bytes);
    if (status == IoStatus::kWouldBlock) {
      wait_for(channel, false);
      continue;
    }
    REQUIRE(status == IoStatus::kOk);
    std::size_t used = 1 + random() % bytes.size();
    for (std::size_t i = 0; i < used; ++i) wrong += bytes[i] != byte_at(at + i);
    at += used;
    channel.direct()->consume(used);
  }
  return wrong;
}

// As a poller that finds the descriptor readable again and again.
IoStatus look(Channel& channel) {
  std::span<const std::byte> bytes;
  IoStatus status = IoStatus::kWouldBlock;
  for (int i = 0; i < 3 && status == IoStatus::kWouldBlock; ++i) {
    channel.direct()->noticed();
    status = channel.direct()->peek(bytes);
  }
  return status;
}

}  // namespace

CASE("bytes come out as they went in, both ways at once, and nobody who sleeps is forgotten") {
  for (uint64_t seed : {1, 2, 3}) {
    Ends ends = make_ends();
    constexpr uint64_t kTotal = 6'000'000;
    std::atomic<uint64_t> wrong{0};
    // A channel belongs to one thread: each side sends a stretch, then receives one.
    auto run = [&](Channel& channel, bool first, uint64_t own) {
      for (uint64_t turn = 0; turn < 2; ++turn) {
        if (first == (turn == 0))
          send_stream(channel, kTotal, own);
        else
          wrong += receive_stream(channel, kTotal, own + 17);
      }
    };
    std::thread other([&] { run(*ends.b, false, seed * 100); });
    run(*ends.a, true, seed);
    other.join();
    CHECK_EQ(wrong.load(), uint64_t{0});
    CHECK(ends.a->drained());
    CHECK(ends.b->drained());
  }
}

CASE("a full ring takes no more, and room is told to who waits for it only") {
  Ends ends = make_ends();
  std::vector<std::byte> bytes(kRingBytes + 1000);
  iovec piece{bytes.data(), bytes.size()};
  CHECK_EQ(ends.a->send({&piece, 1}).bytes, kRingBytes);
  CHECK(ends.a->send({&piece, 1}).status == IoStatus::kWouldBlock);
  CHECK(ends.a->drained());  // the peer can read it even when this side has gone
  CHECK(ends.a->direct()->before_sleep(false));
  std::span<const std::byte> there;
  CHECK(ends.b->direct()->peek(there) == IoStatus::kOk);
  CHECK_EQ(there.size(), kRingBytes);
  ends.b->direct()->consume(64);
  CHECK(!rung(*ends.a, 0));
  ends.a->direct()->after_sleep();
  CHECK(!ends.a->direct()->before_sleep(true));  // room was made meanwhile: no sleep
  ends.a->direct()->after_sleep();
  CHECK_EQ(ends.a->send({&piece, 1}).bytes, std::size_t{64});
  CHECK(ends.a->direct()->before_sleep(true));
  ends.b->direct()->consume(kRingBytes / 2 - 64);  // the ring is full but for these
  CHECK(!rung(*ends.a, 0));
  ends.b->direct()->consume(64);
  CHECK(rung(*ends.a, kBellMs));
}

CASE("what was sent before a side ended is read, then the end is seen") {
  for (bool orderly : {true, false}) {
    Ends ends = make_ends();
    std::byte byte{7};
    iovec piece{&byte, 1};
    CHECK_EQ(ends.a->send({&piece, 1}).bytes, std::size_t{1});
    if (orderly) ends.a->close_send();
    ends.a.reset();  // its process has ended
    std::span<const std::byte> bytes;
    ends.b->direct()->noticed();
    CHECK(ends.b->direct()->peek(bytes) == IoStatus::kOk);
    CHECK_EQ(bytes.size(), std::size_t{1});
    CHECK(rung(*ends.b, kBellMs));
    ends.b->direct()->consume(1);
    CHECK(look(*ends.b) == IoStatus::kClosed);
    CHECK(look(*ends.b) == IoStatus::kClosed);
    CHECK(ends.b->drained());
  }
}

CASE("a sleeper hears at once that its peer has died") {
  Ends ends = make_ends();
  CHECK(ends.b->direct()->before_sleep(false));
  std::thread killer([&] { ends.a.reset(); });
  auto begin = Clock::now();
  CHECK(rung(*ends.b, kBellMs));
  CHECK(Clock::now() - begin < std::chrono::milliseconds(1000));
  killer.join();
  CHECK(look(*ends.b) == IoStatus::kClosed);
}

CASE("a copy past the caches is a copy, whatever its size and place") {
  std::vector<std::byte> from(1000), wanted, got;
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = byte_at(i);
  for (std::size_t place = 0; place < 130; place += place < 4 ? 1 : 21) {
    for (std::size_t bytes : {0, 1, 63, 64, 65, 128, 700}) {
      wanted.assign(1000, std::byte{3});
      got = wanted;
      std::memcpy(wanted.data() + place, from.data() + place / 2, bytes);
      stream_copy(got.data() + place, from.data() + place / 2, bytes);
      CHECK(got == wanted);
    }
  }
}

CASE("counters that make no sense break the channel and read nothing") {
  Ends ends = make_ends();
  // The first counter is how much side 0 has written, the first of the next line how much of it was read.
  auto* counters = reinterpret_cast<std::atomic<uint64_t>*>(ends.memory->control());
  counters[0].store(kRingBytes + 1);
  std::span<const std::byte> bytes;
  CHECK(ends.b->direct()->peek(bytes) == IoStatus::kBroken);
  Ends others = make_ends();
  std::vector<std::byte> full(kRingBytes);
  iovec piece{full.data(), full.size()};
  CHECK_EQ(others.a->send({&piece, 1}).bytes, kRingBytes);
  reinterpret_cast<std::atomic<uint64_t>*>(others.memory->control())[8].store(kRingBytes * 3);
  CHECK(others.a->send({&piece, 1}).status == IoStatus::kBroken);
}

}  // namespace ringdp::testing
