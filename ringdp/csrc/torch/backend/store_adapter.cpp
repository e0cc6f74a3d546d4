#include "torch/backend/store_adapter.h"

#include <dirent.h>
#include <sys/socket.h>

#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "transport/tcp_health.h"

namespace ringdp {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookEvery{500};
constexpr milliseconds kLong{1000};  // a call is checked after this time
constexpr milliseconds kAskAfter{4000};
constexpr milliseconds kFirstNotice{10'000};
constexpr int64_t kHeldUpMs = 4000;
constexpr int64_t kSilentMs = 8000;  // in all, every rank has the error within ten seconds

}  // namespace

StoreWatch::StoreWatch(const std::string& host, uint16_t port)
    : host_(host), place_(host + ":" + std::to_string(port)), port_(port) {
  thread_ = start_thread("ringdp-store", [this] { run(); });
}

StoreWatch::~StoreWatch() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  end_thread(thread_);
}

void StoreWatch::begin_call() {
  std::lock_guard lock(mutex_);
  began_ = Clock::now();
}

void StoreWatch::end_call() {
  std::lock_guard lock(mutex_);
  began_.reset();
}

std::optional<StoreWatch::Verdict> StoreWatch::take_verdict() {
  std::lock_guard lock(mutex_);
  return std::exchange(verdict_, std::nullopt);
}

void StoreWatch::run() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookEvery, [this] { return stopping_; })) {
    const auto call = began_;
    if (!call || *call != looked_at_) {
      connections_.clear();
      notice_after_ = kFirstNotice;
      answered_.reset();
    }
    looked_at_ = call.value_or(Clock::time_point{});
    if (!call || Clock::now() - *call < kLong) continue;
    lock.unlock();
    if (connections_.empty()) find_connections();
    auto found = judge(*call);
    lock.lock();
    if (!found || began_ != call) continue;  // it has ended by itself
    verdict_ = std::move(found->second);
    shutdown(found->first, SHUT_RDWR);
    began_.reset();
  }
}

// torch does not give access to the store's socket: finds the one connected to the store's port.
void StoreWatch::find_connections() {
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    const SocketAddress far_end = fd > 0 ? SocketAddress::far_end_of(fd) : SocketAddress();
    const bool internet = far_end.family() == AF_INET || far_end.family() == AF_INET6;
    if (internet && far_end.port() == port_) connections_.emplace(fd, fd);
  }
  closedir(folder);
}

// The store answers in the order of the requests. If it answers a later request, on another connection, the answer to
// this one is lost. A connecting TCPStore sends a request, and may wait for its answer without a limit.
bool StoreWatch::short_answers_come(Clock::time_point call) {
  const auto waited = Clock::now() - call;
  if (!answered_ && waited >= kAskAfter) {
    answered_ = std::make_shared<std::atomic<bool>>(false);
    const auto ask = [host = host_, port = port_, answered = answered_] {
      try {
        c10d::TCPStoreOptions options;
        options.port = port;
        options.waitWorkers = false;
        options.timeout = kAskAfter;
        c10::make_intrusive<c10d::TCPStore>(host, options)->check({"ringdp"});
        *answered = true;
      } catch (const std::exception&) {  // no answer
      }
    };
    try {
      start_thread("ringdp-ask", ask)->detach();
    } catch (const Error&) {  // then no probe is sent
    }
  }
  return answered_ && *answered_ && waited >= kAskAfter + kLong;
}

std::optional<std::pair<int, StoreWatch::Verdict>> StoreWatch::judge(Clock::time_point call) {
  for (auto& [fd, watch] : connections_) {
    const NetworkPath::HeldUp held_up = watch.held_up();
    const std::string where = "the job's store at " + place_ + " (" + connection_text(fd) + ")";
    if (held_up.ms >= kHeldUpMs)
      return std::pair(fd, Verdict{true, "the path to " + where + " does not pass large packets: none with up to " +
                                             std::to_string(held_up.packet_bytes) + " bytes has arrived for " +
                                             std::to_string(held_up.ms) + " ms, though its host answers"});
    if (watch.host_silence_ms() >= kSilentMs)
      return std::pair(
          fd, Verdict{false, "the host of " + where + " has not answered for " + std::to_string(kSilentMs) + " ms"});
  }
  const auto waited = Clock::now() - call;
  if (!connections_.empty() && short_answers_come(call)) {
    const int fd = connections_.begin()->first;
    const auto waited_ms = std::chrono::duration_cast<milliseconds>(waited).count();
    return std::pair(fd, Verdict{true, "the path from the job's store at " + place_ + " (" + connection_text(fd) +
                                           ") does not pass large packets: no answer for " + std::to_string(waited_ms) +
                                           " ms, though it answers short questions"});
  }
  if (waited < notice_after_) return std::nullopt;
  notice_after_ *= 2;
  log(LogLevel::kWarning, "this rank has waited " +
                              std::to_string(std::chrono::duration_cast<std::chrono::seconds>(waited).count()) +
                              " s for an answer of the job's store at " + place_ +
                              ": the process that keeps it may be stopped, or the path from it loses large packets");
  return std::nullopt;
}

namespace {

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

StoreAdapter::StoreAdapter(c10::intrusive_ptr<c10d::Store> store, std::string prefix)
    : store_(std::move(store)), prefix_(std::move(prefix)) {
  c10d::Store* inner = store_.get();
  c10::intrusive_ptr<c10d::Store> kept;
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(inner)) {
    kept = prefixed->getUnderlyingStore();
    inner = kept.get();
  }
  if (auto* tcp = dynamic_cast<c10d::TCPStore*>(inner))
    watch_ = std::make_unique<StoreWatch>(tcp->getHost(), tcp->getPort());
}

// torch's stores throw DistNetworkError if their server has ended, or if the watch has ended the call, and
// DistStoreError on a connection that was found broken before. None of the calls below waits for a key, so none can
// time out otherwise.
template <class Call>
auto StoreAdapter::guarded(Call call) {
  struct Watched {
    StoreWatch* watch;
    explicit Watched(StoreWatch* it) : watch(it) {
      if (watch != nullptr) watch->begin_call();
    }
    ~Watched() {
      if (watch != nullptr) watch->end_call();
    }
  };
  try {
    const Watched watched(watch_.get());
    return call();
  } catch (const c10::DistError& error) {
    auto verdict = watch_ ? watch_->take_verdict() : std::nullopt;
    if (verdict && verdict->small_packets_pass) {
      store_ = store_->clone();  // a new connection, whose error messages are shorter
      ErrorContext context;
      context.peer = 0;
      context.advice = kLargePacketsAdvice;
      throw Error(ErrorKind::kHandshake, verdict->text, context);
    }
    std::string text = verdict ? verdict->text : error.what_without_backtrace();
    throw StoreLost(ErrorKind::kHandshake, text.substr(0, text.find('\n')));
  }
}

void StoreAdapter::set(const std::string& key, const std::string& value) {
  guarded([&] { store_->set(prefix_ + key, bytes_of(value)); });
}

std::string StoreAdapter::set_first(const std::string& key, const std::string& value) {
  return guarded([&] {
    std::vector<uint8_t> there = store_->compareSet(prefix_ + key, {}, bytes_of(value));
    return std::string(there.begin(), there.end());
  });
}

std::optional<std::string> StoreAdapter::find(const std::string& key) {
  return guarded([&]() -> std::optional<std::string> {
    std::string full = prefix_ + key;
    if (!store_->check({full})) return std::nullopt;
    std::vector<uint8_t> value = store_->get(full);
    return std::string(value.begin(), value.end());
  });
}

std::optional<std::vector<std::string>> StoreAdapter::find_all(const std::vector<std::string>& keys) {
  return guarded([&]() -> std::optional<std::vector<std::string>> {
    std::vector<std::string> full;
    for (const std::string& key : keys) full.push_back(prefix_ + key);
    if (!store_->check(full)) return std::nullopt;
    std::vector<std::string> values;
    for (const std::vector<uint8_t>& value : store_->multiGet(full)) values.emplace_back(value.begin(), value.end());
    return values;
  });
}

std::string StoreAdapter::place() const { return watch_ ? watch_->place() : std::string(); }

}  // namespace ringdp
