#include "transport/poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.h"

namespace ringdp {
namespace {

constexpr uint32_t kWakeToken = 0xffffffffU;
constexpr uint32_t kTimerToken = 0xfffffffeU;

void control(int epoll, int action, int fd, uint32_t token, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u32 = token;
  if (epoll_ctl(epoll, action, fd, &event) != 0) throw_system("watch a descriptor", errno);
}

}  // namespace

Poller::Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wakeup_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_) throw_system("create an epoll descriptor", errno);
  if (!wakeup_) throw_system("create an eventfd", errno);
  control(epoll_.get(), EPOLL_CTL_ADD, wakeup_.get(), kWakeToken, EPOLLIN);
}

void Poller::add(int fd, uint32_t token) { control(epoll_.get(), EPOLL_CTL_ADD, fd, token, EPOLLIN); }

void Poller::add_bell(int fd, uint32_t token) { control(epoll_.get(), EPOLL_CTL_ADD, fd, token, EPOLLIN | EPOLLET); }

void Poller::want_write(int fd, uint32_t token, bool want) {
  control(epoll_.get(), EPOLL_CTL_MOD, fd, token, want ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void Poller::remove(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

const std::vector<Poller::Event>& Poller::wait(int timeout_ms) {
  events_.clear();
  std::array<epoll_event, 64> raw;
  int count = epoll_wait(epoll_.get(), raw.data(), static_cast<int>(raw.size()), timeout_ms);
  if (count < 0) {
    if (errno == EINTR) return events_;
    throw_system("wait for the network", errno);
  }
  for (int i = 0; i < count; ++i) {
    if (raw[i].data.u32 == kWakeToken || raw[i].data.u32 == kTimerToken) {
      const Fd& rung = raw[i].data.u32 == kWakeToken ? wakeup_ : timer_;
      uint64_t value;
      [[maybe_unused]] auto ignored = read(rung.get(), &value, sizeof(value));  // EAGAIN if another read won
      continue;
    }
    bool broken = (raw[i].events & (EPOLLHUP | EPOLLERR)) != 0;  // the next receive returns the error
    events_.push_back({raw[i].data.u32, broken || (raw[i].events & EPOLLIN) != 0, (raw[i].events & EPOLLOUT) != 0});
  }
  return events_;
}

void Poller::wake_at(Clock::time_point time) {
  if (!timer_) {
    timer_ = Fd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (!timer_) throw_system("create a timer", errno);
    control(epoll_.get(), EPOLL_CTL_ADD, timer_.get(), kTimerToken, EPOLLIN);
  }
  // Clock is CLOCK_MONOTONIC; a time that has passed rings at once, zero would switch the timer off.
  auto ns = std::max<int64_t>(1, std::chrono::nanoseconds(time.time_since_epoch()).count());
  itimerspec when{};
  when.it_value.tv_sec = ns / 1'000'000'000;
  when.it_value.tv_nsec = ns % 1'000'000'000;
  if (timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr) != 0) throw_system("set a timer", errno);
}

void Poller::wake() {
  uint64_t one = 1;
  [[maybe_unused]] auto ignored = write(wakeup_.get(), &one, sizeof(one));  // EAGAIN: it is awake already
}

void Poller::close() {
  epoll_.reset();
  wakeup_.reset();
  timer_.reset();
}

}  // namespace ringdp
