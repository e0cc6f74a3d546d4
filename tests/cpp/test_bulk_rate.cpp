// How fast bulk flows go: on made-up lines in made-up time, and in jobs whose paths only say that they are long.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include "base/naming.h"
#include "job.h"
#include "link/link_sender.h"
#include "transport/tcp.h"

namespace ringdp::testing {
namespace {

// A TCP connection that says its path is long, and as full as it may be: bulk goes at its first rate, or not much
// faster.
class LongChannel final : public Channel, private NetworkPath {
 public:
  explicit LongChannel(std::unique_ptr<Channel> inner) : inner_(std::move(inner)) {}

  IoResult send(std::span<const iovec> pieces) override { return inner_->send(pieces); }
  IoResult receive(std::span<const iovec> pieces) override { return inner_->receive(pieces); }
  bool drained() override { return inner_->drained(); }
  void close_send() override { inner_->close_send(); }
  int poll_fd() const override { return inner_->poll_fd(); }
  std::string describe() const override { return inner_->describe(); }
  NetworkPath* path() override { return this; }

 private:
  std::optional<Carried> carried() const override {
    return Carried{.bytes = 1000, .round_trip_us = 10'000 + BulkRate::kLittleQueueUs, .least_round_trip_us = 10'000};
  }

  std::unique_ptr<Channel> inner_;
};

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr auto kStep = microseconds(200);

// A line with a queue before it, and one sender on it that always has something.
class Line {
 public:
  Line(double bytes_per_s, microseconds round_trip) : bytes_per_s_(bytes_per_s), round_trip_(round_trip) {}

  // From now on others use so much of it, whatever queue they find.
  void others(double bytes_per_s) { others_ = bytes_per_s; }
  void most_sent(double bytes_per_s) { most_sent_ = bytes_per_s; }  // the sender's own limit

  struct Seen {
    double share = 0;  // of the line, that the sender had
    int64_t most_queue_us = 0;
  };

  Seen run(BulkRate& rate, Clock::duration time) {
    Seen seen;
    const double carried_before = carried_;
    const auto end = now_ + time;
    const double step_s = std::chrono::duration<double>(kStep).count();
    for (; now_ < end; now_ += kStep) {
      if (rate.wants_look(now_)) {
        const int64_t least = round_trip_.count();
        rate.look({static_cast<uint64_t>(carried_), least + static_cast<int64_t>(smooth_queue_us_), least}, now_);
      }
      credit_ = std::min(credit_ + most_sent_ * step_s, 4.0 * 64 * 1024);
      for (auto frame = rate.frame_bytes(); rate.may_send(now_) && credit_ >= static_cast<double>(frame);) {
        rate.sent(frame, now_);
        mine_ += static_cast<double>(frame);
        credit_ -= static_cast<double>(frame);
      }
      theirs_ += others_ * step_s;
      const double queue = mine_ + theirs_, moved = std::min(queue, bytes_per_s_ * step_s);
      const auto queue_us = static_cast<int64_t>(queue / bytes_per_s_ * 1e6);
      if (queue > 0) {
        const double of_mine = moved * mine_ / queue;
        carried_ += of_mine;
        mine_ -= of_mine;
        theirs_ -= moved - of_mine;
      }
      seen.most_queue_us = std::max(seen.most_queue_us, queue_us);
      under_way_.emplace_back(now_ + round_trip_, queue_us);
      while (under_way_.front().first <= now_) {  // its acknowledgement has come back
        smooth_queue_us_ += (static_cast<double>(under_way_.front().second) - smooth_queue_us_) * 0.02;
        under_way_.pop_front();
      }
    }
    seen.share = (carried_ - carried_before) / bytes_per_s_ / std::chrono::duration<double>(time).count();
    return seen;
  }

 private:
  const double bytes_per_s_;
  const microseconds round_trip_;
  double others_ = 0, most_sent_ = 1e12, credit_ = 0;
  double mine_ = 0, theirs_ = 0, carried_ = 0, smooth_queue_us_ = 0;
  std::deque<std::pair<Clock::time_point, int64_t>> under_way_;
  Clock::time_point now_{std::chrono::hours(1)};
};

CASE("a long line is filled, and what comes behind does not wait") {
  for (double mbit : {40.0, 100.0, 1000.0})
    for (auto round_trip : {milliseconds(10), milliseconds(50), milliseconds(200)}) {
      BulkRate rate;
      Line line(mbit * 1e6 / 8, round_trip);
      line.run(rate, 60 * round_trip);
      const Line::Seen seen = line.run(rate, 100 * round_trip);
      CHECK(seen.share > 0.8);
      CHECK(seen.most_queue_us < 24'000 + 60 * round_trip.count());
    }
}

CASE("the first packets that wait are few") {
  BulkRate rate;
  Line line(12'500'000, milliseconds(50));
  CHECK(line.run(rate, std::chrono::seconds(3)).most_queue_us < 60'000);
}

CASE("a sender that cannot go as fast does not make the rate grow without end") {
  BulkRate rate;
  Line line(125'000'000, milliseconds(50));
  line.most_sent(5'000'000);
  line.run(rate, std::chrono::seconds(10));
  CHECK(rate.bytes_per_s() < 12'000'000);
}

CASE("others' packets have the line, but for a half") {
  BulkRate rate;
  Line line(12'500'000, milliseconds(50));
  line.run(rate, std::chrono::seconds(5));
  line.others(11'000'000);
  line.run(rate, std::chrono::seconds(10));
  CHECK(line.run(rate, std::chrono::seconds(5)).share > 0.08);
  line.others(0);
  line.run(rate, std::chrono::seconds(10));
  CHECK(line.run(rate, std::chrono::seconds(5)).share > 0.8);
}

CASE("what is not bulk passes bulk that waits for its time, the ranks sleep meanwhile, and both sums are right") {
  EngineOptions options;
  options.wrap_channel = [](std::unique_ptr<Channel> channel, int) -> std::unique_ptr<Channel> {
    return std::make_unique<LongChannel>(std::move(channel));
  };
  MemoryStore store;
  run_ranks(2, [&](int rank) {
    RendezvousOptions rendezvous = rendezvous_options(rank, 2);
    rendezvous.links.transport = &tcp_transport();
    auto runtime = std::make_shared<Runtime>(store, rendezvous, options);
    auto group = [&](const char* name) {
      return std::make_unique<GroupHandle>(runtime, name, everybody(2), 30'000, AlgorithmTable{});
    };
    Rank self{rank, 2, runtime, group("everybody")}, other{rank, 2, runtime, group("everybody once more")};
    std::vector<float> large(2'000'000, 1.0F + static_cast<float>(rank)), small(10, 1.0F);
    std::shared_ptr<Work> bulk;
    {
      NamedScope scope("bulk", true);
      bulk = self.group->all_reduce(bytes_of(large), DType::kFloat32, ReduceOp::kSum, {});
    }
    other.wait(other.group->broadcast(bytes_of(small), DType::kFloat32, 0, {}));
    other.wait(other.group->all_reduce(bytes_of(small), DType::kFloat32, ReduceOp::kSum, {}));
    CHECK(!bulk->finished());
    CHECK(small == std::vector<float>(10, 2.0F));
    self.wait(bulk);
    CHECK(large == std::vector<float>(2'000'000, 3.0F));
  });
}

CASE("on a short path nothing is held back") {
  BulkRate rate;
  const Clock::time_point now{std::chrono::hours(1)};
  rate.look({0, 90'000, 100}, now);
  rate.sent(std::size_t{1} << 30, now);
  CHECK(rate.may_send(now));
  CHECK_EQ(rate.bytes_per_s(), 0.0);
}

CASE("a pause says nothing about the line") {
  BulkRate rate;
  Line line(12'500'000, milliseconds(50));
  line.run(rate, std::chrono::seconds(5));
  const double before = rate.bytes_per_s();
  rate.look({100, 300'000, 50'000}, Clock::time_point{std::chrono::hours(2)});
  CHECK_EQ(rate.bytes_per_s(), before);
}

}  // namespace
}  // namespace ringdp::testing
