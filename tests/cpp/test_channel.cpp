// What every channel must do, over every transport of the table (transport/registry.cpp), as it is and behind a
// FaultyChannel, and over TCP in stripes and with TLS. The sides are made as in a job, by SharedSetup over loopback
// connections, and driven as the engine drives them: `receive` of a stream, `peek` and `consume` of a direct channel,
// and sleep in a Poller. A new transport comes in by its line in the table.
#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "faulty.h"
#include "shared/shared_setup.h"
#include "testing.h"
#include "transport/counted.h"
#include "transport/poller.h"
#include "transport/tcp.h"
#include "transport/tls.h"
#include "transport/transport.h"

namespace ringdp::testing {
namespace {

constexpr int kKindMs = 10'000;
constexpr int kWakeMs = 5000;                       // a sleeper that waits so long was forgotten
constexpr uint64_t kFaultSeed = 20'250'823;         // of the faulty channels
constexpr uint64_t kMostBytesUnderWay = 256 << 20;  // no transport holds so many
constexpr int kRefusalsInARow = 16;                 // of a channel that has no room; a faulty one refuses one of four

// What is being tested, for messages, and until when: a channel that never ends must not hold up the others.
std::string kind;
Deadline kind_limit = Deadline::never();

// As REQUIRE, with the transport's name: the rest of the case is left out for this transport.
#define WANT(condition)                                      \
  do {                                                       \
    if (!(condition)) {                                      \
      report_failure(__FILE__, __LINE__, kind + #condition); \
      throw RequireFailed();                                 \
    }                                                        \
  } while (false)

// ---- Two ends of a channel ----

constexpr std::size_t kPeriod = 65'521;  // prime: a ring that is off by its size shows

// `bytes` of the stream from place `at` on; at most kPeriod.
const std::byte* stream_at(uint64_t at) {
  static const std::vector<std::byte> pattern = [] {
    std::mt19937_64 random(1);
    std::vector<std::byte> out(2 * kPeriod);
    for (std::size_t i = 0; i < kPeriod; ++i) out[i] = out[i + kPeriod] = static_cast<std::byte>(random());
    return out;
  }();
  return pattern.data() + at % kPeriod;
}

// One side. It sends one stream of bytes and expects another, each from its own place on.
class End {
 public:
  End(std::unique_ptr<Channel> channel, int rank)
      : channel_(std::move(channel)),
        reader_(channel_->direct()),
        random_(static_cast<uint64_t>(rank) + 5),
        out_(rank * 1000),
        in_(1000 - out_) {
    poller_.add(channel_->poll_fd(), 0);
    if (reader_ != nullptr) poller_.add_bell(reader_->bell_fd(), 0);
  }

  Channel& channel() { return *channel_; }
  uint64_t sent() const { return sent_; }
  uint64_t received() const { return received_; }

  // Offers the next bytes of its stream, at most kPeriod of them, in a few pieces.
  IoStatus send(std::size_t bytes) {
    WANT(!kind_limit.expired());
    bytes = std::min(bytes, kPeriod);
    auto* from = const_cast<std::byte*>(stream_at(out_ + sent_));
    std::size_t a = random_() % (bytes + 1), b = a + random_() % (bytes - a + 1);
    std::vector<iovec> pieces;
    for (auto [begin, end] : {std::pair{std::size_t{0}, a}, {a, b}, {b, bytes}})
      if (begin < end) pieces.push_back({from + begin, end - begin});
    IoResult result = channel_->send(pieces);
    WANT(result.bytes <= bytes && (result.bytes > 0) == (result.status == IoStatus::kOk));
    sent_ += result.bytes;
    return result.status;
  }

  // Takes at most so many of the bytes that have come, and looks whether they are the right ones.
  IoStatus receive(std::size_t most) {
    WANT(!kind_limit.expired());
    most = std::min(most, kPeriod);
    std::span<const std::byte> bytes;
    if (reader_ != nullptr) {
      IoStatus status = reader_->peek(bytes);
      WANT((status == IoStatus::kOk) == !bytes.empty());
      if (status != IoStatus::kOk) return status;
      bytes = bytes.first(std::min(bytes.size(), most));
    } else {
      buffer_.assign(most + 1, std::byte{0});
      std::size_t cut = 1 + random_() % most;
      std::array<iovec, 2> pieces{{{buffer_.data(), cut}, {buffer_.data() + cut, most - cut}}};
      IoResult result = channel_->receive(pieces);
      WANT(result.bytes <= most && (result.bytes > 0) == (result.status == IoStatus::kOk));
      if (result.status != IoStatus::kOk) return result.status;
      bytes = {buffer_.data(), result.bytes};
    }
    WANT(std::memcmp(bytes.data(), stream_at(in_ + received_), bytes.size()) == 0);
    received_ += bytes.size();
    if (reader_ != nullptr) reader_->consume(bytes.size());
    return IoStatus::kOk;
  }

  // Sleeps as the engine does when no bytes move. False: it was not woken in that time.
  bool sleep(bool for_room, int limit_ms = kWakeMs) {
    const bool asleep = lie_down(for_room);
    return woken(asleep ? limit_ms : 0) || !asleep;
  }
  bool lie_down(bool for_room) {
    if (reader_ != nullptr) return reader_->before_sleep(for_room);
    poller_.want_write(channel_->poll_fd(), 0, for_room);
    return true;
  }
  bool woken(int limit_ms = kWakeMs) {
    const auto& events = poller_.wait(limit_ms);
    if (reader_ != nullptr) reader_->after_sleep();
    for (const Poller::Event& it : events)
      if (it.readable && reader_ != nullptr) reader_->noticed();
    return !events.empty();
  }

  bool quiet() { return !sleep(false, 0); }
  // Takes in what wakes this side though no byte has come: the first word of a new channel.
  void become_quiet() {
    for (int i = 0; i < 4 && !quiet(); ++i) WANT(receive(100) == IoStatus::kWouldBlock);
    WANT(quiet());
    WANT(receive(100) == IoStatus::kWouldBlock);
  }

  void receive_until(uint64_t total) {
    while (received_ < total) {
      IoStatus status = receive(total - received_);
      WANT(status == IoStatus::kOk || status == IoStatus::kWouldBlock);
      if (status == IoStatus::kWouldBlock) WANT(sleep(false));
    }
  }

  void send_until(uint64_t total) {
    while (sent_ < total) {
      IoStatus status = send(total - sent_);
      WANT(status == IoStatus::kOk || status == IoStatus::kWouldBlock);
      if (status == IoStatus::kWouldBlock) WANT(sleep(true));
    }
  }

  // Until all that was sent has reached the other side: a channel may need to be looked at for that.
  void drain() {
    while (!channel_->drained()) {
      WANT(!kind_limit.expired());
      woken(1);
    }
  }

  // How its stream ends, once everything that comes before the end was received.
  IoStatus end_of_stream() {
    for (;;) {
      IoStatus status = receive(kPeriod);
      if (status != IoStatus::kOk && status != IoStatus::kWouldBlock) return status;
      if (status == IoStatus::kWouldBlock) WANT(sleep(false));
    }
  }

  // Sends until nothing more goes in.
  void fill() {
    for (int refusals = 0; refusals < kRefusalsInARow;) {
      IoStatus status = send(20'011);
      WANT(status == IoStatus::kOk || status == IoStatus::kWouldBlock);
      refusals = status == IoStatus::kOk ? 0 : refusals + 1;
      WANT(sent_ < kMostBytesUnderWay);
    }
  }

  std::mt19937_64& random() { return random_; }

 private:
  std::unique_ptr<Channel> channel_;
  DirectReader* reader_;
  Poller poller_;
  std::mt19937_64 random_;
  std::vector<std::byte> buffer_;
  const uint64_t out_, in_;  // where the streams begin
  uint64_t sent_ = 0, received_ = 0;
};

using Ends = std::array<std::unique_ptr<End>, 2>;

// A connection as the rendezvous leaves it to the set-up.
std::array<Fd, 2> connect_to_each_other() {
  int problem = 0;
  auto listener = TcpListener::try_bind("127.0.0.1", 0, 4, problem);
  REQUIRE(listener);
  std::array<Fd, 2> out;
  out[0] = start_connect(listener->address(), problem);
  Deadline limit = Deadline::after_ms(kWakeMs);
  while (!out[1] && !limit.expired())
    if (auto accepted = listener->accept(problem)) out[1] = std::move(accepted->first);
  REQUIRE(out[0] && out[1]);
  return out;
}

constexpr int kStreams = 4;               // of the striped kind
constexpr uint64_t kRecordsPerKey = 100;  // new keys often

// Over so many connections, several as between ranks that are far apart.
std::array<std::unique_ptr<Channel>, 2> connected_by_streams(int streams) {
  std::array<std::vector<Fd>, 2> sockets;
  for (int i = 0; i < streams; ++i) {
    auto pair = connect_to_each_other();
    for (int rank : {0, 1}) sockets[rank].push_back(std::move(pair[rank]));
  }
  std::rotate(sockets[1].begin(), sockets[1].begin() + 1, sockets[1].end());  // their order does not matter
  std::array<std::unique_ptr<Channel>, 2> channels;
  for (int rank : {0, 1}) channels[rank] = tcp_transport().open(std::move(sockets[rank]));
  return channels;
}

Ends ends_of(std::array<std::unique_ptr<Channel>, 2> channels) {
  return {std::make_unique<End>(std::move(channels[0]), 0), std::make_unique<End>(std::move(channels[1]), 1)};
}

// The handshake is made by the first calls of both sides.
Ends with_tls(std::array<std::unique_ptr<Channel>, 2> channels) {
  static const auto context = make_tls_context({.mode = TlsMode::kSecret});
  for (int rank : {0, 1})
    channels[rank] =
        make_tls_channel(std::move(channels[rank]), {.tls = context, .key = {}, .dialled = rank == 1}, kRecordsPerKey);
  Ends ends = ends_of(std::move(channels));
  for (int quiet = 0; quiet < 4; ++quiet)
    for (auto& it : ends)
      if (it->woken(20)) {
        WANT(it->receive(1) == IoStatus::kWouldBlock);
        quiet = 0;
      }
  return ends;
}

Ends connected_by(const Transport& transport, bool faulty) {
  auto sockets = connect_to_each_other();
  std::array<std::unique_ptr<SharedSetup>, 2> setups;
  for (int rank : {0, 1}) {
    SharedSetup::Plan plan;
    plan.transports.resize(2);
    plan.transports[1 - rank] = choose_transport(&transport, &transport, true);
    plan.pids.resize(2, -1);
    plan.ring_bytes = PairMemory::kMinRingBytes;
    std::vector<PeerSocket> to(2);
    to[1 - rank] = PeerSocket(std::move(sockets[rank]), {.dialled = rank == 1});
    setups[rank] = std::make_unique<SharedSetup>(rank, std::move(to), std::move(plan));
  }
  for (Deadline limit = Deadline::after_ms(kWakeMs); !setups[0]->complete() || !setups[1]->complete();) {
    for (auto& it : setups) it->step(1);
    WANT(!limit.expired());
  }
  Ends ends;
  for (int rank : {0, 1}) {
    WANT(&setups[rank]->transport(1 - rank) == &transport);
    std::unique_ptr<Channel> channel = setups[rank]->take(1 - rank);
    if (faulty) channel = std::make_unique<FaultyChannel>(std::move(channel), kFaultSeed + rank);
    ends[rank] = std::make_unique<End>(std::move(channel), rank);
  }
  return ends;
}

enum class Faulty { kToo, kNot };

// Calls `body` with the ends of a fresh channel of each kind; leaves the case when one has failed.
void over_every_transport(const std::function<void(const Transport& transport, Ends& ends)>& body,
                          Faulty faulty_too = Faulty::kToo) {
  bool failed = false;
  const auto over = [&](const Transport& transport, const std::string& how, const std::function<Ends()>& connected) {
    kind = "over " + how + std::string(transport.name) + ": ";
    kind_limit = Deadline::after_ms(kKindMs);
    try {
      Ends ends = connected();
      body(transport, ends);
    } catch (const RequireFailed&) {  // it was reported; the next kind
      failed = true;
    }
  };
  for (const Transport* it : transports()) {
    over(*it, "", [&] { return connected_by(*it, false); });
    if (faulty_too == Faulty::kToo) over(*it, "faulty ", [&] { return connected_by(*it, true); });
  }
  // Not faulty: it says once that there is room, to a caller that takes it.
  over(tcp_transport(), "striped ", [] { return ends_of(connected_by_streams(kStreams)); });
  for (int streams : {1, kStreams})
    over(tcp_transport(), "TLS over " + std::to_string(streams) + " streams of ",
         [&] { return with_tls(connected_by_streams(streams)); });
  over(tcp_transport(), "counted ", [] {
    auto channels = connected_by_streams(1);
    for (auto& it : channels) it = std::make_unique<CountedChannel>(std::move(it));
    return ends_of(std::move(channels));
  });
  if (failed) throw RequireFailed();
}

std::size_t open_descriptors() {
  auto all = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

}  // namespace

CASE("streams arrive whole and in order, both ways at once, in messages of any size and cut anywhere") {
  struct Sizes {
    uint64_t total;
    std::size_t least, most;
  };
  // Many small ones; of every size, through a ring many times; a large one.
  for (Sizes sizes : {Sizes{60'000, 1, 64}, Sizes{2'000'003, 1, 40'000}, Sizes{3'000'017, kPeriod, kPeriod}})
    over_every_transport([&](const Transport&, Ends& ends) {
      run_ranks(2, [&](int rank) {
        End& end = *ends[rank];
        auto some = [&] { return sizes.least + end.random()() % (sizes.most - sizes.least + 1); };
        while (end.sent() < sizes.total || end.received() < sizes.total) {
          IoStatus out = IoStatus::kWouldBlock, in = IoStatus::kWouldBlock;
          const bool sends = end.sent() < sizes.total;
          if (sends) out = end.send(std::min<uint64_t>(some(), sizes.total - end.sent()));
          if (end.received() < sizes.total) in = end.receive(some());
          for (IoStatus it : {out, in}) WANT(it == IoStatus::kOk || it == IoStatus::kWouldBlock);
          if (out != IoStatus::kOk && in != IoStatus::kOk) WANT(end.sleep(sends));
        }
        end.drain();
      });
      for (auto& it : ends) WANT(it->sent() == sizes.total && it->received() == sizes.total);
    });
}

CASE("where nothing has come, nothing is received, and the side may sleep until something comes") {
  over_every_transport(
      [](const Transport&, Ends& ends) {
        End &a = *ends[0], &b = *ends[1];
        for (int round = 0; round < 3; ++round) {
          for (auto& it : ends) it->become_quiet();
          a.send_until(a.sent() + 100);
          Deadline limit = Deadline::after_ms(kWakeMs);
          while (b.quiet()) WANT(!limit.expired());
          b.receive_until(a.sent());
        }
      },
      Faulty::kNot);
}

CASE("what happens after a side has lain down wakes it: a byte, room, the end of the stream, the death of its peer") {
  enum class What { kByte, kRoom, kEnd, kDeath };
  for (What what : {What::kByte, What::kRoom, What::kEnd, What::kDeath})
    over_every_transport(
        [&](const Transport&, Ends& ends) {
          End &a = *ends[0], &b = *ends[1];
          b.become_quiet();
          if (what == What::kRoom) b.fill();
          WANT(b.lie_down(what == What::kRoom));
          if (what == What::kByte) a.send_until(1);
          if (what == What::kRoom) a.receive_until(b.sent() / 2);
          if (what == What::kEnd) a.channel().close_send();
          if (what == What::kDeath) ends[0].reset();
          WANT(b.woken());
          if (what == What::kByte) b.receive_until(1);
          if (what == What::kRoom) b.send_until(b.sent() + 1);
          if (what == What::kEnd || what == What::kDeath) WANT(b.end_of_stream() == IoStatus::kClosed);
        },
        Faulty::kNot);  // one that is faulty never lets its side sleep
}

CASE("a side that sleeps is woken by each byte") {
  over_every_transport([](const Transport&, Ends& ends) {
    constexpr uint64_t kRounds = 300;
    run_ranks(2, [&](int rank) {
      End& end = *ends[rank];
      for (uint64_t round = 1; round <= kRounds; ++round) {
        if (rank == 0) end.send_until(round);
        do WANT(end.sleep(false));
        while (end.receive(1) == IoStatus::kWouldBlock);
        WANT(end.received() == round);
        if (rank == 1) end.send_until(round);
      }
    });
  });
}

CASE("a channel that is full refuses, and a side that waits for room is woken when there is some") {
  over_every_transport([](const Transport&, Ends& ends) {
    End &a = *ends[0], &b = *ends[1];
    a.fill();
    WANT(a.sent() > 0);
    const uint64_t total = a.sent() + 3 * kPeriod;
    run_ranks(2, [&](int rank) {
      if (rank == 0) {
        a.send_until(total);
        a.drain();
      } else {
        b.receive_until(total);
      }
    });
    WANT(b.received() == total);
    b.send_until(1000);  // the other way was never blocked
    a.receive_until(1000);
  });
}

CASE("what was sent before close_send is received, then the end, again and again; the other way stays open") {
  for (uint64_t bytes : {0, 1, 5000})
    over_every_transport([&](const Transport&, Ends& ends) {
      End &a = *ends[0], &b = *ends[1];
      a.send_until(bytes);
      a.channel().close_send();
      for (int i = 0; i < 3; ++i) WANT(b.end_of_stream() == IoStatus::kClosed);
      WANT(b.received() == bytes);
      run_ranks(2, [&](int rank) { rank == 0 ? a.receive_until(200'000) : b.send_until(200'000); });
      b.channel().close_send();
      WANT(a.end_of_stream() == IoStatus::kClosed);
    });
}

CASE("a side that sleeps hears the end of the stream, and the death of its peer") {
  for (bool orderly : {true, false})
    over_every_transport([&](const Transport&, Ends& ends) {
      run_ranks(2, [&](int rank) {
        if (rank == 1)
          WANT(ends[1]->end_of_stream() == IoStatus::kClosed);
        else if (orderly)
          ends[0]->channel().close_send();
        else
          ends[0].reset();
      });
    });
}

CASE("what a peer sent before it died is received, then the end") {
  over_every_transport([](const Transport&, Ends& ends) {
    ends[0]->send_until(5000);
    ends[0].reset();
    for (int i = 0; i < 3; ++i) WANT(ends[1]->end_of_stream() == IoStatus::kClosed);
    WANT(ends[1]->received() == 5000);
    // without a receiver: it neither waits nor ends this process
    for (int i = 0; i < 3; ++i) (void)ends[1]->send(1000);
  });
}

CASE("a peer that dies with bytes unread, or with a full channel, is an end and not a wait") {
  for (bool full : {false, true})
    over_every_transport([&](const Transport&, Ends& ends) {
      if (full)
        ends[1]->fill();
      else
        ends[1]->send_until(1000);
      ends[0].reset();
      IoStatus end = ends[1]->end_of_stream();
      WANT(end == IoStatus::kClosed || end == IoStatus::kBroken);
    });
}

CASE("once a channel is drained, the end of its side loses nothing") {
  over_every_transport([](const Transport&, Ends& ends) {
    End& b = *ends[1];
    b.send_until(100);  // stays unread: a socket that is closed like that drops what it has not sent
    ends[0]->fill();
    const uint64_t sent = ends[0]->sent();
    for (Deadline limit = Deadline::after_ms(kWakeMs); !ends[0]->channel().drained();) {
      IoStatus status = b.receive(kPeriod);
      WANT(status == IoStatus::kOk || status == IoStatus::kWouldBlock);
      WANT(!limit.expired());
    }
    ends[0].reset();
    (void)b.end_of_stream();
    WANT(b.received() == sent);
  });
}

CASE("a direct channel shows bytes where they lie until they are used up; a stream has no reader for that") {
  over_every_transport(
      [](const Transport& transport, Ends& ends) {
        Channel &a = ends[0]->channel(), &b = ends[1]->channel();
        WANT((a.direct() != nullptr) == transport.direct && (b.direct() != nullptr) == transport.direct);
        if (!transport.direct) return;
        DirectReader& reader = *b.direct();
        std::span<const std::byte> bytes;
        ends[0]->send_until(640);
        std::array<std::byte, 64> room{};
        iovec piece{room.data(), room.size()};
        WANT(b.receive({&piece, 1}).status == IoStatus::kBroken);
        for (uint64_t used = 0; used < 5 * kPeriod; used += 640) {  // around a ring several times
          ends[0]->send_until(used + 2 * 640);
          WANT(reader.peek(bytes) == IoStatus::kOk && bytes.size() == 2 * 640);
          WANT(reinterpret_cast<uintptr_t>(bytes.data()) % DirectReader::kAlignment == 0);
          WANT(ends[1]->receive(640) == IoStatus::kOk);
        }
        WANT(reader.peek(bytes) == IoStatus::kOk);
        const std::vector<std::byte> before(bytes.begin(), bytes.end());
        ends[0]->fill();  // what comes later leaves alone what is shown
        WANT(std::equal(before.begin(), before.end(), bytes.begin()));
        std::span<const std::byte> again;
        WANT(reader.peek(again) == IoStatus::kOk && again.data() == bytes.data() && again.size() > bytes.size());
        ends[1]->receive_until(ends[0]->sent());
        WANT(reader.peek(bytes) == IoStatus::kWouldBlock && bytes.empty());
      },
      Faulty::kNot);
}

CASE("a channel says what it is") {
  over_every_transport([](const Transport& transport, Ends& ends) {
    for (auto& it : ends) WANT(it->channel().describe().find(transport.name) != std::string::npos);
  });
}

CASE("channels leave no descriptor behind") {
  const std::size_t before = open_descriptors();
  over_every_transport([](const Transport&, Ends& ends) {
    ends[0]->send_until(10);
    ends[1]->receive_until(10);
  });
  CHECK_EQ(open_descriptors(), before);
}

// ---- The table ----

CASE("each transport of the table has a name and a title of its own") {
  std::set<std::string_view> names{transport_setting(nullptr)}, titles;
  for (const Transport* it : transports()) {
    CHECK(!it->name.empty() && names.insert(it->name).second);
    CHECK(!it->title.empty() && titles.insert(it->title).second);
    CHECK(find_transport(it->name) == it && transport_named(it->name) == it && transport_setting(it) == it->name);
  }
  CHECK(transport_named("auto") == nullptr && find_transport("auto") == nullptr && find_transport("") == nullptr);
  std::string text = CHECK_THROWS(ErrorKind::kValue, transport_named("pigeon"));
  for (std::string_view name : names) CHECK(text.find(name) != std::string::npos);
  CHECK(choose_transport(nullptr, nullptr, false).first->open != nullptr);  // between any two hosts
}

CASE("two ranks choose alike: the best for auto, what one of them names, nothing where they name two") {
  auto open = [](std::vector<Fd>) { return std::unique_ptr<Channel>(); };
  const Transport memory{.name = "memory", .title = "memory", .same_host = true};
  const Transport socket{.name = "socket", .title = "socket", .same_host = true, .open = open};
  const Transport network{.name = "network", .title = "network", .open = open};
  const Transport other{.name = "other", .title = "other", .open = open};
  const std::array<const Transport*, 4> all{&memory, &socket, &network, &other};
  struct Row {
    const Transport *mine, *theirs;
    bool same_host;
    const Transport *first, *fallback;
    bool required;
  };
  const Transport* none = nullptr;
  for (const Row& row : {Row{none, none, true, &memory, &socket, false},
                         {none, none, false, &network, &network, false},
                         {&memory, none, true, &memory, &socket, true},
                         {&memory, none, false, &network, &network, false},
                         {&socket, none, true, &socket, &socket, true},
                         {&other, none, false, &other, &other, true},
                         {&other, &other, true, &other, &other, true},
                         {&memory, &network, true, none, none, false},
                         {&memory, &network, false, &network, &network, true},
                         {&other, &network, false, none, none, false},
                         {&memory, &socket, false, &network, &network, false}})
    for (bool swapped : {false, true}) {
      TransportChoice choice =
          choose_transport(swapped ? row.theirs : row.mine, swapped ? row.mine : row.theirs, row.same_host, all);
      CHECK(choice.first == row.first && choice.fallback == row.fallback && choice.required == row.required);
    }
}

}  // namespace ringdp::testing
