#include "membership/vote_pages.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "membership/messages.h"

namespace ringdp {
namespace {

std::byte* map(const Fd& memory) {
  void* base = ::mmap(nullptr, VotePages::kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (base == MAP_FAILED) throw_system("map a page for a vote", errno);
  // A forked child is not this rank: it must not be able to write the rank's vote.
  ::madvise(base, VotePages::kBytes, MADV_DONTFORK);
  return static_cast<std::byte*>(base);
}

}  // namespace

// What a half of a page begins with. The fields are written by the page's owner, or by who answers for it when it is dead.
struct VotePages::Half {
  std::atomic<uint64_t> number;  // of this vote; 0: none; the higher one of the two halves is the last
  uint64_t checksum;             // of number, length and bytes
  uint64_t length;
  std::atomic<int64_t> process;  // in the first half: who made the page
  std::atomic<uint64_t> left;    // in the first half: it never writes again

  std::byte* bytes() { return reinterpret_cast<std::byte*>(this + 1); }
  uint64_t sum(uint64_t of_number) {
    return hash_bytes({bytes(), static_cast<std::size_t>(length)}, hash_mix(of_number, length));
  }
  bool whole() { return number != 0 && length <= kVoteBytes && checksum == sum(number); }
};

VotePages::VotePages(const std::string& job, int place) : job_(job), self_(place) {
  static_assert(sizeof(Half) + kVoteBytes <= kHalfBytes);
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  const std::string name = name_of(job, place);
  const Fd memory(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!memory) throw_system("make /dev/shm" + name + " for this rank's vote", errno);
  named_ = true;
  try {
    if (const int error = ::posix_fallocate(memory.get(), 0, kBytes); error != 0)
      throw_system("make room in /dev/shm for this rank's vote", error);
    pages_[place].base = map(memory);
  } catch (...) {
    remove_name();
    throw;
  }
  half(place, 0)->process = ::getpid();
}

VotePages::~VotePages() {
  if (fork_generation() != generation_) return;  // a child has neither the pages nor their names
  leave();
  remove_name();
  for (auto& [place, page] : pages_) ::munmap(page.base, kBytes);
}

void VotePages::open(const std::vector<int>& places) {
  places_ = places;
  std::sort(places_.begin(), places_.end());
  for (const int place : places_) {
    if (place == self_) continue;
    const std::string name = name_of(job_, place);
    const Fd memory(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (!memory) throw_system("open /dev/shm" + name + ", the page of a rank of this host", errno);
    Page& page = pages_[place];
    page.base = map(memory);
    const auto process = static_cast<pid_t>(half(place, 0)->process.load());
    if (process == ::getpid()) continue;  // ranks are threads
    page.process = Fd(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
    if (!page.process) throw_system("watch process " + std::to_string(process) + ", a rank of this host", errno);
  }
}

void VotePages::remove_name() {
  if (std::exchange(named_, false)) ::shm_unlink(name_of(job_, self_).c_str());
}

void VotePages::write(int place, std::span<const std::byte> vote) {
  const int last = latest(place);
  const uint64_t number = last < 0 ? 1 : half(place, static_cast<std::size_t>(last))->number + 1;
  Half& next = *half(place, last == 0 ? 1 : 0);
  next.number = 0;  // not whole while it is written
  std::atomic_thread_fence(std::memory_order_seq_cst);
  next.length = vote.size();
  std::memcpy(next.bytes(), vote.data(), vote.size());
  next.checksum = next.sum(number);
  next.number.store(number, std::memory_order_release);
}

std::vector<std::byte> VotePages::read(int place) const {
  const int last = latest(place);
  if (last >= 0) {
    Half& it = *half(place, static_cast<std::size_t>(last));
    return {it.bytes(), it.bytes() + it.length};
  }
  // It writes a vote before it says it: where none is whole, and none was, it has said nothing.
  const bool untouched = half(place, 0)->number == 0 && half(place, 1)->number == 0;
  return untouched ? std::vector<std::byte>() : std::vector<std::byte>(1);
}

bool VotePages::dead(int place) const {
  if (half(place, 0)->left != 0) return true;
  if (ask_) return ask_(place);
  const Fd& process = pages_.at(place).process;
  if (!process) return false;
  pollfd ended{process.get(), POLLIN, 0};
  return ::poll(&ended, 1, 0) == 1;
}

void VotePages::leave() { half(self_, 0)->left = 1; }

std::string VotePages::name_of(const std::string& job, int place) {
  return "/ringdp-vote-" + job + "-" + std::to_string(place);
}

VotePages::Half* VotePages::half(int place, std::size_t which) const {
  return reinterpret_cast<Half*>(pages_.at(place).base + which * kHalfBytes);
}

int VotePages::latest(int place) const {
  int last = -1;
  for (int which = 0; which < 2; ++which) {
    Half& it = *half(place, static_cast<std::size_t>(which));
    if (it.whole() && (last < 0 || it.number > half(place, static_cast<std::size_t>(last))->number)) last = which;
  }
  return last;
}

}  // namespace ringdp
