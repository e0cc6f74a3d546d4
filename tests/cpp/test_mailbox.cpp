// Mailboxes between ranks that are threads: requests and answers of several threads, a peer that goes, a close while
// threads wait, and how much a sender may have on its way.
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "engine/mailbox.h"
#include "job.h"

namespace ringdp::testing {
namespace {

constexpr std::size_t kMostBytes = 64 << 20;
const std::vector<std::size_t> kPayloads{0, 1, 4032, 4033, 70'000, 1'100'000};  // one message holds 4032

std::shared_ptr<std::vector<std::byte>> payload_of(std::size_t bytes, int seed) {
  auto data = std::make_shared<std::vector<std::byte>>(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    (*data)[i] = static_cast<std::byte>((i + static_cast<std::size_t>(seed)) % 251);
  return data;
}

bool holds(const Mailbox::Message& message, std::size_t bytes, int seed) {
  const auto expected = payload_of(bytes, seed);
  return message.bytes == bytes && (bytes == 0 || std::memcmp(message.payload.get(), expected->data(), bytes) == 0);
}

int64_t send(Mailbox& box, int to, Mailbox::Box kind, int number, std::size_t bytes, bool waits = false) {
  auto data = payload_of(bytes, number);
  const std::span<std::byte> memory(*data);
  return box.send(to, kind, std::to_string(number), memory, data, waits);
}

int number_of(const Mailbox::Message& message) { return std::stoi(message.header); }

std::shared_ptr<Mailbox> mailbox_of(Rank& self) {
  auto box = Mailbox::make(*self.group, "box", kMostBytes);
  for (int other = 0; other < self.world; ++other)
    if (other != self.rank) {
      box->expect(Mailbox::kRequests, other);
      box->expect(Mailbox::kAnswers, other);
    }
  return box;
}

bool throws(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void barrier(Rank& self) { self.wait(self.group->barrier({})); }

// Answers a request by its number and a payload of its size.
void serve(Mailbox& box, const Mailbox::Message& request) {
  const int number = number_of(request);
  CHECK(holds(request, kPayloads[static_cast<std::size_t>(number) % kPayloads.size()], number));
  send(box, request.from, Mailbox::kAnswers, number, request.bytes);
  box.expect(Mailbox::kRequests, request.from);
}

}  // namespace

CASE("each rank asks all others, while its own thread, or the waiting one, answers them") {
  for (const bool with_thread : {true, false})
    run_job(3, {}, [&](Rank& self) {
      const auto box = mailbox_of(self);
      std::atomic<bool> over{false};
      std::thread server([&] {
        while (with_thread && !over)
          if (const auto found = box->request(20); found && !found->lost) serve(*box, *found);
      });
      for (int round = 0; round < 24; ++round)
        for (int other = 0; other < self.world; ++other) {
          if (other == self.rank) continue;
          send(*box, other, Mailbox::kRequests, round, kPayloads[static_cast<std::size_t>(round) % kPayloads.size()],
               true);
          for (;;) {
            const auto found = box->answer(other, 30'000, true);
            CHECK(found.has_value());
            if (found->box == Mailbox::kRequests) {
              serve(*box, *found);
              continue;
            }
            CHECK_EQ(number_of(*found), round);
            CHECK(holds(*found, kPayloads[static_cast<std::size_t>(round) % kPayloads.size()], round));
            break;
          }
        }
      // Others may still ask this rank, whose server is the thread that waits here.
      auto all_here = self.group->barrier({});
      while (!all_here->finished())
        if (const auto found = with_thread ? std::nullopt : box->request(1); found && !found->lost) serve(*box, *found);
      self.wait(all_here);
      over = true;
      server.join();
      box->close();
    });
}

CASE("collectives run while messages are awaited, and an answer may land in memory of the caller") {
  run_job(2, {}, [](Rank& self) {
    const auto box = mailbox_of(self);
    const int other = 1 - self.rank;
    std::thread server([&] {
      for (int count = 0; count < 20;)
        if (const auto found = box->request(1000); found && !found->lost) {
          serve(*box, *found);
          ++count;
        }
    });
    for (int round = 0; round < 20; ++round) {
      std::vector<int32_t> ones(1000, 1);
      self.wait(self.group->all_reduce(bytes_of(ones), DType::kInt32, ReduceOp::kSum, {}));
      CHECK_EQ(ones[999], 2);
      const std::size_t bytes = kPayloads[static_cast<std::size_t>(round) % kPayloads.size()];
      auto room = std::make_shared<std::vector<std::byte>>(bytes);
      box->land(other, std::shared_ptr<std::byte>(room, room->data()), bytes);
      send(*box, other, Mailbox::kRequests, round, bytes);
      std::optional<Mailbox::Message> found;
      while (!found) found = box->answer(other, 1000, false);
      CHECK(holds(*found, bytes, round));
      CHECK(bytes <= 4032 || found->payload.get() == room->data());
    }
    server.join();
    barrier(self);
    box->close();
  });
}

CASE("a thread that gets an answer at once, after a request, leaves no later request of the peer behind") {
  constexpr int kRounds = 100;
  std::atomic<int> served{0};
  run_job(2, {}, [&](Rank& self) {
    const auto box = mailbox_of(self);
    const int other = 1 - self.rank;
    for (int round = 0; round < kRounds; ++round) {
      if (self.rank == 0) {
        for (int number = 0; number < 2; ++number) send(*box, other, Mailbox::kRequests, number, 0);
        send(*box, other, Mailbox::kAnswers, 2, 0);
        barrier(self);
        while (served <= round) std::this_thread::yield();  // whatever comes would wake the other rank
        continue;
      }
      std::vector<int> came;
      const auto take = [&](const std::optional<Mailbox::Message>& found) {
        CHECK(found.has_value());
        came.push_back(number_of(*found));
      };
      while (came.empty() || came.back() != 0) take(box->answer(other, 30'000, true));
      barrier(self);  // the answer is there, most times
      box->expect(Mailbox::kRequests, other);
      const auto began = Clock::now();
      while (came.size() < 3 && came.back() != 2) take(box->answer(other, 30'000, true));
      if (came.size() < 3) take(box->request(10'000));               // of the server's thread
      CHECK(Clock::now() - began < std::chrono::milliseconds(100));  // an engine that nobody drives looks after 250
      box->expect(Mailbox::kRequests, other);
      ++served;
    }
    barrier(self);
    box->close();
  });
}

CASE("a request that is expected when nothing was comes at once") {
  constexpr int kRounds = 30;
  std::atomic<int> expected{0};
  run_job(2, {}, [&](Rank& self) {
    const auto box = Mailbox::make(*self.group, "box", kMostBytes);
    for (int round = 0; round < kRounds; ++round) {
      barrier(self);
      if (self.rank == 0) {
        while (expected <= round) std::this_thread::yield();
        send(*box, 1, Mailbox::kRequests, round, 0);
        continue;
      }
      box->expect(Mailbox::kRequests, 0);
      ++expected;
      const auto began = Clock::now();
      const auto found = box->request(10'000);
      CHECK(found && number_of(*found) == round);
      CHECK(Clock::now() - began < std::chrono::milliseconds(100));  // an engine with nothing to do looks after 250
    }
    barrier(self);
    box->close();
  });
}

CASE("a peer that goes is told once to who serves, and thrown to who waits for it or sends to it") {
  std::atomic<int> knowing{0}, here{0};
  run_job(3, {}, [&](Rank& self) {
    const auto box = mailbox_of(self);
    barrier(self);
    if (self.rank == 2) {
      box->close();
      self.runtime->shut_down();
      return;
    }
    CHECK(throws([&] { box->answer(2, 30'000, false); }));
    const auto told = box->request(10'000);
    CHECK(told && told->from == 2 && told->lost != nullptr);
    ++knowing;
    while (knowing < 2) std::this_thread::yield();  // before a request may come instead
    CHECK(throws([&] { box->require(2); }));
    CHECK(throws([&] { send(*box, 2, Mailbox::kRequests, 0, 10); }));
    const int other = 1 - self.rank;  // the pair that is left goes on
    send(*box, other, Mailbox::kRequests, 3, kPayloads[3]);
    std::optional<Mailbox::Message> found;
    while (!(found = box->request(1000)));
    CHECK(!found->lost && found->from == other);
    serve(*box, *found);
    while (!(found = box->answer(other, 1000, false)));
    CHECK_EQ(number_of(*found), 3);
    ++here;
    while (here < 2) std::this_thread::yield();
  });
}

CASE("a close ends what waits") {
  run_job(2, {}, [](Rank& self) {
    const auto box = mailbox_of(self);
    // The other rank may have closed its own before: then it is lost.
    std::thread server([&] {
      if (const auto found = box->request(30'000)) CHECK(found->lost != nullptr);
    });
    std::thread asking([&] {
      std::optional<Mailbox::Message> found;
      if (!throws([&] { found = box->answer(1 - self.rank, 30'000, false); })) CHECK(!found);
    });
    barrier(self);
    std::thread closing([&] { box->close(); });
    for (std::thread* it : {&closing, &server, &asking}) it->join();
    box->close();
    CHECK_THROWS(ErrorKind::kState, send(*box, 1 - self.rank, Mailbox::kRequests, 0, 10));
  });
}

CASE("a sender waits while 16 MiB are on their way to a member that takes none") {
  run_job(2, {}, [](Rank& self) {
    const auto box = Mailbox::make(*self.group, "box", kMostBytes);
    constexpr std::size_t kBytes = 4 << 20;
    constexpr int kCount = 12;
    std::atomic<int> sent{0};
    if (self.rank == 0) {
      std::thread sender([&] {
        for (int i = 0; i < kCount; ++i, ++sent) send(*box, 1, Mailbox::kRequests, i, kBytes, true);
      });
      while (sent < 4) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      CHECK(sent <= 5);
      barrier(self);
      sender.join();
    } else {
      barrier(self);
      for (int i = 0; i < kCount; ++i) {
        box->expect(Mailbox::kRequests, 0);
        std::optional<Mailbox::Message> found;
        while (!found) found = box->request(1000);
        CHECK(number_of(*found) == i && holds(*found, kBytes, i));
      }
    }
    barrier(self);
    box->close();
  });
}

}  // namespace ringdp::testing
