#include "torch/store_adapter.h"

#include "base/error.h"

namespace ringdp {
namespace {

constexpr int kSliceMs = 500;  // how long a signal may have to wait

[[noreturn]] void lost(const std::exception& cause) {
  ErrorContext context;
  context.peer = 0;
  context.cause = cause.what();
  throw Error(ErrorKind::kHandshake,
              std::string("lost the job's store while the ranks met, Connection closed by peer: rank 0 "
                          "or its host has gone: ") +
                  cause.what(),
              context);
}

}  // namespace

void StoreAdapter::set(const std::string& key, const std::string& value) {
  try {
    store_->set(prefix_ + key, std::vector<uint8_t>(value.begin(), value.end()));
  } catch (const c10::DistNetworkError& error) {
    lost(error);
  }
}

std::optional<std::string> StoreAdapter::get(const std::string& key, Deadline deadline) {
  std::string full = prefix_ + key;
  for (;;) {
    try {
      store_->wait({full}, std::chrono::milliseconds(std::max(1, deadline.remaining_ms(kSliceMs))));
      std::vector<uint8_t> value = store_->get(full);
      return std::string(value.begin(), value.end());
    } catch (const c10::DistNetworkError& error) {
      lost(error);
    } catch (const c10::Error& error) {
      // TCPStore throws DistStoreError when time is up, FileStore and HashStore plain errors that say so.
      std::string text = error.what_without_backtrace();
      bool late =
          dynamic_cast<const c10::DistStoreError*>(&error) != nullptr || text.find("imeout") != std::string::npos;
      if (!late) throw;
    }
    if (deadline.expired()) return std::nullopt;
    if (check_interrupt_) check_interrupt_();
  }
}

}  // namespace ringdp
