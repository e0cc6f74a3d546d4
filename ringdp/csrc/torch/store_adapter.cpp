#include "torch/store_adapter.h"

namespace ringdp {
namespace {

// What torch's stores throw when their keeper is gone: DistNetworkError, or on a connection that was already found broken
// DistStoreError. None of the calls below waits for a key, so none of them can run out of time otherwise.
template <class Call>
auto guarded(Call call) {
  try {
    return call();
  } catch (const c10::DistError& error) {
    std::string text = error.what_without_backtrace();
    throw StoreLost(ErrorKind::kHandshake, text.substr(0, text.find('\n')));
  }
}

}  // namespace

void StoreAdapter::set(const std::string& key, const std::string& value) {
  guarded([&] { store_->set(prefix_ + key, std::vector<uint8_t>(value.begin(), value.end())); });
}

std::optional<std::string> StoreAdapter::find(const std::string& key) {
  return guarded([&]() -> std::optional<std::string> {
    std::string full = prefix_ + key;
    if (!store_->check({full})) return std::nullopt;
    std::vector<uint8_t> value = store_->get(full);
    return std::string(value.begin(), value.end());
  });
}

}  // namespace ringdp
