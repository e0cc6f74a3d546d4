#include "torch/backend/store_adapter.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "transport/channel.h"

namespace ringdp {
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
