#include "machine.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace fake_cuda {
namespace {

constexpr std::size_t kMemoryBytes = std::size_t{16} << 30;  // of addresses; pages come when they are touched
constexpr std::size_t kGrainBytes = 512;                     // as the caching allocator rounds
constexpr StreamId kPoolStreams = 32;                        // as torch's pool has
constexpr int kKernelFailed = 77;

thread_local StreamId stream_of_thread = 0;

void run_kernel(const std::function<void()>& work) {
  const at::AutoDispatchBelowAutograd below_autograd;
  const c10::InferenceMode inference(true);
  const c10::AutoGradMode no_grad(false);
  try {
    work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fake CUDA: a kernel failed: %s\n", error.what());
    _exit(kKernelFailed);
  }
}

}  // namespace

StreamId current_stream() { return stream_of_thread; }
StreamId exchange_stream(StreamId stream) { return std::exchange(stream_of_thread, stream); }

Machine& Machine::here() {
  static auto* machine = new Machine;
  return *machine;
}

// ---- Streams

void Machine::add(StreamId stream, Task task) {
  const std::lock_guard lock(mutex_);
  if (!thread_) {
    thread_ = std::make_unique<std::thread>([this] { run(); });
    thread_->detach();
  }
  queues_[stream].push_back(std::move(task));
  ++pending_[stream];
  changed_.notify_all();
}

void Machine::queue(StreamId stream, std::function<void()> work) { add(stream, {.run = std::move(work)}); }

void Machine::queue_apart(StreamId stream, std::function<void()> work) {
  add(stream, {.run = std::move(work), .apart = true});
}

void Machine::queue_wait(StreamId stream, MarkPointer mark) { add(stream, {.waits = std::move(mark)}); }

void Machine::queue_rest(StreamId stream, std::chrono::microseconds time) { add(stream, {.rest = time}); }

MarkPointer Machine::record(StreamId stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  add(stream, {.reaches = mark});
  return mark;
}

bool Machine::reached(const MarkPointer& mark) {
  const std::lock_guard lock(mutex_);
  if (!mark->reached && asked_.insert(mark).second) changed_.notify_all();
  return mark->reached;
}

void Machine::wait_for(const MarkPointer& mark) {
  std::unique_lock lock(mutex_);
  asked_.insert(mark);
  changed_.notify_all();
  changed_.wait(lock, [&] { return mark->reached; });
}

bool Machine::idle(StreamId stream) {
  const std::lock_guard lock(mutex_);
  return pending_[stream] == 0;
}

void Machine::wait_for_stream(StreamId stream) {
  std::unique_lock lock(mutex_);
  ++awaited_[stream];
  changed_.notify_all();
  changed_.wait(lock, [&] { return pending_[stream] == 0; });
  --awaited_[stream];
}

void Machine::wait_for_all() {
  std::unique_lock lock(mutex_);
  ++all_awaited_;
  changed_.notify_all();
  changed_.wait(lock, [&] {
    return std::all_of(pending_.begin(), pending_.end(), [](const auto& it) { return it.second == 0; });
  });
  --all_awaited_;
}

StreamId Machine::next_stream() { return 1 + next_++ % kPoolStreams; }

void Machine::set_order(uint64_t seed, int longest_us) {
  const std::lock_guard lock(mutex_);
  random_.seed(seed);
  lazy_ = longest_us < 0;
  longest_us_ = std::max(longest_us, 0);
}

void Machine::note_wait() const { TORCH_CHECK(!waits_forbidden_.load(), "called a synchronizing CUDA operation"); }

void Machine::throw_if_failed() const { TORCH_CHECK(!has_failed(), "CUDA error: device-side assert triggered"); }

// Lazily: the streams of which the host awaits something, and those that these wait for.
std::set<StreamId> Machine::wanted() {
  std::erase_if(asked_, [](const MarkPointer& it) { return it->reached; });
  std::set<StreamId> found;
  for (const MarkPointer& it : asked_) found.insert(it->stream);
  for (const auto& [stream, tasks] : pending_)
    if (tasks > 0 && (all_awaited_ > 0 || awaited_[stream] > 0)) found.insert(stream);
  std::vector<StreamId> open(found.begin(), found.end());
  while (!open.empty()) {
    const std::deque<Task>& tasks = queues_[open.back()];
    open.pop_back();
    if (tasks.empty() || !tasks.front().waits || tasks.front().waits->reached) continue;
    const StreamId other = tasks.front().waits->stream;
    if (found.insert(other).second) open.push_back(other);
  }
  return found;
}

std::vector<StreamId> Machine::ready(bool& resting) {
  std::vector<StreamId> found;
  const std::set<StreamId> asked_for = lazy_ ? wanted() : std::set<StreamId>();
  for (auto& [stream, tasks] : queues_) {
    if (tasks.empty() || busy_.contains(stream) || (lazy_ && !asked_for.contains(stream))) continue;
    Task& head = tasks.front();
    if (head.waits && !head.waits->reached) continue;
    if (head.rest.count() > 0) {
      const auto now = Clock::now();
      if (head.rests_until == Clock::time_point()) head.rests_until = now + head.rest;
      if (now < head.rests_until) {
        resting = true;
        continue;
      }
    }
    found.push_back(stream);
  }
  return found;
}

void Machine::begin(StreamId stream, Task task) {
  if (!task.apart) {
    if (task.run) run_kernel(task.run);
    task.run = nullptr;
    return finish(stream, task);
  }
  std::thread([this, stream, task = std::move(task)]() mutable {
    run_kernel(task.run);
    task.run = nullptr;
    finish(stream, task);
  }).detach();
}

void Machine::finish(StreamId stream, const Task& task) {
  const std::lock_guard lock(mutex_);
  if (task.reaches) task.reaches->reached = true;
  if (task.apart) busy_.erase(stream);
  --pending_[stream];
  changed_.notify_all();
}

void Machine::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    bool resting = false;
    const std::vector<StreamId> streams = ready(resting);
    if (streams.empty()) {
      resting ? void(changed_.wait_for(lock, std::chrono::milliseconds(1))) : changed_.wait(lock);
      continue;
    }
    if (longest_us_ > 0 && random_() % 4 == 0) {
      const std::chrono::microseconds pause(random_() % static_cast<unsigned>(longest_us_));
      lock.unlock();
      std::this_thread::sleep_for(pause);
      lock.lock();
      continue;
    }
    const StreamId stream = streams[random_() % streams.size()];
    Task task = std::move(queues_[stream].front());
    queues_[stream].pop_front();
    if (task.apart) busy_.insert(stream);
    lock.unlock();
    begin(stream, std::move(task));
    lock.lock();
  }
}

// ---- Memory

void Machine::map() {
  if (base_ != nullptr) {
    TORCH_CHECK(owner_ == getpid(), "fake CUDA: the process has forked after it used the device");
    return;
  }
  owner_ = getpid();
  const int file = memfd_create("fake-cuda", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, kMemoryBytes) == 0, "fake CUDA: no memory file");
  const auto map_with = [&](int access) {
    void* at = mmap(nullptr, kMemoryBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "fake CUDA: no addresses");
    return static_cast<std::byte*>(at);
  };
  base_ = map_with(PROT_NONE);
  twin_ = map_with(PROT_READ | PROT_WRITE);
  close(file);
}

uintptr_t Machine::mapped(uintptr_t number) const {
  const auto base = reinterpret_cast<uintptr_t>(base_);
  return base_ != nullptr && number - base < kMemoryBytes ? number - base + reinterpret_cast<uintptr_t>(twin_) : number;
}

void* Machine::allocate(std::size_t bytes, StreamId stream) {
  const std::size_t rounded = (bytes + kGrainBytes - 1) / kGrainBytes * kGrainBytes;
  const std::lock_guard lock(memory_mutex_);
  map();
  auto spare = free_.lower_bound({stream, rounded});
  void* block = nullptr;
  std::size_t size = rounded;
  if (spare == free_.end() || spare->first.first != stream) {
    TORCH_CHECK(used_ + rounded <= kMemoryBytes, "fake CUDA: out of memory");
    block = base_ + used_;
    used_ += rounded;
  } else {
    size = spare->first.second;
    block = spare->second.back();
    spare->second.pop_back();
    if (spare->second.empty()) free_.erase(spare);
  }
  blocks_[block] = {size, stream, {}};
  return block;
}

void Machine::note_use(const void* address, StreamId stream) {
  const std::lock_guard lock(memory_mutex_);
  auto found = blocks_.upper_bound(address);
  if (found == blocks_.begin()) return;
  --found;
  if (stream != found->second.stream) found->second.users.insert(stream);
}

void Machine::give_back(void* block, const Block& what) { free_[{what.stream, what.bytes}].push_back(block); }

void Machine::release(void* block) {
  const std::lock_guard lock(memory_mutex_);
  const auto found = blocks_.find(block);
  const Block what = found->second;
  blocks_.erase(found);
  if (what.users.empty()) return give_back(block, what);
  const auto left = std::make_shared<std::size_t>(what.users.size());
  for (StreamId user : what.users)
    queue(user, [this, left, what, block] {
      const std::lock_guard inner(memory_mutex_);
      if (--*left == 0) give_back(block, what);
    });
}

}  // namespace fake_cuda
