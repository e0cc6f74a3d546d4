// A rank dies at any byte that it sends in a step, with ranks as threads, under each algorithm: what it has sent
// arrives, then its connections end. The others have the means of a plain group, of all where its part counts, of
// those that are left where it does not, all alike; and their inputs are as they were. RINGDP_CUTS=N dies at N places
// of each, 0 at every byte.
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <list>
#include <map>
#include <mutex>

#include "collective/compressed.h"
#include "engine/elastic_group.h"
#include "job.h"
#include "transport/channel.h"
#include "transport/rate_limit.h"

namespace ringdp::testing {
namespace {

constexpr int kWorld = 3;
constexpr int kSteps = 3;
constexpr int64_t kTimeoutMs = 30'000;

// Of one rank; its channels share it.
struct Death {
  std::atomic<bool> dead{false};
  std::atomic<int64_t> after{-1};  // bytes from now on; below zero: it lives
  std::atomic<uint64_t> sent{0};
  std::mutex mutex;
  std::vector<int> sockets;

  void die() {
    const std::lock_guard lock(mutex);
    dead = true;
    for (const int fd : sockets) ::shutdown(fd, SHUT_RDWR);
  }
};

class DyingChannel final : public Channel {
 public:
  DyingChannel(std::unique_ptr<Channel> inner, std::shared_ptr<Death> death)
      : inner_(std::move(inner)), death_(std::move(death)) {
    const std::lock_guard lock(death_->mutex);
    death_->sockets.push_back(inner_->poll_fd());
  }
  ~DyingChannel() override {
    const std::lock_guard lock(death_->mutex);
    std::erase(death_->sockets, inner_->poll_fd());
  }

  IoResult send(std::span<const iovec> pieces) override {
    if (death_->dead) return {IoStatus::kClosed, 0, 0};
    const int64_t after = death_->after;
    if (after == 0) death_->die();
    if (after == 0) return {IoStatus::kClosed, 0, 0};
    const IoResult result =
        after < 0 ? inner_->send(pieces) : inner_->send(first_bytes(pieces, static_cast<std::size_t>(after)));
    if (result.status == IoStatus::kOk) {
      death_->sent += result.bytes;
      if (after > 0) death_->after = std::max<int64_t>(after - static_cast<int64_t>(result.bytes), 0);
    }
    return result;
  }
  IoResult receive(std::span<const iovec> pieces) override {
    if (death_->dead) return {IoStatus::kClosed, 0, 0};
    return inner_->receive(pieces);
  }
  bool drained() override { return death_->dead || inner_->drained(); }
  void close_send() override {
    if (!death_->dead) inner_->close_send();
  }
  int poll_fd() const override { return inner_->poll_fd(); }
  std::string describe() const override { return "dying " + inner_->describe(); }

 private:
  std::unique_ptr<Channel> inner_;
  const std::shared_ptr<Death> death_;
};

struct Dead {};

// A rank that has died takes no part in an agreement.
class LivingAgreement final : public Agreement {
 public:
  LivingAgreement(Store& store, std::shared_ptr<Death> death) : store_(store), death_(std::move(death)) {}

  Decision agree(uint64_t view, const std::vector<int>& members, int self, const MemberState& mine,
                 const Unreachable& unreachable, const Look& look) override {
    if (death_->dead) throw Dead();
    return StoreAgreement(std::make_unique<SharedStore>(store_)).agree(view, members, self, mine, unreachable, look);
  }
  Decision propose(uint64_t view, int self, const Decision& decision) override {
    if (death_->dead) throw Dead();
    return StoreAgreement(std::make_unique<SharedStore>(store_)).propose(view, self, decision);
  }

 private:
  Store& store_;
  const std::shared_ptr<Death> death_;
};

struct Trial {
  const char* name;
  AlgorithmTable table;
  std::size_t count;
  bool rank_order = false;
  bool codes = false;
};

const std::vector<Trial> kTrials{
    {"ring", kNeverSmall, 300},
    {"fold", kFoldAlways, 300},
    {"in pairs", kInPairs, 300},
    {"in rank order", kNeverSmall, 300, true},
    {"int8", kNeverSmall, 1500, false, true},
};

std::vector<float> gradient(const Trial& trial, int place, int step) {
  std::vector<float> values(trial.count);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = 1.0F / static_cast<float>(1 + place * 7 + step * 13 + static_cast<int>(i) % 101);
  return values;
}

std::shared_ptr<Work> mean(const Trial& trial, GroupHandle& group, std::vector<float>& input,
                           std::vector<float>& result) {
  if (trial.codes) {
    std::vector<CompressedSection> sections{{.x = input.data(), .to = result.data(), .count = input.size()}};
    return group.all_reduce_compressed(
        std::move(sections), {.codec = CodecId::kInt8, .divisor = static_cast<std::size_t>(group.view().size)}, {});
  }
  CallOptions options;
  options.input = std::as_bytes(std::span(input));
  return group.all_reduce(bytes_of(result), DType::kFloat32, ReduceOp::kAvg, std::move(options));
}

std::vector<float> plain(const Trial& trial, const std::vector<int>& places, int step) {
  std::vector<float> out;
  std::mutex mutex;
  run_job(static_cast<int>(places.size()), trial.table, [&](Rank& self) {
    if (trial.rank_order) self.group->add_in_rank_order();
    std::vector<float> input = gradient(trial, places[static_cast<std::size_t>(self.rank)], step), result(input.size());
    self.wait(mean(trial, *self.group, input, result));
    const std::lock_guard lock(mutex);
    out = result;
  });
  return out;
}

// By place, the means of those that live to the end. `victim` dies when it has sent `after` bytes of step 1; below
// zero: it does not. Returns how many bytes it has sent in that step.
uint64_t live(const Trial& trial, int victim, int64_t after, std::map<int, std::vector<std::vector<float>>>& lived) {
  MemoryStore store;
  const AlgorithmTables tables(trial.table);
  std::mutex mutex;
  uint64_t sent = 0;
  run_ranks(kWorld, [&](int place) {
    const auto death = std::make_shared<Death>();
    EngineOptions options;
    options.heal_ms = 0;  // a connection that is cut belongs to a rank that has died
    options.wrap_channel = [&](std::unique_ptr<Channel> channel, int) -> std::unique_ptr<Channel> {
      return std::make_unique<DyingChannel>(std::move(channel), death);
    };
    RendezvousOptions rendezvous = rendezvous_options(place, kWorld);
    rendezvous.links.transport = transport_named("tcp");
    rendezvous.links.heals = false;
    std::list<std::vector<float>> memory;  // a rank that dies leaves operations under way
    auto runtime = std::make_shared<Runtime>(store, rendezvous, options);
    const auto elastic = ElasticGroup::make(runtime, "all", everybody(kWorld), kTimeoutMs, tables,
                                            std::make_unique<LivingAgreement>(store, death));
    if (trial.rank_order) elastic->group()->add_in_rank_order();
    std::vector<std::vector<float>> means;
    try {
      for (int step = 0; step < kSteps; ++step) {
        std::vector<float>& input = memory.emplace_back(gradient(trial, place, step));
        if (place == victim && step == 1) {
          death->sent = 0;
          death->after = after;
        }
        for (bool counts = false; !counts;) {
          std::vector<float>& result = memory.emplace_back(input.size(), -1.0F);
          const UnitScope scope;
          const uint64_t unit = elastic->begin_unit({.what = "a step"}), view = elastic->view();
          try {
            const auto group = elastic->group();
            group->wait(*mean(trial, *group, input, result));
            elastic->commit(unit);
            counts = true;
          } catch (const Error& error) {
            if (death->dead) throw Dead();
            if (!is_loss(error)) throw;
            counts = elastic->change(unit, view) == ElasticGroup::Outcome::kCounts;
          }
          if (counts) means.push_back(result);
        }
        CHECK(input == gradient(trial, place, step));
        if (place == victim && step == 1) sent = death->sent;
      }
    } catch (const Dead&) {
      return;
    }
    const std::lock_guard lock(mutex);
    lived[place] = means;
  });
  return sent;
}

void sweep(const Trial& trial, int victim) {
  std::vector<int> left = everybody(kWorld);
  std::erase(left, victim);
  const auto before = plain(trial, everybody(kWorld), 0), with = plain(trial, everybody(kWorld), 1),
             without = plain(trial, left, 1), after = plain(trial, left, 2),
             nobody_dies = plain(trial, everybody(kWorld), 2);
  std::map<int, std::vector<std::vector<float>>> lived;
  const uint64_t bytes = live(trial, victim, -1, lived);
  CHECK_EQ(lived.size(), static_cast<std::size_t>(kWorld));
  for (const auto& [place, means] : lived) CHECK(means == std::vector({before, with, nobody_dies}));
  const char* setting = std::getenv("RINGDP_CUTS");
  const uint64_t count = setting != nullptr ? static_cast<uint64_t>(std::atoll(setting)) : 4;
  const uint64_t cuts = count == 0 ? bytes + 1 : count;
  uint64_t redone = 0;
  for (uint64_t i = 0; i < cuts; ++i) {
    const uint64_t at = count == 0 ? i : bytes * i / std::max<uint64_t>(cuts - 1, 1);
    lived.clear();
    live(trial, victim, static_cast<int64_t>(at), lived);
    bool good = lived.size() == kWorld - 1 && lived.count(victim) == 0;
    for (const auto& [place, means] : lived) {
      good = good && means.size() == kSteps && means[0] == before && means[2] == after;
      good = good && (means[1] == with || means[1] == without) && means == lived.begin()->second;
    }
    redone += lived.begin()->second[1] == without ? 1 : 0;
    if (!good)
      report_failure(__FILE__, __LINE__,
                     std::string(trial.name) + ", rank " + std::to_string(victim) + " dies after " +
                         std::to_string(at) + " of " + std::to_string(bytes) + " bytes");
  }
  CHECK(redone > 0);
  std::printf(
      "     %s, rank %d: dead after each of %llu numbers of bytes up to %llu; the step was made again in %llu\n",
      trial.name, victim, static_cast<unsigned long long>(cuts), static_cast<unsigned long long>(bytes),
      static_cast<unsigned long long>(redone));
}

}  // namespace

CASE("a rank dies at any byte of a step: ring") { sweep(kTrials[0], 1); }
CASE("a rank dies at any byte of a step: fold") { sweep(kTrials[1], 2); }
CASE("a rank dies at any byte of a step: in pairs") { sweep(kTrials[2], 0); }
CASE("a rank dies at any byte of a step: in rank order") { sweep(kTrials[3], 1); }
CASE("a rank dies at any byte of a step: int8") { sweep(kTrials[4], 0); }

}  // namespace ringdp::testing
