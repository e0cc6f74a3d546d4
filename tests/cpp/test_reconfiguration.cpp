// Reconfiguration with ranks as threads: repeated reconfigurations while other threads of every rank use the replaced
// group, as in torch's process group (torch/backend/reconfigurer.cpp).
#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "job.h"
#include "meet/reconfiguration.h"

namespace ringdp::testing {
namespace {

constexpr int64_t kTimeoutMs = 30'000;

// What a rank has at a time, and a thread that uses it all the while.
class Member {
 public:
  Member() : reconfiguration_(rendezvous_options(0, 1)) {}

  const std::string& handle() { return reconfiguration_.handle(); }

  void meet(int64_t uuid, const std::vector<std::string>& handles, int64_t timeout_ms = kTimeoutMs) {
    Reconfiguration::Outcome met = reconfiguration_.meet({uuid, handles}, timeout_ms, [] {});
    auto runtime = std::make_shared<Runtime>(met.rank, std::move(met.mesh), EngineOptions{});
    auto group = std::make_shared<GroupHandle>(runtime, "all", everybody(met.world), kTimeoutMs, AlgorithmTable{});
    {
      std::lock_guard lock(mutex_);
      std::swap(runtime_, runtime);
      std::swap(group_, group);
    }
    if (group) group->close("reconfigured");
    if (runtime) runtime->shut_down();
  }

  std::shared_ptr<GroupHandle> group() {
    std::lock_guard lock(mutex_);
    return group_;
  }

  // Calls what a rank never joins, so it ends when the group is replaced.
  void use(const std::atomic<bool>& stop) {
    std::vector<float> data(1000);
    while (!stop) {
      const auto group = this->group();
      try {
        group->wait(*group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
      } catch (const Error& error) {
        const std::string what = error.what();
        CHECK(what.find("reconfigured") != std::string::npos || what.find("left the job") != std::string::npos ||
              what.find("shut down") != std::string::npos || what.find("destroyed") != std::string::npos);
        ++ended;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }

  std::atomic<int> ended{0};

 private:
  Reconfiguration reconfiguration_;
  std::mutex mutex_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<GroupHandle> group_;
};

void check_sum(GroupHandle& group, int rank, int world) {
  std::vector<float> data(5000, static_cast<float>(rank + 1));
  group.wait(*group.all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
  CHECK_EQ(std::count(data.begin(), data.end(), static_cast<float>(world * (world + 1) / 2)), 5000);
}

std::vector<std::string> handles_of(std::vector<Member>& members, std::size_t count) {
  std::vector<std::string> handles;
  for (std::size_t i = 0; i < count; ++i) handles.push_back(members[i].handle());
  return handles;
}

}  // namespace

CASE("a group is replaced while threads wait for its operations") {
  constexpr int kWorld = 3;
  std::vector<Member> members(kWorld);
  const auto handles = handles_of(members, kWorld);
  std::atomic<bool> stop{false};
  run_ranks(kWorld, [&](int rank) { members[rank].meet(1, handles); });
  std::vector<std::thread> users;
  for (int rank = 1; rank < kWorld; ++rank)  // without rank 0, no operation completes
    users.emplace_back([&, rank] { members[rank].use(stop); });
  for (int64_t uuid = 2; uuid < 10; ++uuid)
    run_ranks(kWorld, [&](int rank) {
      members[rank].meet(uuid, handles);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    });
  stop = true;
  run_ranks(kWorld, [&](int rank) { members[rank].meet(100, handles); });  // ends what they wait for
  for (std::thread& it : users) it.join();
  for (int rank = 1; rank < kWorld; ++rank) CHECK(members[rank].ended > 2);
  run_ranks(kWorld, [&](int rank) {
    members[rank].meet(101, handles);
    check_sum(*members[rank].group(), rank, kWorld);
  });
}

CASE("members leave and come back") {
  constexpr int kWorld = 4;
  std::vector<Member> members(kWorld);
  for (int round = 0; round < 6; ++round)
    for (int count : {kWorld, kWorld - 1, 2}) {
      const auto handles = handles_of(members, static_cast<std::size_t>(count));
      run_ranks(count, [&](int rank) {
        members[rank].meet(1 + 10 * round + count, handles);
        check_sum(*members[rank].group(), rank, count);
      });
    }
}

CASE("an attempt that one member does not join leaves all as they were") {
  constexpr int kWorld = 3;
  std::vector<Member> members(kWorld);
  const auto handles = handles_of(members, kWorld);
  run_ranks(kWorld, [&](int rank) { members[rank].meet(1, handles); });
  for (int64_t uuid = 2; uuid < 5; ++uuid)
    run_ranks(kWorld, [&](int rank) {
      if (rank > 0) {
        try {
          members[rank].meet(uuid, handles, 200);
          CHECK(false);
        } catch (const Error& error) {
          CHECK(std::string(error.what()).find("may try again with another uuid") != std::string::npos);
        }
      }
      check_sum(*members[rank].group(), rank, kWorld);
    });
}

}  // namespace ringdp::testing
