// The steps of one connection while its ends prove who they are: both ends stepped by one thread, over loopback.
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "meet/handshake_attempt.h"
#include "testing.h"
#include "transport/tcp.h"

namespace ringdp::testing {
namespace {

using Event = HandshakeAttempt::Event;
using Stage = HandshakeAttempt::Stage;

HandshakeSelf rank(uint32_t number, std::byte secret = std::byte{7}) {
  HandshakeSelf self{.mine = {}, .secret = std::vector<std::byte>(32, secret), .patience = {.padding_ms = 5000}};
  self.mine.to = number;
  self.mine.world = 2;
  self.instance.fill(static_cast<std::byte>(number + 1));
  return self;
}

// Rank 1 dials rank 0, as always the higher rank does.
struct Ends {
  explicit Ends(HandshakeSelf dialling = rank(1)) : self{rank(0), std::move(dialling)} {
    int error_number = 0;
    auto listener = TcpListener::try_bind("127.0.0.1", 0, 16, error_number);
    REQUIRE(listener.has_value());
    dialled =
        std::make_unique<HandshakeAttempt>(self[1], HandshakeAttempt::Facts{.peer = 0, .address = listener->address()});
    auto caller = listener->accept(error_number);
    for (Deadline limit = Deadline::after_ms(5000); !caller && !limit.expired();)
      caller = listener->accept(error_number);
    REQUIRE(caller.has_value());
    accepted = std::make_unique<HandshakeAttempt>(std::move(caller->first), caller->second);
  }

  // Until this end has something for its owner to decide, or is over.
  Event next(HandshakeAttempt& end) {
    const HandshakeSelf& own = &end == dialled.get() ? self[1] : self[0];
    for (Deadline limit = Deadline::after_ms(5000); !end.over() && !limit.expired();)
      if (const Event event = end.advance(own); event != Event::kNone) return event;
    return Event::kNone;
  }

  HandshakeSelf self[2];
  std::unique_ptr<HandshakeAttempt> dialled, accepted;
};

}  // namespace

CASE("two ranks of a job prove each other, and the confirm says how many connections there are to be") {
  Ends it;
  CHECK_EQ(it.next(*it.dialled), Event::kConnected);
  it.dialled->greet(it.self[1], 0);
  CHECK_EQ(it.next(*it.accepted), Event::kHello);
  CHECK_EQ(it.accepted->facts().peer, -1);  // it has not been answered
  CHECK(it.accepted->facts().hello.type == HandshakeType::kHello && it.accepted->facts().hello.from == 1);
  it.accepted->reply(it.self[0]);
  CHECK(it.accepted->facts().peer == 1 && it.accepted->stage() == Stage::kAwaitConfirm);
  CHECK_EQ(it.next(*it.dialled), Event::kProven);
  it.dialled->confirm(it.self[1], 3);
  CHECK_EQ(it.next(*it.accepted), Event::kNone);
  for (HandshakeAttempt* end : {it.dialled.get(), it.accepted.get()})
    CHECK(end->stage() == Stage::kDone && end->facts().streams == 3 && !end->take_failure());
  const PeerSocket dialled = it.dialled->take_socket(it.self[1]), accepted = it.accepted->take_socket(it.self[0]);
  CHECK(dialled && accepted && dialled.protection.dialled && !accepted.protection.dialled);
  CHECK(dialled.protection.key == accepted.protection.key && dialled.protection.key != Digest{});
  const Nonce& nonce = it.accepted->facts().hello.nonce;
  CHECK(std::equal(it.self[1].instance.begin(), it.self[1].instance.end(), nonce.begin()));
}

CASE("who has another secret gets no answer") {
  Ends it(rank(1, std::byte{8}));
  CHECK_EQ(it.next(*it.dialled), Event::kConnected);
  it.dialled->greet(it.self[1], 0);
  CHECK_EQ(it.next(*it.accepted), Event::kNone);
  CHECK_EQ(it.accepted->take_failure()->why, std::string("no hello"));
  CHECK_EQ(it.next(*it.dialled), Event::kNone);
  const auto failure = it.dialled->take_failure();
  REQUIRE(failure.has_value());
  CHECK(!failure->final && failure->why == "it closed the connection");  // it may come back
}

CASE("a refusal is final, in words that name what differs") {
  Ends it;
  it.self[1].mine.world = 3;
  CHECK_EQ(it.next(*it.dialled), Event::kConnected);
  it.dialled->greet(it.self[1], 0);
  CHECK_EQ(it.next(*it.accepted), Event::kHello);
  const Refusal verdict = judge_hello(it.accepted->facts().hello, it.self[0].mine);
  CHECK_EQ(verdict, Refusal::kWorld);
  it.accepted->refuse(it.self[0], verdict);
  CHECK(it.accepted->stage() == Stage::kClosed && !it.accepted->take_failure());
  CHECK_EQ(it.next(*it.dialled), Event::kNone);
  const auto failure = it.dialled->take_failure();
  REQUIRE(failure.has_value());
  CHECK(failure->final && failure->why.starts_with("refused: the world size differs"));
  CHECK(!it.dialled->take_failure());  // told once
}

CASE("a rank with TLS and one without refuse each other, in words that say who has it") {
  for (const auto mode : {TlsMode::kSecret, TlsMode::kCertificates}) {
    Ends it;
    it.self[1].mine.tls = mode;
    CHECK_EQ(it.next(*it.dialled), Event::kConnected);
    it.dialled->greet(it.self[1], 0);
    CHECK_EQ(it.next(*it.accepted), Event::kHello);
    const Refusal verdict = judge_hello(it.accepted->facts().hello, it.self[0].mine);
    CHECK_EQ(verdict, Refusal::kTls);
    it.accepted->refuse(it.self[0], verdict);
    CHECK_EQ(it.next(*it.dialled), Event::kNone);
    const auto failure = it.dialled->take_failure();
    REQUIRE(failure.has_value());
    CHECK_EQ(failure->why, "refused: RINGDP_TLS differs: no TLS there, " + tls_mode_text(mode) + " here");
  }
}

CASE("a knock is all that is said, and no failure; neither is a connection that closes without a word") {
  Ends it;
  CHECK_EQ(it.next(*it.dialled), Event::kConnected);
  CHECK(it.dialled->knock(it.self[1], 0));
  CHECK(it.dialled->over() && !it.dialled->take_failure());
  CHECK_EQ(it.next(*it.accepted), Event::kHello);
  CHECK(it.accepted->facts().hello.type == HandshakeType::kKnock);
  Ends silent;
  silent.dialled->close();
  CHECK_EQ(silent.next(*silent.accepted), Event::kNone);
  CHECK_EQ(silent.accepted->take_failure()->why, std::string());
}

CASE("a confirm whose sender has not heard this reply proves nothing") {
  Ends it;
  CHECK_EQ(it.next(*it.dialled), Event::kConnected);
  it.dialled->greet(it.self[1], 0);
  CHECK_EQ(it.next(*it.accepted), Event::kHello);
  it.accepted->reply(it.self[0]);
  // As an attacker that has recorded another handshake of the same rank.
  HandshakeSocket socket(it.dialled->take_socket(it.self[1]).fd);
  CHECK(socket.send(it.self[1].fields(HandshakeType::kConfirm, 0), it.self[1].secret));
  CHECK_EQ(it.next(*it.accepted), Event::kNone);
  CHECK_EQ(it.accepted->take_failure()->why, std::string("a handshake was replayed"));
}

}  // namespace ringdp::testing
