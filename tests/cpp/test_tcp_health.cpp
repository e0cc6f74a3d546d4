// What TcpHealth makes of a connection's counters: numbers and times that the cases make up, looked at twice a second.
#include "testing.h"
#include "transport/tcp_health.h"

namespace ringdp::testing {
namespace {

using std::chrono::milliseconds;

// A connection whose kernel retransmits after 0.2, 0.6, 1.4, 3.0, 6.2 s, and so on, what it sent at the start.
class Connection {
 public:
  void pass(int64_t ms) { at_ms_ += ms; }
  void step() {
    pass(500);
    counters.since_ack_ms += 500;
    while (at_ms_ >= next_ms_ && counters.unacknowledged > 0) {
      ++counters.retransmitted;
      next_ms_ += pause_ms_ *= 2;
    }
    look();
  }
  void look() { health.look(counters, now()); }
  Clock::time_point now() const { return start_ + milliseconds(at_ms_); }
  int64_t at_ms() const { return at_ms_; }
  int64_t held_up_ms() const { return health.held_up_ms(now()); }
  int64_t silence_ms() const { return health.silence_ms(now()); }

  TcpHealth::Counters counters{.unacknowledged = 3, .packet_bytes = 1448, .under_way_bytes = 3 * 1448};

 private:
  const Clock::time_point start_ = Clock::now();
  int64_t at_ms_ = 0, next_ms_ = 200, pause_ms_ = 200;

 public:
  TcpHealth health{start_};
};

}  // namespace

CASE("nothing arrives, and the peer's keepalive does: held up after four seconds and two retransmissions") {
  Connection it;
  int64_t found_ms = 0;
  while (found_ms == 0 && it.at_ms() < 20'000) {
    if (it.at_ms() % 1000 == 500) ++it.counters.received;
    it.step();
    CHECK(it.silence_ms() <= 1000);
    if (it.held_up_ms() >= 4000) found_ms = it.at_ms();
  }
  CHECK(found_ms >= 4000 && found_ms <= 7000);
  CHECK_EQ(it.health.packet_bytes_under_way(), std::size_t{1448});
}

CASE("nothing arrives in either direction: the host's answer on another connection decides") {
  for (bool answers : {true, false}) {
    Connection it;
    int64_t held_up_ms = 0, silent_ms = 0;
    while (held_up_ms == 0 && silent_ms == 0 && it.at_ms() < 20'000) {
      it.step();
      if (it.health.doubtful(it.now()) && answers) it.health.answered_elsewhere(it.now());
      if (it.held_up_ms() >= 4000) held_up_ms = it.at_ms();
      if (it.silence_ms() >= 4000) silent_ms = it.at_ms();
    }
    CHECK_EQ(silent_ms, int64_t{answers ? 0 : 4000});
    CHECK(answers == (held_up_ms > 0) && held_up_ms <= 7000);
  }
}

CASE("packets that the first hop refuses are held up, those that a closed window holds back are not") {
  for (bool window : {true, false}) {
    Connection it;
    it.counters.unacknowledged = 0;
    it.counters.waiting_bytes = 66'940;
    it.counters.window_bytes = window ? 100'000 : 0;
    int64_t found_ms = 0;
    while (found_ms == 0 && it.at_ms() < 20'000) {
      ++it.counters.sent;
      ++it.counters.probes;
      if (it.at_ms() % 1000 == 500) ++it.counters.received;
      it.step();
      if (it.held_up_ms() >= 4000) found_ms = it.at_ms();
    }
    CHECK(window ? found_ms >= 4000 && found_ms <= 5500 : found_ms == 0);
    if (window) CHECK_EQ(it.health.packet_bytes_under_way(), std::size_t{1448});
  }
}

CASE("a network that fails for a while and comes back holds nothing up, however late the next retransmission") {
  Connection it;
  it.counters.received = 7;  // acknowledgements of what came before
  while (it.at_ms() < 13'000) it.step();
  while (it.at_ms() < 25'400) {
    ++it.counters.received;
    it.step();
    CHECK_EQ(it.held_up_ms(), int64_t{0});
  }
}

CASE("what advances is not held up: acknowledged bytes, a smaller packet, an empty queue, a process that was stopped") {
  for (int kind = 0; kind < 4; ++kind) {
    Connection it;
    for (int i = 0; i < 60; ++i) {
      ++it.counters.received;
      if (i % 6 == 5 && kind == 0) it.counters.acknowledged += 1448;
      if (i % 6 == 5 && kind == 1) it.counters.packet_bytes /= 2;
      if (i % 6 == 5 && kind == 2) it.counters.unacknowledged = 0;
      if (i % 6 == 5 && kind == 3) it.pass(2500);
      it.step();
      it.counters.unacknowledged = 3;
      CHECK(it.held_up_ms() < 4000);
    }
  }
}

CASE("a reset after a while in which this process did not look says nothing of what was under way before") {
  for (bool looked : {true, false}) {
    Connection it;
    it.step();
    for (int i = 0; i < 9; ++i) looked ? it.step() : it.pass(500);
    it.health.note_reset(it.now());
    CHECK(looked == (it.held_up_ms() >= 4000));
    if (!looked) CHECK_EQ(it.held_up_ms(), int64_t{0});
  }
}

CASE("a host that answered and then is gone is silent, not held up") {
  Connection it;
  for (int i = 0; i < 4; ++i) {
    ++it.counters.received;
    it.step();
  }
  int64_t silent_ms = 0;
  while (silent_ms == 0 && it.at_ms() < 20'000) {
    it.step();
    CHECK(it.held_up_ms() < 4000);
    if (it.silence_ms() >= 4000) silent_ms = it.at_ms();
  }
  CHECK_EQ(silent_ms, int64_t{6000});
}

}  // namespace ringdp::testing
