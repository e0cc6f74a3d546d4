#include "fuzz.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "base/error.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace ringdp::fuzz {
namespace {

volatile uint64_t current_seed = 0;
std::map<std::string, uint64_t> counts;

void say_seed() {
  char text[96];
  int length = std::snprintf(text, sizeof(text), "\nround of --seed %llu --rounds 1\n",
                             static_cast<unsigned long long>(current_seed));
  if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) _exit(2);
}

void on_signal(int number) {
  say_seed();
  signal(number, SIG_DFL);
  raise(number);
}

}  // namespace

uint64_t Random::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

uint64_t Random::odd_number() {
  switch (below(4)) {
    case 0:
      return below(5);
    case 1:
      return (uint64_t{1} << below(64)) + below(3) - 1;
    case 2:
      return ~uint64_t{0} - below(300);
    default:
      return next();
  }
}

std::vector<std::byte> Random::bytes(std::size_t count) {
  std::vector<std::byte> out(count);
  for (std::byte& byte : out) byte = static_cast<std::byte>(next());
  return out;
}

void mutate(std::vector<std::byte>& bytes, Random& random) {
  for (uint64_t left = random.below(4); left > 0 && !bytes.empty(); --left) {
    std::size_t at = random.below(bytes.size());
    std::size_t some = 1 + random.below(std::min<std::size_t>(bytes.size() - at, 16));
    auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random.below(6)) {
      case 0:
        bytes[at] ^= static_cast<std::byte>(1U << random.below(8));
        break;
      case 1:
        for (std::size_t i = 0; i < some; ++i) bytes[at + i] = static_cast<std::byte>(random.next());
        break;
      case 2: {  // a number of two, four or eight bytes
        uint64_t number = random.odd_number();
        std::memcpy(&bytes[at], &number, std::min<std::size_t>(std::size_t{2} << random.below(3), bytes.size() - at));
        break;
      }
      case 3:
        bytes.erase(begin, begin + static_cast<std::ptrdiff_t>(some));
        break;
      case 4: {
        auto more = random.bytes(some);
        bytes.insert(begin, more.begin(), more.end());
        break;
      }
      default: {
        std::vector<std::byte> again(begin, begin + static_cast<std::ptrdiff_t>(some));
        bytes.insert(begin, again.begin(), again.end());
      }
    }
  }
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

void count(const char* what) { ++counts[what]; }

}  // namespace ringdp::fuzz

int main(int argc, char** argv) {
  using namespace ringdp::fuzz;
  uint64_t seed = std::random_device()(), rounds = ~uint64_t{0};
  double seconds = 10;
  for (int i = 1; i + 1 < argc; i += 2) {
    std::string name = argv[i];
    if (name == "--seed") seed = std::strtoull(argv[i + 1], nullptr, 10);
    if (name == "--rounds") rounds = std::strtoull(argv[i + 1], nullptr, 10);
    if (name == "--seconds") seconds = std::strtod(argv[i + 1], nullptr);
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(say_seed);
  for (int number : {SIGABRT, SIGSEGV, SIGALRM}) signal(number, on_signal);
  std::printf("first seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t done = 0;
  for (; done < rounds && std::chrono::steady_clock::now() < end; ++done) {
    current_seed = seed + done;
    alarm(20);  // a round takes milliseconds: this one hangs
    Random random(current_seed);
    try {
      round(random);
    } catch (const ringdp::Error&) {
      count("ended in an error");
    } catch (const std::exception& other) {
      std::fprintf(stderr, "an exception that is no ringdp::Error: %s\n", other.what());
      std::abort();
    }
  }
  alarm(0);
  std::printf("%llu rounds\n", static_cast<unsigned long long>(done));
  for (const auto& [what, times] : counts)
    std::printf("%12llu %s\n", static_cast<unsigned long long>(times), what.c_str());
  return 0;
}
