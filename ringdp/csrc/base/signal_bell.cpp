#include "base/signal_bell.h"

#include <semaphore.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <mutex>
#include <thread>

namespace ringdp {
namespace {

struct Bell {
  std::atomic<bool> used{false};
  std::atomic<bool> signals{false};
  std::atomic<bool> by_signal{false};
  sem_t semaphore{};  // never destroyed: a handler may be looking at it
  bool ready = false;
};

std::array<Bell, 256> bells;
std::mutex bells_mutex;
std::atomic<pid_t> owner{0};
int made = 0;
bool user_signal_is_ours = false;

void on_signal(int) {
  const int kept = errno;
  if (getpid() == owner.load(std::memory_order_relaxed))
    for (Bell& bell : bells)
      if (bell.signals.load(std::memory_order_acquire)) {
        bell.by_signal.store(true, std::memory_order_release);
        sem_post(&bell.semaphore);
      }
  errno = kept;
}

bool is_default(int signal) {
  struct sigaction now{};
  return sigaction(signal, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL;
}

bool is_ours(int signal) {
  struct sigaction now{};
  return sigaction(signal, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == on_signal;
}

bool take(int signal) {
  if (is_ours(signal)) return true;
  if (!is_default(signal)) return false;
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  return sigaction(signal, &action, nullptr) == 0;
}

void give_back(int signal) {
  if (is_ours(signal)) ::signal(signal, SIG_DFL);
}

}  // namespace

int dump_signal() { return SIGRTMAX - 6; }

SignalBell::SignalBell(bool signals) : signals_(signals) {
  std::lock_guard lock(bells_mutex);
  for (std::size_t i = 0; i < bells.size() && place_ < 0; ++i)
    if (!bells[i].used) place_ = static_cast<int>(i);
  if (place_ < 0) return;
  Bell& bell = bells[static_cast<std::size_t>(place_)];
  if (!bell.ready) sem_init(&bell.semaphore, 0, 0);
  bell.ready = true;
  while (sem_trywait(&bell.semaphore) == 0) {
  }
  bell.by_signal = false;
  bell.used = true;
  if (!signals_) return;
  bell.signals.store(true, std::memory_order_release);
  owner = getpid();
  if (made++ == 0) user_signal_is_ours = take(SIGUSR1);
  take(dump_signal());
}

SignalBell::~SignalBell() {
  if (place_ < 0) return;
  std::lock_guard lock(bells_mutex);
  Bell& bell = bells[static_cast<std::size_t>(place_)];
  bell.signals = bell.used = false;
  if (!signals_ || --made > 0) return;
  if (user_signal_is_ours) give_back(SIGUSR1);
  give_back(dump_signal());
  user_signal_is_ours = false;
}

void SignalBell::ring() {
  if (place_ >= 0) sem_post(&bells[static_cast<std::size_t>(place_)].semaphore);
}

bool SignalBell::wait() {
  if (place_ < 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return false;
  }
  Bell& bell = bells[static_cast<std::size_t>(place_)];
  while (sem_wait(&bell.semaphore) != 0 && errno == EINTR) {
  }
  return bell.by_signal.exchange(false, std::memory_order_acq_rel);
}

bool SignalBell::handles_user_signal() {
  std::lock_guard lock(bells_mutex);
  return made > 0 && user_signal_is_ours && is_ours(SIGUSR1);
}

}  // namespace ringdp
