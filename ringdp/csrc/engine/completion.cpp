#include "engine/completion.h"

#include <exception>

#include "base/bytes.h"
#include "base/log.h"

namespace ringdp {
namespace {

struct CallbackScope {
  uint64_t parent_group;
  uint64_t parent_sequence;
  std::map<uint64_t, uint64_t> issued;  // operations so far, per group
};

thread_local CallbackScope* current_scope = nullptr;

}  // namespace

std::optional<uint64_t> CompletionQueue::nested_key(uint64_t group) {
  if (current_scope == nullptr) return std::nullopt;
  uint64_t key =
      hash_mix(hash_mix(current_scope->parent_group, current_scope->parent_sequence), ++current_scope->issued[group]);
  return key | kNestedBit;
}

bool CompletionQueue::on_this_thread() { return current_scope != nullptr; }

void CompletionQueue::push(uint64_t group, uint64_t sequence, std::function<void()> job) {
  std::lock_guard lock(mutex_);
  jobs_.push_back({group, sequence, std::move(job)});
  changed_.notify_one();
}

void CompletionQueue::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void CompletionQueue::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopped_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    CallbackScope scope{job.group, job.sequence, {}};
    current_scope = &scope;
    try {
      job.run();
    } catch (const std::exception& error) {
      log(LogLevel::kError, std::string("a callback after a collective failed: ") + error.what());
    }
    current_scope = nullptr;
    job.run = nullptr;  // what it holds may take locks of its own
    lock.lock();
  }
}

}  // namespace ringdp
