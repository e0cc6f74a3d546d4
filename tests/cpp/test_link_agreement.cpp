// Members agree over their connections, ranks as threads: one is cut off, or two, or the leader after each of its messages.
#include <atomic>
#include <barrier>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "dead_channel.h"
#include "engine/view_mail.h"
#include "job.h"
#include "membership/link_agreement.h"

namespace ringdp::testing {
namespace {

constexpr uint64_t kGroup = 77;
constexpr uint64_t kUnit = 41;  // under way when the members are lost

struct Dead {};  // thrown by a rank that is killed

// The rank dies instead of sending its n-th message.
class Mortal final : public ViewPost {
 public:
  Mortal(std::unique_ptr<ViewPost> inner, int lives, std::function<void()> die)
      : inner_(std::move(inner)), lives_(lives), die_(std::move(die)) {}
  void send(int place, std::vector<std::byte> bytes) override {
    if (lives_-- == 0) die_();
    inner_->send(place, std::move(bytes));
  }
  Letters receive() override { return inner_->receive(); }
  std::vector<int> unreachable(const std::vector<int>& places) override { return inner_->unreachable(places); }

 private:
  std::unique_ptr<ViewPost> inner_;
  int lives_;
  const std::function<void()> die_;
};

struct Fates {
  int world = 3;
  std::set<int> cut;           // dead before anybody speaks
  std::map<int, int> dies_at;  // by place: dies instead of sending this message
  std::set<int> not_done;      // with the unit that is under way
  std::map<int, int> late_ms;  // comes so much later
};

struct Lived {
  std::map<int, std::vector<ViewDecision>> decisions;  // by place, of those that live
  double seconds = 0;                                  // of the slowest
};

Lived live(const Fates& fates) {
  std::vector<std::atomic<bool>> dead(static_cast<std::size_t>(fates.world));
  const auto is_dead = [&](int place) { return dead[static_cast<std::size_t>(place)].load(); };
  const std::string job = "test-" + std::to_string(std::random_device()());
  MemoryStore store;
  Lived lived;
  std::mutex mutex;
  std::barrier everybody_ready(fates.world);
  run_ranks(fates.world, [&](int place) {
    EngineOptions engine_options;
    engine_options.wrap_channel = [&, place](std::unique_ptr<Channel> channel, int peer) -> std::unique_ptr<Channel> {
      return std::make_unique<DeadChannel>(std::move(channel), dead[static_cast<std::size_t>(place)],
                                           dead[static_cast<std::size_t>(peer)]);
    };
    RendezvousOptions rendezvous = rendezvous_options(place, fates.world);
    rendezvous.transport = transport_named("tcp");
    const auto runtime = std::make_shared<Runtime>(store, rendezvous, engine_options);
    GroupHandle group(runtime, "everybody", everybody(fates.world), 30'000, AlgorithmTable{});

    auto pages = std::make_unique<VotePages>(job, place);
    group.wait(*group.barrier({}));
    pages->open(everybody(fates.world));
    group.wait(*group.barrier({}));
    pages->remove_name();
    pages->ask_instead(is_dead);

    const auto die = [&] {
      dead[static_cast<std::size_t>(place)] = true;
      throw Dead();
    };
    const bool mortal = fates.dies_at.contains(place);
    auto post = std::make_unique<Mortal>(runtime->engine().view_mail().post(kGroup),
                                         mortal ? fates.dies_at.at(place) : INT32_MAX, die);
    LinkAgreement agreement(std::move(post), std::move(pages));
    MemberView view{1, everybody(fates.world)};
    ViewConsensus change(view, place, LinkAgreement::options());
    change.units() = Units(view, place, kUnit);
    change.units().begin();
    if (!fates.not_done.contains(place)) change.units().done(kUnit);
    change.explain("rank " + std::to_string(place) + " has seen it");

    everybody_ready.arrive_and_wait();  // nobody dies in the barriers above
    const auto begin = Clock::now();
    std::vector<ViewDecision> decisions;
    try {
      if (fates.cut.contains(place)) die();
      for (const int victim : fates.cut)
        while (!is_dead(victim)) std::this_thread::yield();
      if (fates.late_ms.contains(place))
        std::this_thread::sleep_for(std::chrono::milliseconds(fates.late_ms.at(place)));
      const auto gone = [&](const ViewDecision& it) {
        return std::any_of(it.places.begin(), it.places.end(), is_dead);
      };
      do {
        if (!decisions.empty()) change = change.next();
        decisions.push_back(agreement.agree(change, [&](const std::vector<int>&) {
          if (Clock::now() - begin > std::chrono::seconds(20)) throw Error(ErrorKind::kTimeout, "no agreement in 20 s");
        }));
        // Who was to die in the change and has not got so far dies after it.
        if (mortal) die();
        for (const auto& [victim, message] : fates.dies_at)
          while (!is_dead(victim)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      } while (decisions.back().keeps(place) && gone(decisions.back()));
    } catch (const Dead&) {
      return;
    }
    const std::chrono::duration<double> took = Clock::now() - begin;
    const std::lock_guard lock(mutex);
    lived.decisions[place] = decisions;
    lived.seconds = std::max(lived.seconds, took.count());
  });
  return lived;
}

// All that live have decided the same, and are the last view's members.
ViewDecision agreed(const Fates& fates, const Lived& lived) {
  std::vector<int> survivors;
  for (int place = 0; place < fates.world; ++place)
    if (!fates.cut.contains(place) && !fates.dies_at.contains(place)) survivors.push_back(place);
  REQUIRE(lived.decisions.size() == survivors.size());
  const std::vector<ViewDecision>& first = lived.decisions.begin()->second;
  for (const auto& [place, decisions] : lived.decisions) CHECK(decisions == first);
  CHECK(first.back().places == survivors);
  for (std::size_t i = 0; i < first.size(); ++i) CHECK_EQ(first[i].view, i + 2);
  return first.front();
}

CASE("one of three is cut off, and the unit that the others have done stands") {
  for (const int victim : {0, 1, 2}) {
    const Fates fates{3, {victim}, {}, {}, {}};
    const ViewDecision decision = agreed(fates, live(fates));
    CHECK(decision.units == std::vector<UnitOutcome>({{kUnit, false}}));
    CHECK(decision.cause.starts_with("rank "));
  }
}

CASE("a unit that one of them has not done is redone") {
  const Fates fates{3, {0}, {}, {2}, {}};
  CHECK(agreed(fates, live(fates)).units == std::vector<UnitOutcome>({{kUnit, true}}));
}

CASE("all but one of a host are cut off at once: their votes are in their pages") {
  const Fates fates{4, {0, 1, 3}, {}, {}, {}};
  agreed(fates, live(fates));
  const Fates two{2, {0}, {}, {}, {}};
  agreed(two, live(two));
}

CASE("a member that comes late is waited for") {
  Fates fates{3, {2}, {}, {1}, {{1, 300}}};
  const Lived lived = live(fates);
  CHECK(agreed(fates, lived).units == std::vector<UnitOutcome>({{kUnit, true}}));
  CHECK(lived.seconds > 0.29);
}

CASE("the leader dies instead of sending each of its messages") {
  double slowest = 0;
  for (int message = 0; message < 9; ++message) {
    const Fates fates{4, {3}, {{0, message}}, {}, {}};
    const Lived lived = live(fates);
    agreed(fates, lived);
    slowest = std::max(slowest, lived.seconds);
  }
  std::printf("     the slowest took %.0f ms\n", slowest * 1000);
}

CASE("a member dies instead of sending each of its messages") {
  for (int message = 0; message < 4; ++message) {
    const Fates fates{4, {3}, {{2, message}}, {}, {}};
    agreed(fates, live(fates));
  }
}

CASE("a page: the last vote that was written whole, and none that was never written") {
  const std::string job = "test-" + std::to_string(std::random_device()());
  VotePages mine(job, 0);
  VotePages other(job, 1);
  CHECK_THROWS(ErrorKind::kSystem, VotePages(job, 0));
  mine.open({0, 1});
  other.open({1, 0});
  mine.remove_name();
  CHECK(other.read(0).empty());
  for (int i = 1; i < 5; ++i) {
    const std::vector<std::byte> vote(static_cast<std::size_t>(i) * 1000, static_cast<std::byte>(i));
    mine.write(0, vote);
    CHECK(other.read(0) == vote);
  }
  CHECK(!other.dead(0));
  mine.leave();
  CHECK(other.dead(0));
  CHECK_THROWS(ErrorKind::kSystem, VotePages(job, 5).open({0}));
}

}  // namespace
}  // namespace ringdp::testing
