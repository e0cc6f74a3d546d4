// What ranks say of each other while nothing moves: notices, who is blamed for a timeout, names in disagreements, news
// that reaches idle ranks; and the texts that carry it.
#include <mutex>

#include "base/log.h"
#include "base/naming.h"
#include "base/process_stacks.h"
#include "base/text.h"
#include "job.h"
#include "link/frame.h"

namespace ringdp::testing {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Whether `text` speaks of a rank as somebody: "rank 3 (host …)".
bool names(const std::string& text, int rank) { return contains(text, "rank " + std::to_string(rank) + " (host "); }

// Waits for another thread of the test, not for the network.
template <typename Condition>
void await(Condition condition) {
  auto end = Clock::now() + std::chrono::seconds(20);
  while (!condition() && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(condition());
}

// The warnings of all ranks while this lives.
class Listener {
 public:
  Listener() {
    set_log_sink([this](LogLevel level, const std::string& text) {
      if (level < LogLevel::kWarning) return;
      std::lock_guard lock(mutex_);
      lines_.push_back(text);
    });
  }
  ~Listener() { set_log_sink({}); }
  std::vector<std::string> lines() {
    std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

std::shared_ptr<Work> reduce(Rank& self, std::vector<float>& data) {
  return self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {});
}

}  // namespace

CASE("a rank that has not called is told of in the log, with what it did last, and nothing fails") {
  Listener listener;
  EngineOptions options;
  options.stall_notice_ms = 400;
  std::atomic<int> ready{0};
  auto noticed = [&] {
    int ranks = 0;
    for (int rank : {0, 1, 3})
      for (const std::string& line : listener.lines())
        if (line.starts_with("rank " + std::to_string(rank) + " (host ") && contains(line, "its process answers")) {
          ++ranks;
          break;
        }
    return ranks == 3;
  };
  auto body = [&](Rank& self) {
    std::vector<float> data(1000, 1.0F);
    self.wait(self.group->barrier({}));
    ++ready;
    if (self.rank == 2) await(noticed);  // busy with something else
    self.wait(reduce(self, data));
    CHECK_EQ(data[999], 4.0F);
    self.wait(self.group->barrier({}));
  };
  run_job(4, kNeverSmall, body, 30'000, options);
  for (const std::string& line : listener.lines()) {
    CHECK(contains(line, "all_reduce #2 (float32[1000], SUM)"));
    std::string about = line.substr(line.find("\nfor "));
    CHECK(names(about, 2));
    CHECK(!names(about, 0) && !names(about, 1) && !names(about, 3));
    if (contains(line, "its process answers")) CHECK(contains(line, "its last one here was barrier #1"));
  }
}

CASE("the stacks of the rank that has not called are fetched from it, and its script's frame stands in the notice") {
  Listener listener;
  std::atomic<int> asked{0};
  set_stack_source({[&](int64_t) {
                      ++asked;
                      return "Main thread (most recent call first):\n  File \"/lib/q.py\", line 3 in get\n"
                             "  File \"/home/me/train.py\", line 88 in load\x1b[2J\n\nThread b:\n";
                    },
                    {},
                    {"/lib/"}});
  EngineOptions options;
  options.stall_notice_ms = 300;
  auto noticed = [&] {
    for (const std::string& line : listener.lines())
      if (contains(line, "its script is at train.py:88 in load")) return true;
    return false;
  };
  auto body = [&](Rank& self) {
    std::vector<float> data(10, 1.0F);
    self.wait(self.group->barrier({}));
    if (self.rank == 2) await(noticed);
    self.wait(reduce(self, data));
    self.wait(self.group->barrier({}));
  };
  run_job(3, kNeverSmall, body, 30'000, options);
  set_stack_source({});
  CHECK(asked >= 1);
  for (const std::string& line : listener.lines()) {
    CHECK(!contains(line, "\x1b"));  // what a peer sends goes to terminals
    CHECK(!contains(line, "q.py"));
  }
}

CASE("the frame of the script is the innermost one that is not Python's or a package's, of the first thread") {
  set_stack_source({{}, {}, {"/lib/"}});
  const std::string head = "Current thread 0x1 (most recent call first):\n";
  CHECK_EQ(frame_of_script(""), "");
  CHECK_EQ(frame_of_script("(C code holds Python's lock)\n" + head + "  File \"/lib/a.py\", line 1 in f\n"),
           "a.py:1 in f");
  CHECK_EQ(frame_of_script(head + "  File \"<frozen os>\", line 1 in f\n    code\n  File \"b.py\", line 2 in g\n"),
           "b.py:2 in g");
  CHECK_EQ(frame_of_script(head + "  File \"/lib/a.py\", line 1 in f\n\nThread 2:\n  File \"b.py\", line 2 in g\n"),
           "a.py:1 in f");
  set_stack_source({});
}

CASE("a rank that has not called because it waits in an earlier operation is not the one that is named") {
  Listener listener;
  EngineOptions options;
  options.stall_notice_ms = 400;
  auto noticed = [&] {
    auto lines = listener.lines();
    auto it_is = [](const std::string& line) { return line.starts_with("rank 0 (host ") && contains(line, " #3 "); };
    return std::any_of(lines.begin(), lines.end(), it_is);
  };
  auto body = [&](Rank& self) {
    std::vector<float> data(10, 1.0F), gathered(30);
    self.wait(self.group->barrier({}));
    if (self.rank == 1) await(noticed);  // busy with something else
    auto blocks = std::vector<std::span<std::byte>>();
    for (std::size_t i = 0; self.rank == 2 && i < 3; ++i)
      blocks.push_back(std::as_writable_bytes(std::span(gathered)).subspan(i * 40, 40));
    self.wait(self.group->gather(bytes_of(data), blocks, DType::kFloat32, 2, {}));  // rank 0 only sends, and goes on
    self.wait(reduce(self, data));
    self.wait(self.group->barrier({}));
  };
  run_job(3, kNeverSmall, body, 30'000, options);
  for (const std::string& line : listener.lines()) {
    std::string about = line.substr(line.find("\nfor "));
    CHECK(names(about, 1));
    CHECK(!names(about, 0) && !names(about, 2));
  }
}

CASE("while bytes move nothing is said, however long it takes") {
  Listener listener;
  EngineOptions options;
  options.stall_notice_ms = 400;
  run_job(
      2, kNeverSmall,
      [&](Rank& self) {
        std::vector<float> data(1 << 20, 1.0F);
        auto end = Clock::now() + std::chrono::milliseconds(900);
        int32_t more = 1;
        while (more != 0) {
          self.wait(reduce(self, data));
          more = self.rank == 0 && Clock::now() < end ? 1 : 0;
          self.wait(self.group->broadcast(std::as_writable_bytes(std::span(&more, 1)), DType::kInt32, 0, {}));
        }
      },
      30'000, options);
  CHECK(listener.lines().empty());
}

CASE("at a timeout everybody names the rank that has not come, and nobody else") {
  std::atomic<int> heard{0};
  run_job(
      4, kNeverSmall,
      [&](Rank& self) {
        std::vector<float> data(100'000, 1.0F);
        self.wait(self.group->barrier({}));
        if (self.rank == 2) return await([&] { return heard == 3; });
        std::string message = CHECK_THROWS(ErrorKind::kTimeout, self.wait(reduce(self, data)));
        std::string about = message.substr(0, message.find(" (reported by "));
        about = about.substr(about.find("waiting for "));
        CHECK(names(about, 2));
        CHECK(contains(about, "it has not called this yet"));
        for (int other : {0, 1, 3}) CHECK(!names(about, other));
        ++heard;
      },
      1200);
}

CASE("a rank that waits in another group is found there") {
  std::atomic<int> heard{0};
  run_job(
      2, kNeverSmall,
      [&](Rank& self) {
        GroupHandle other(self.runtime, "other", everybody(2), 1200, AlgorithmTable{});
        self.wait(self.group->barrier({}));
        std::vector<float> data(10);
        GroupHandle& group = self.rank == 0 ? *self.group : other;
        std::string message = CHECK_THROWS(
            ErrorKind::kTimeout, group.wait(*group.all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {})));
        CHECK(contains(message, self.rank == 0 ? "of group 'other'" : "of group 'everybody'"));
        ++heard;
        await([&] { return heard == 2; });
      },
      1200);
}

CASE("operations under different names fail with both names on every rank") {
  for (int world : {2, 3}) {
    std::atomic<int> heard{0};
    run_job(world, AlgorithmTable{}, [&](Rank& self) {
      std::vector<float> data(100, 1.0F);
      self.wait(self.group->barrier({}));
      NamedScope name(self.rank == 1 ? "bucket 1: b.weight" : "bucket 0: a.weight");
      auto begin = Clock::now();
      std::string message = CHECK_THROWS(ErrorKind::kMismatch, self.wait(reduce(self, data)));
      CHECK(Clock::now() - begin < std::chrono::seconds(1));
      CHECK(contains(message, "'bucket 0: a.weight'"));
      CHECK(contains(message, "'bucket 1: b.weight'"));
      CHECK(names(message, 1));
      ++heard;
      await([&] { return heard == world; });
    });
  }
}

CASE("a failure in a group reaches a rank that has not made the group yet") {
  std::atomic<bool> failed{false};
  run_job(3, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> data(10);
    self.wait(self.group->barrier({}));
    if (self.rank == 2) {
      await([&] { return failed.load(); });
      self.wait(self.group->barrier({}));
    }
    GroupHandle late(self.runtime, "late", everybody(3), 30'000, AlgorithmTable{});
    auto begin = Clock::now();
    auto call = [&] {
      // Rank 1 is the odd one.
      DType dtype = self.rank == 1 ? DType::kInt32 : DType::kFloat32;
      late.wait(*late.all_reduce(bytes_of(data), dtype, ReduceOp::kSum, {}));
    };
    std::string message = CHECK_THROWS(ErrorKind::kMismatch, call());
    CHECK(contains(message, "int32[10]") && contains(message, "float32[10]"));
    CHECK(Clock::now() - begin < std::chrono::seconds(2));
    failed = true;
    if (self.rank != 2) self.wait(self.group->barrier({}));
    self.wait(self.group->barrier({}));
  });
}

CASE("of two causes all ranks report the same one") {
  // Rank 3 does something else in operation 5, rank 0 in operation 2. The earlier one counts, if it is known in time:
  // here also on a machine where a rank gets no core for a while.
  EngineOptions options;
  options.listen_ms = 1500;
  std::mutex mutex;
  std::vector<std::string> causes;
  auto body = [&](Rank& self) {
    std::vector<std::vector<float>> data(5, std::vector<float>(64));
    self.wait(self.group->barrier({}));
    GroupHandle group(self.runtime, "g", everybody(4), 30'000, AlgorithmTable{});
    self.wait(self.group->barrier({}));  // a rank that makes it later takes the first failure that it is sent
    std::vector<std::shared_ptr<Work>> works;
    std::string message = CHECK_THROWS(ErrorKind::kMismatch, [&] {
      for (int i = 1; i <= 5; ++i) {
        bool odd = (self.rank == 3 && i == 5) || (self.rank == 0 && i == 2);
        works.push_back(group.all_reduce(bytes_of(data[static_cast<std::size_t>(i) - 1]),
                                         odd ? DType::kInt32 : DType::kFloat32, ReduceOp::kSum, {}));
      }
      for (auto& work : works) group.wait(*work);
    }());
    {
      std::lock_guard lock(mutex);
      causes.push_back(message.substr(0, message.find(" (reported by ")));
    }
    self.wait(self.group->barrier({}));
  };
  run_job(4, AlgorithmTable{}, body, 30'000, options);
  auto number = [](const std::string& cause) { return cause.substr(cause.find("operation #"), 13); };
  for (const std::string& cause : causes) CHECK_EQ(number(cause), number(causes[0]));
}

CASE("why a rank leaves is told to those that miss it, also when they hear it while idle") {
  std::atomic<bool> gone{false};
  run_job(2, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> data(10);
    self.wait(self.group->barrier({}));
    if (self.rank == 1) {
      self.runtime->engine().set_farewell("its program ended by ValueError: mine");
      self.runtime->shut_down();
      gone = true;
      return;
    }
    await([&] { return gone.load(); });
    std::string message = CHECK_THROWS(ErrorKind::kPeerLost, self.wait(reduce(self, data)));
    CHECK(contains(message, "it left the job: its program ended by ValueError: mine"));
    CHECK(names(message, 1));
  });
}

CASE("a peer's state survives the wire, and a mutilated one is refused") {
  PeerState state;
  state.progress = PeerState::Progress::kRunning;
  state.since_call_ms = 12'345;
  state.waits_for = {3, 0, 7};
  state.name = "bucket 3: layer1.weight";
  state.last = "all_reduce #7";
  state.elsewhere = std::string(5000, 'x');
  state.blocked_group = 0xfedcba9876543210;
  state.blocked_sequence = 17;
  state.needs_asker = true;
  std::string raw = state.encode();
  CHECK(raw.size() <= kPeerStateBytes);
  PeerState got = PeerState::decode(std::as_bytes(std::span(raw)));
  CHECK(got.progress == state.progress);
  CHECK_EQ(got.since_call_ms, state.since_call_ms);
  CHECK(got.waits_for == state.waits_for);
  CHECK_EQ(got.blocked_group, state.blocked_group);
  CHECK_EQ(got.blocked_sequence, state.blocked_sequence);
  CHECK(got.needs_asker);
  CHECK_EQ(got.name, state.name);
  CHECK_EQ(got.last, state.last);
  CHECK(!got.elsewhere.empty() && got.elsewhere.size() < 600);
  for (std::size_t length = 0; length < raw.size(); length += 7)
    CHECK_THROWS(ErrorKind::kHandshake, PeerState::decode(std::as_bytes(std::span(raw.data(), length))));
}

// Rank 0 waits in one group for the others, which wait in another one for rank 0. `program_threads`: of each rank; 0:
// they are not counted.
void cross(int world, int program_threads, int64_t timeout_ms, ErrorKind expected) {
  EngineOptions options;
  options.stall_notice_ms = 200;
  if (program_threads > 0) options.check_interrupt = [=] { note_program_threads({program_threads, Clock::now()}); };
  auto body = [&](Rank& self) {
    GroupHandle other(self.runtime, "other", everybody(self.world), timeout_ms, kNeverSmall);
    GroupHandle& mine = self.rank == 0 ? *self.group : other;
    std::vector<float> data(1000, 1.0F);
    try {
      mine.wait(*mine.all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
      CHECK(false);
    } catch (const Error& error) {
      if (expected != ErrorKind::kMismatch) {  // or the other rank has left after its own timeout
        CHECK(error.kind() == expected || error.kind() == ErrorKind::kPeerLost);
        return;
      }
      CHECK(error.kind() == expected);
      CHECK(contains(error.what(), "all_reduce #1 (float32[1000], SUM) of group 'everybody'"));
      CHECK(contains(error.what(), "all_reduce #1 (float32[1000], SUM) of group 'other'"));
      CHECK(names(error.what(), 0));
      CHECK_EQ(error.context().sequence, 1);
      CHECK(error.context().peer >= 0);
    }
  };
  run_job(world, kNeverSmall, body, timeout_ms, options);
}

CASE("ranks that wait for each other in two groups are a mismatch soon, where no thread is left to call") {
  const auto begin = Clock::now();
  for (int world : {2, 3}) cross(world, 1, 30'000, ErrorKind::kMismatch);
  CHECK(Clock::now() - begin < std::chrono::seconds(10));
}

CASE("where another thread of the program may still call, or they were not counted since, they wait for the timeout") {
  cross(2, 2, 900, ErrorKind::kTimeout);
  note_program_threads({1, Clock::now()});  // before they wait: they may have started others since then
  cross(2, 0, 900, ErrorKind::kTimeout);
}

CASE("texts from the network are valid UTF-8 of bounded length") {
  CHECK_EQ(clean_text("grün", 100), std::string("grün"));
  CHECK_EQ(clean_text("grün", 3), std::string("gr"));  // not half a character
  CHECK_EQ(clean_text("a\xff\xc0\x80z", 100), std::string("a???z"));
  CHECK_EQ(clean_text("\xed\xa0\x80", 100), std::string("???"));  // half of a surrogate pair
  CHECK_EQ(clean_text("\xf0\x9f\x98\x80", 100), std::string("\xf0\x9f\x98\x80"));
  CHECK_EQ(clean_text(std::string_view("a\0b\x1b[2J\nc", 9), 100), std::string("a b [2J\nc"));
  CHECK_EQ(clean_text("\xe2\x82", 100), std::string("??"));
}

}  // namespace ringdp::testing
