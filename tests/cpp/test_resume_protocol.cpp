// The protocol by which a broken connection is made again (meet/redialler.h, link/link.h), as a model: every
// order in which frames are sent, acknowledged, read and forgotten, connections break, and messages of several
// attempts arrive. No frame is lost, comes twice or is missing when it should go again, and from every state a whole
// connection can be reached. Variants of the protocol that leave a rule out are caught. RINGDP_EXPLORE=1 explores more
// attempts and frames, which takes a minute.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "testing.h"

namespace ringdp::testing {
namespace {

constexpr int kMostConns = 4;
constexpr int kDialler = 0, kOther = 1;

struct Size {
  int frames = 1;  // each way
  int conns = 3;   // the first connection, and attempts
  int cuts = 1;    // by the network, at most
};

struct Rules {
  bool hold_forgets = false;         // a side that has stopped sending still drops frames
  bool settles_early = false;        // the dialler reads the old connection before the other side has stopped sending
  bool forgets_unheard = false;      // on a connection from which nothing has come yet
  bool takes_late_confirms = false;  // attempts before the last one go on, and may come about
};

// [0]: of the dialler and what it sends, [1]: of the other.
struct Conn {
  int8_t exists = 0;
  int8_t dead = 0;             // the network has cut it
  int8_t open[2] = {0, 0};     // sockets
  int8_t said = 0, heard = 0;  // handshake messages: hello, reply, confirm, frames taken, frames taken
  int8_t told[2] = {0, 0};     // frames taken
  int8_t sent[2] = {0, 0}, acked[2] = {0, 0}, read[2] = {0, 0};  // numbers of frames
  int8_t spoke[2] = {0, 0};                                      // a frame that has no number of its own here: "I read"
  int8_t has_heard[2] = {0, 0};                                  // it has come
};
struct End {
  int8_t next = 0, base = 0, taken = 0;  // frames made; not forgotten; received
  int8_t channel = 0;                    // a connection; -1: none
  int8_t holds = 0;
  int8_t attempt = -1;  // that has come so far that no other begins
  int8_t number = 0;    // of the last attempt
};
struct State {
  std::array<Conn, kMostConns> conns{};
  std::array<End, 2> ends{};
  int8_t cuts = 0;

  bool operator==(const State& other) const { return std::memcmp(this, &other, sizeof(State)) == 0; }
};
static_assert(std::has_unique_object_representations_v<State>);

struct Hash {
  std::size_t operator()(const State& state) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&state), sizeof(state)});
  }
};

class Model {
 public:
  explicit Model(Rules rules, Size size = {}) : rules_(rules), size_(size) {}

  // Explores all; returns the first violation, or an empty text.
  std::string explore() {
    add(start(), -1);
    for (std::size_t i = 0; i < states_.size() && problem_.empty(); ++i) {
      const State state = states_[i];
      at_ = static_cast<int>(i);
      step(state);
    }
    if (problem_.empty()) check_progress();
    return problem_;
  }
  std::size_t states() const { return states_.size(); }

  // Goes so many random ways from the start instead.
  std::string walk(int ways, unsigned seed) {
    random_.seed(seed);
    walks_ = true;
    for (int i = 0; i < ways && problem_.empty(); ++i) {
      State state = start();
      for (int steps = 0; steps < 300 && problem_.empty(); ++steps) {
        states_.clear();
        step(state);
        if (!states_.empty()) state = states_[random_() % states_.size()];
      }
    }
    return problem_;
  }

 private:
  // On random walks harmful events are rare: otherwise no connection would be established.
  bool may() { return !walks_ || random_() % 8 == 0; }
  static State start() {
    State out;
    out.conns[0].exists = out.conns[0].open[0] = out.conns[0].open[1] = 1;
    out.conns[0].said = out.conns[0].heard = 5;
    out.conns[0].has_heard[0] = out.conns[0].has_heard[1] = 1;
    return out;
  }
  void add(const State& state, int from) {
    auto [it, fresh] = numbers_.emplace(state, static_cast<int>(states_.size()));
    if (fresh) states_.push_back(state);
    if (from >= 0) edges_.emplace_back(it->second, from);
  }
  void go(const State& state) {
    if (walks_)
      states_.push_back(state);
    else
      add(state, at_);
  }
  void violated(const std::string& what) {
    if (problem_.empty()) problem_ = what;
  }

  static bool reachable(const Conn& it) { return it.exists && !it.dead && it.open[0] && it.open[1]; }

  void read_all(State& s, int e) {
    End& end = s.ends[static_cast<std::size_t>(e)];
    if (end.channel < 0) return;
    Conn& c = s.conns[static_cast<std::size_t>(end.channel)];
    while (c.read[1 - e] < c.acked[1 - e]) read_one(s, e);
  }
  void read_one(State& s, int e) {
    End& end = s.ends[static_cast<std::size_t>(e)];
    Conn& c = s.conns[static_cast<std::size_t>(end.channel)];
    if (c.read[1 - e] != end.taken) violated("a frame is missing or comes twice");
    ++c.read[1 - e];
    ++end.taken;
    c.has_heard[e] = 1;
  }
  void close(State& s, int e, int conn) {
    s.conns[static_cast<std::size_t>(conn)].open[e] = 0;
    End& end = s.ends[static_cast<std::size_t>(e)];
    if (end.channel == conn) end.channel = -1;
    if (end.attempt == conn) end.attempt = -1;
  }
  // Those of which the other side knows.
  void close_others(State& s, int conn) {
    for (int other = 1; other < size_.conns; ++other) {
      const Conn& it = s.conns[static_cast<std::size_t>(other)];
      if (other != conn && other != s.ends[kOther].channel && it.open[kOther] && it.heard > 0) close(s, kOther, other);
    }
  }
  // What arrives after the last look at the old connection and before it is closed is acknowledged, and never read.
  std::vector<State> settle(State s, int e) {
    read_all(s, e);
    const int old = s.ends[static_cast<std::size_t>(e)].channel;
    if (old < 0) return {s};
    std::vector<State> out;
    for (;;) {
      State closed = s;
      close(closed, e, old);
      out.push_back(closed);
      Conn& c = s.conns[static_cast<std::size_t>(old)];
      if (c.dead || c.acked[1 - e] == c.sent[1 - e]) return out;
      ++c.acked[1 - e];
    }
  }
  void resume(State& s, int e, int conn) {
    End& end = s.ends[static_cast<std::size_t>(e)];
    Conn& c = s.conns[static_cast<std::size_t>(conn)];
    const int8_t theirs = c.told[1 - e];
    if (theirs < end.base || theirs > end.next) violated("what the peer lacks was forgotten");
    end.base = theirs;
    end.channel = static_cast<int8_t>(conn);
    end.holds = 0;
    end.attempt = -1;
    c.sent[e] = c.acked[e] = c.read[e] = theirs;
  }

  void step(const State& s) {
    for (int e = 0; e < 2; ++e) end_steps(s, e);
    for (int i = 0; i < size_.conns; ++i) conn_steps(s, i);
    dial(s);
  }

  void end_steps(const State& s, int e) {
    const End& end = s.ends[static_cast<std::size_t>(e)];
    if (end.next < size_.frames) {
      State n = s;
      ++n.ends[static_cast<std::size_t>(e)].next;
      go(n);
    }
    if (end.channel < 0) return;
    const Conn& c = s.conns[static_cast<std::size_t>(end.channel)];
    const auto channel = static_cast<std::size_t>(end.channel);
    if (!end.holds && !c.dead && c.sent[e] < end.next) {
      State n = s;
      ++n.conns[channel].sent[e];
      go(n);
    }
    if (c.read[1 - e] < c.acked[1 - e]) {
      State n = s;
      read_one(n, e);
      go(n);
    } else if (c.dead || !c.open[1 - e]) {  // it ends, once all is read
      State n = s;
      close(n, e, end.channel);
      n.ends[static_cast<std::size_t>(e)].holds = 1;
      go(n);
    }
    const bool heard = c.has_heard[e] || rules_.forgets_unheard;
    if ((!end.holds || rules_.hold_forgets) && heard && end.base < c.acked[e]) {
      State n = s;
      n.ends[static_cast<std::size_t>(e)].base = c.acked[e];
      go(n);
    }
  }

  void conn_steps(const State& s, int i) {
    const Conn& c = s.conns[static_cast<std::size_t>(i)];
    if (!c.exists) return;
    const auto index = static_cast<std::size_t>(i);
    for (int e = 0; e < 2; ++e) {
      if (!c.dead && c.open[1 - e] && c.acked[e] < c.sent[e]) {
        State n = s;
        ++n.conns[index].acked[e];
        go(n);
      }
      // The word "I read" of a side that has resumed on it.
      if (reachable(c) && s.ends[static_cast<std::size_t>(e)].channel == i &&
          s.ends[static_cast<std::size_t>(1 - e)].channel == i && !c.has_heard[1 - e]) {
        State n = s;
        n.conns[index].has_heard[1 - e] = 1;
        go(n);
      }
    }
    if (!c.dead && s.cuts < size_.cuts && (c.open[0] || c.open[1]) && may()) {
      State n = s;
      n.conns[index].dead = 1;
      ++n.cuts;
      go(n);
    }
    if (c.heard >= 5) return;
    message(s, i);
    // Either side gives an attempt up, at any time.
    for (int e = 0; e < 2; ++e)
      if (c.open[e] && s.ends[static_cast<std::size_t>(e)].channel != i && may()) {
        State n = s;
        close(n, e, i);
        go(n);
      }
  }

  void message(const State& s, int i) {
    const auto index = static_cast<std::size_t>(i);
    const Conn& c = s.conns[index];
    if (c.said == c.heard) return;
    const int to = c.heard % 2 == 0 ? kOther : kDialler;
    if (c.dead || !c.open[to]) return;
    State n = s;
    ++n.conns[index].heard;
    End& end = n.ends[static_cast<std::size_t>(to)];
    switch (c.heard) {
      case 0:  // hello
        n.conns[index].said = 2;
        return go(n);
      case 1:  // reply
        if (end.attempt >= 0) return;
        end.holds = 1;
        end.attempt = static_cast<int8_t>(i);
        n.conns[index].said = 3;
        if (!rules_.settles_early) return go(n);
        for (State& settled : settle(n, kDialler)) {
          settled.conns[index].told[kDialler] = settled.ends[kDialler].taken;
          go(settled);
        }
        return;
      case 2:  // confirm
        if (i <= end.number && !rules_.takes_late_confirms) {
          close(n, kOther, i);
          return go(n);
        }
        end.number = static_cast<int8_t>(i);
        end.holds = 1;
        if (!rules_.takes_late_confirms) close_others(n, i);
        end.attempt = static_cast<int8_t>(i);
        for (State& settled : settle(n, kOther)) {
          settled.conns[index].told[kOther] = settled.ends[kOther].taken;
          settled.conns[index].said = 4;
          go(settled);
        }
        return;
      case 3:  // frames the other has taken
        for (State& settled : settle(n, kDialler)) {
          if (!rules_.settles_early) settled.conns[index].told[kDialler] = settled.ends[kDialler].taken;
          settled.conns[index].said = 5;
          resume(settled, kDialler, i);
          go(settled);
        }
        return;
      default:  // frames the dialler has taken
        resume(n, kOther, i);
        return go(n);
    }
  }

  // At any time: the host may only have been silent.
  void dial(const State& s) {
    if (s.ends[kDialler].attempt >= 0 || !may()) return;
    for (int i = 1; i < size_.conns; ++i) {
      if (s.conns[static_cast<std::size_t>(i)].exists) continue;
      State n = s;
      Conn& c = n.conns[static_cast<std::size_t>(i)];
      c.exists = c.open[0] = c.open[1] = 1;
      c.said = 1;
      return go(n);
    }
  }

  // Where attempts are left, all frames can still arrive.
  void check_progress() {
    std::sort(edges_.begin(), edges_.end());
    std::vector<char> good(states_.size(), 0);
    std::deque<int> open;
    for (std::size_t i = 0; i < states_.size(); ++i) {
      const auto& ends = states_[i].ends;
      const bool done = ends[0].taken == size_.frames && ends[1].taken == size_.frames;
      const bool used_up = states_[i].conns[static_cast<std::size_t>(size_.conns - 1)].exists != 0;
      if (!done && !used_up) continue;
      good[i] = 1;
      open.push_back(static_cast<int>(i));
    }
    for (; !open.empty(); open.pop_front()) {
      auto edge = std::lower_bound(edges_.begin(), edges_.end(), std::pair(open.front(), -1));
      for (; edge != edges_.end() && edge->first == open.front(); ++edge)
        if (!std::exchange(good[static_cast<std::size_t>(edge->second)], 1)) open.push_back(edge->second);
    }
    for (std::size_t i = 0; i < states_.size(); ++i)
      if (!good[i]) return violated("a state from which the connection is never whole again");
  }

  const Rules rules_;
  const Size size_;
  std::vector<State> states_;
  std::vector<std::pair<int, int>> edges_;  // a state, and one from which it is reached
  std::unordered_map<State, int, Hash> numbers_;
  int at_ = -1;
  bool walks_ = false;
  std::mt19937 random_;
  std::string problem_;
};

}  // namespace

constexpr Size kLarge{.frames = 2, .conns = 4, .cuts = 2};
constexpr unsigned kSeed = 1;

CASE("no frame is lost, in any order of events") {
  const Size size = std::getenv("RINGDP_EXPLORE") != nullptr ? kLarge : Size{};
  Model model({}, size);
  CHECK_EQ(model.explore(), std::string());
  CHECK(model.states() > 100'000);
  std::printf("     %zu states of %d frames each way, %d connections, %d cuts\n", model.states(), size.frames,
              size.conns, size.cuts);
}

CASE("nor with more frames, attempts and cuts, in random orders") {
  CHECK_EQ(Model({}, kLarge).walk(2000, kSeed), std::string());
}

CASE("a protocol without one of its rules is caught") {
  const std::string forgotten = "what the peer lacks was forgotten";
  constexpr int kWays = 200'000;
  CHECK_EQ(Model({.hold_forgets = true}, kLarge).walk(kWays, kSeed), forgotten);
  CHECK(!Model({.settles_early = true}, kLarge).walk(kWays, kSeed).empty());
  CHECK_EQ(Model({.forgets_unheard = true}, kLarge).walk(kWays, kSeed), forgotten);
  CHECK(!Model({.takes_late_confirms = true}, kLarge).walk(kWays, kSeed).empty());
}

}  // namespace ringdp::testing
