// The handshakes of a job on the wire, recorded by a proxy between its ranks: the one of the start, and those that
// replace broken connections, each byte but nonces and MACs as docs/reference/wire_format.md has them.
#include <poll.h>

#include <array>
#include <atomic>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

#include "job.h"
#include "meet/handshake.h"
#include "transport/tcp.h"

namespace ringdp::testing {
namespace {

using Bytes = std::vector<std::byte>;

const Bytes kSecret(32, std::byte{7});
constexpr std::size_t kRecorded = 8 * kHandshakeBytes;  // of each connection, each way

// Listens in a rank's place; passes on what comes, and keeps the first bytes.
class Proxy {
 public:
  struct Recorded {
    Bytes there, back;  // from the dialler, to the dialler
  };

  explicit Proxy(const SocketAddress& to) : to_(to) {
    int error_number = 0;
    listener_ = TcpListener::try_bind("127.0.0.1", 0, 64, error_number);
    REQUIRE(listener_.has_value());
    address_ = listener_->address().text();
    thread_ = std::thread([this] {
      while (!stop_) step();
    });
  }
  ~Proxy() {
    stop_ = true;
    thread_.join();
  }

  const std::string& address() const { return address_; }
  // Ends all connections, once no bytes come: those that it has acknowledged must not be lost.
  void cut() {
    for (cut_ = true; cut_;) std::this_thread::yield();
  }
  std::vector<Recorded> recorded() {
    const std::lock_guard lock(mutex_);
    std::vector<Recorded> out;
    for (const Passed& it : passed_) out.push_back(it.recorded);
    return out;
  }

 private:
  struct Passed {
    Fd near, far;
    Recorded recorded;

    void close() {
      near.reset();
      far.reset();
    }
  };

  void step() {
    std::vector<pollfd> polled{{listener_->poll_fd(), POLLIN, 0}};
    for (Passed& it : passed_) {
      polled.push_back({it.near.get(), POLLIN, 0});
      polled.push_back({it.far.get(), POLLIN, 0});
    }
    const bool quiet = poll(polled.data(), polled.size(), 5) == 0;
    const std::lock_guard lock(mutex_);
    const bool cut = quiet && cut_.exchange(false);
    std::size_t at = 1;
    for (Passed& it : passed_) {
      const bool near = polled[at++].revents != 0, far = polled[at++].revents != 0;
      if (!it.near) continue;
      const bool over = cut || (near && !pass(it.near, it.far, it.recorded.there)) ||
                        (far && !pass(it.far, it.near, it.recorded.back));
      if (over) it.close();
    }
    int error_number = 0;
    if (polled[0].revents == 0) return;
    while (auto caller = listener_->accept(error_number)) {
      Passed& it = passed_.emplace_back();
      it.near = std::move(caller->first);
      it.far = start_connect(to_, error_number);
      pollfd connecting{it.far.get(), POLLOUT, 0};
      if (!it.far || poll(&connecting, 1, 5000) != 1 || connect_error(it.far.get()) != 0) it.close();
    }
  }

  static bool pass(const Fd& from, const Fd& to, Bytes& recorded) {
    std::array<std::byte, 64 * 1024> bytes;
    const ssize_t got = recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN;
    for (ssize_t done = 0; done < got;) {
      pollfd room{to.get(), POLLOUT, 0};
      poll(&room, 1, 1000);
      const ssize_t sent =
          ::send(to.get(), bytes.data() + done, static_cast<std::size_t>(got - done), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) return false;
      done += sent;
    }
    const auto kept = std::min(static_cast<std::size_t>(got), kRecorded - recorded.size());
    recorded.insert(recorded.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(kept));
    return got > 0;
  }

  const SocketAddress to_;
  std::optional<TcpListener> listener_;
  std::string address_;
  std::atomic<bool> stop_{false}, cut_{false};
  std::mutex mutex_;
  std::list<Passed> passed_;
  std::thread thread_;
};

// Publishes the proxy's address in place of the rank's own.
class ProxiedStore final : public Store {
 public:
  ProxiedStore(Store& store, std::unique_ptr<Proxy>& proxy) : store_(store), proxy_(proxy) {}
  void set(const std::string& key, const std::string& value) override {
    if (!key.starts_with("at/")) return store_.set(key, value);
    proxy_ = std::make_unique<Proxy>(SocketAddress::parse(split(field(read_record(value), "addresses"), ',').front()));
    store_.set(key, write_record({{"addresses", proxy_->address()}}));
  }
  std::string set_first(const std::string& key, const std::string& value) override {
    return store_.set_first(key, value);
  }
  std::optional<std::string> find(const std::string& key) override { return store_.find(key); }

 private:
  Store& store_;
  std::unique_ptr<Proxy>& proxy_;
};

// Reads the messages of one connection, in the order in which its ends sent them.
class Reader {
 public:
  explicit Reader(const Proxy::Recorded& from) : from_(from) {}

  bool at_end(bool back) const { return (back ? from_.back : from_.there).size() < at_[back] + kHandshakeBytes; }

  // The next message one way is this, but for its nonce, and for its number if there is none here; it has the MAC over
  // all before it.
  HandshakeFields expect(bool back, HandshakeFields wanted, bool any_number = false) {
    REQUIRE(!at_end(back));
    HandshakeMessage message;
    const Bytes& bytes = back ? from_.back : from_.there;
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at_[back]), message.size(), message.begin());
    const auto read = decode_handshake(message, kSecret, transcript_);
    REQUIRE(read.has_value());
    wanted.nonce = read->nonce;
    wanted.from = back ? 0 : 1;
    wanted.to = back ? 1 : 0;
    wanted.world = 2;
    wanted.met = read->met;  // depends on when the ranks learn that all are connected
    if (any_number) wanted.number = read->number;
    CHECK(encode_handshake(wanted, kSecret, transcript_) == message);
    transcript_.insert(transcript_.end(), message.begin(), message.end());
    at_[back] += kHandshakeBytes + read->padding;
    return *read;
  }

 private:
  const Proxy::Recorded& from_;
  std::array<std::size_t, 2> at_{};
  Bytes transcript_;
};

constexpr bool kThere = false, kBack = true;

// How many connections of this kind there are, each with the bytes that it must have.
struct Seen {
  int meetings = 0, redials = 0, more = 0, cut_off = 0;
};

void tally(const Proxy::Recorded& connection, uint16_t streams, Seen& seen) {
  Reader reader(connection);
  const auto hello = decode_handshake(
      [&] {
        HandshakeMessage first{};
        std::copy_n(connection.there.begin(), std::min(connection.there.size(), first.size()), first.begin());
        return first;
      }(),
      kSecret, {});
  if (!hello || reader.at_end(kBack)) return void(++seen.cut_off);
  const HandshakeFields like{.stream = hello->stream, .purpose = hello->purpose, .number = hello->number};
  const auto message = [&](HandshakeType type, uint16_t announced) {
    HandshakeFields out = like;
    out.type = type;
    out.streams = announced;
    return out;
  };
  const bool redial = hello->purpose == Purpose::kResume, further = hello->stream > 0;
  CHECK(hello->number > 0 && hello->stream < streams);
  reader.expect(kThere, message(HandshakeType::kHello, further ? streams : 1));
  reader.expect(kBack, message(HandshakeType::kReply, 1));
  if (reader.at_end(kThere)) return void(++seen.cut_off);  // another one was faster
  reader.expect(kThere, message(HandshakeType::kConfirm, streams));
  if (further) return void(++seen.more);
  if (!redial) return void(++seen.meetings);
  if (reader.at_end(kBack) || reader.at_end(kThere)) return void(++seen.cut_off);
  reader.expect(kBack, message(HandshakeType::kResume, streams), true);
  reader.expect(kThere, message(HandshakeType::kResume, streams), true);
  ++seen.redials;
}

void run_recorded_job(uint16_t streams) {
  MemoryStore store;
  std::array<std::unique_ptr<Proxy>, 2> proxies;
  std::array<std::unique_ptr<ProxiedStore>, 2> stores;
  for (std::size_t i = 0; i < 2; ++i) stores[i] = std::make_unique<ProxiedStore>(store, proxies[i]);
  run_ranks(2, [&](int rank) {
    RendezvousOptions options = rendezvous_options(rank, 2);
    options.links.transport = &tcp_transport();
    options.host.id = std::to_string(rank);
    options.links.streams = streams;
    options.secret = kSecret;
    options.job = JobId{};
    auto runtime = std::make_shared<Runtime>(*stores[static_cast<std::size_t>(rank)], options, EngineOptions{});
    Rank self{rank, 2, runtime,
              std::make_unique<GroupHandle>(runtime, "everybody", everybody(2), 20'000, AlgorithmTable{})};
    for (int round = 0; round < 4; ++round) {
      std::vector<float> data = input_of(200'000, rank);
      self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
      if (rank == 0 && round < 3) proxies[0]->cut();
    }
    self.runtime->engine().healing().wait_until_whole(Deadline::after_ms(5000));
    self.wait(self.group->barrier({}));
  });
  Seen seen;
  for (const Proxy::Recorded& it : proxies[0]->recorded()) tally(it, streams, seen);
  CHECK(seen.meetings >= 1 && seen.redials >= 1);
  CHECK(streams == 1 || seen.more >= streams - 1);
  for (const Proxy::Recorded& it : proxies[1]->recorded()) {  // rank 0 only asks to be dialled
    const HandshakeFields knock{
        .type = HandshakeType::kKnock, .from = 0, .to = 1, .world = 2, .purpose = Purpose::kResume};
    HandshakeMessage message;
    if (it.there.size() < message.size()) continue;
    std::copy_n(it.there.begin(), message.size(), message.begin());
    const auto read = decode_handshake(message, kSecret, {});
    REQUIRE(read.has_value());
    HandshakeFields wanted = knock;
    wanted.nonce = read->nonce;
    wanted.met = read->met;
    wanted.number = read->number;
    if (read->purpose == Purpose::kResume) CHECK(encode_handshake(wanted, kSecret, {}) == message);
    CHECK(it.back.empty());
  }
}

}  // namespace

CASE("the handshakes of the start and of redials have the bytes that the page says") { run_recorded_job(1); }

CASE("and so have those of further connections of a pair") { run_recorded_job(3); }

}  // namespace ringdp::testing
