// The memory that two processes share: twice in the address space, sealed, private to the user, refused where it is not
// what it should be, and not in forked children.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <fstream>

#include "testing.h"
#include "transport/pair_memory.h"

namespace ringdp::testing {
namespace {

constexpr std::size_t kRing = PairMemory::kMinRingBytes;
constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW;

Fd made(std::size_t ring_bytes = kRing) {
  std::string problem;
  Fd memory = PairMemory::create(ring_bytes, problem);
  CHECK_EQ(problem, std::string());
  REQUIRE(static_cast<bool>(memory));
  return memory;
}

std::string problem_of(const Fd& memory, std::size_t ring_bytes = kRing) {
  std::string problem;
  CHECK(!PairMemory::map(memory, ring_bytes, problem));
  return problem;
}

// As `create` makes it, but for what a case does differently.
Fd by_hand(off_t bytes, bool allocated, int seals, mode_t mode = 0600) {
  Fd memory(memfd_create("by hand", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(memory && ftruncate(memory.get(), bytes) == 0 && fchmod(memory.get(), mode) == 0);
  REQUIRE(!allocated || fallocate(memory.get(), 0, 0, bytes) == 0);
  REQUIRE(seals == 0 || fcntl(memory.get(), F_ADD_SEALS, seals) == 0);
  return memory;
}

off_t right_size() {
  struct stat status{};
  Fd memory = made();
  REQUIRE(fstat(memory.get(), &status) == 0);
  return status.st_size;
}

// Runs `body` in a child process, which returns a text.
std::string in_child(const std::function<std::string()>& body) {
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  pid_t child = fork();
  if (child == 0) {
    std::string said = body();
    _exit(write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string said(4096, '\0');
  ssize_t got = read(ends[0], said.data(), said.size());
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  said.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return said;
}

std::string problem_of_creating() {
  std::string problem;
  return PairMemory::create(kRing, problem) ? "no problem" : problem;
}

// seccomp(2): the system call `number` fails with `error_number`, here and in children.
bool forbid(int number, int error_number) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error_number)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog filter{std::size(program), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

}  // namespace

CASE("each ring stands twice in a row, apart from the other and from the control page") {
  std::string problem;
  Fd memory = made(2 * kRing);
  auto here = PairMemory::map(memory, 2 * kRing, problem);
  auto there = PairMemory::map(memory, 2 * kRing, problem);
  REQUIRE(here && there);
  CHECK_EQ(here->ring_bytes(), 2 * kRing);
  here->control()[0] = here->control()[PairMemory::kControlBytes - 1] = std::byte{9};
  for (int which = 0; which < 2; ++which) {
    std::byte* ring = here->ring(which);
    for (std::size_t i = 0; i < 4 * kRing; ++i) REQUIRE(ring[i] == std::byte{0});
    auto mark = static_cast<std::byte>(which + 1);
    for (std::size_t i = kRing; i < 3 * kRing; ++i) ring[i] = mark;  // across the end
    for (std::size_t i = 0; i < 2 * kRing; ++i) {
      REQUIRE(ring[i] == mark && ring[i + 2 * kRing] == mark);
      REQUIRE(there->ring(which)[i] == mark);
    }
  }
  CHECK(there->control()[0] == std::byte{9} && there->control()[PairMemory::kControlBytes - 1] == std::byte{9});
  CHECK(there->ring(0)[0] == std::byte{1});
  memory.reset();
  here.reset();
  there->ring(1)[0] = std::byte{7};  // it stays as long as one has it
  CHECK(there->ring(1)[2 * kRing] == std::byte{7});
  PairMemory moved = std::move(*there);
  CHECK(there->control() == nullptr && moved.ring(1)[0] == std::byte{7});
}

CASE("the memory is its user's alone, of a fixed size, whole, and cannot be executed") {
  Fd memory = made();
  struct stat status{};
  REQUIRE(fstat(memory.get(), &status) == 0);
  CHECK_EQ(status.st_mode & 07777, 0600u);
  CHECK_EQ(status.st_uid, geteuid());
  CHECK(status.st_blocks * 512 >= status.st_size);
  CHECK(static_cast<std::size_t>(status.st_size) >= 2 * kRing + PairMemory::kControlBytes);
  CHECK_EQ(fcntl(memory.get(), F_GET_SEALS) & (kSize | F_SEAL_SEAL), kSize | F_SEAL_SEAL);
  CHECK(ftruncate(memory.get(), 0) != 0 && ftruncate(memory.get(), 2 * status.st_size) != 0);
  CHECK(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
  CHECK_EQ(fcntl(memory.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

CASE("a ring that is no power of two, too small or too large is a mistake of the caller") {
  std::string problem;
  for (std::size_t bytes : {std::size_t{0}, kRing / 2, kRing + 4096, 3 * kRing, 2 * PairMemory::kMaxRingBytes})
    CHECK_THROWS(ErrorKind::kValue, PairMemory::create(bytes, problem));
}

CASE("a descriptor of anything else is refused, in words") {
  off_t size = right_size();
  std::string problem;
  CHECK(PairMemory::map(by_hand(size, true, kSize | F_SEAL_SEAL), kRing, problem).has_value());
  CHECK_EQ(problem, std::string());
  auto has = [&](const std::string& text, const char* part) {
    if (text.find(part) == std::string::npos) report_failure(__FILE__, __LINE__, "'" + text + "' without " + part);
  };
  has(problem_of(by_hand(size, true, 0)), "not sealed");
  has(problem_of(by_hand(size, true, kSize)), "not sealed");
  has(problem_of(by_hand(size, true, kSize | F_SEAL_SEAL, 0644)), "others may open");
  has(problem_of(by_hand(size, false, kSize | F_SEAL_SEAL)), "not allocated");
  has(problem_of(by_hand(size - 4096, true, kSize | F_SEAL_SEAL)), "are expected");
  has(problem_of(by_hand(size + 4096, true, kSize | F_SEAL_SEAL)), "are expected");
  has(problem_of(by_hand(size, true, kSize | F_SEAL_SEAL | F_SEAL_WRITE)), "mmap: ");
  has(problem_of(made(), 2 * kRing), "are expected");
  has(problem_of(Fd(open("/dev/null", O_RDWR | O_CLOEXEC))), "not memory");
  has(problem_of(Fd(open("/proc/self/exe", O_RDONLY | O_CLOEXEC))), "not memory");
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  Fd reading(ends[0]), writing(ends[1]);
  has(problem_of(reading), "not memory");
  has(problem_of(Fd()), "fstat: ");
}

CASE("a forked child has neither the memory nor its descriptor, and does not unmap what is there instead") {
  std::string problem;
  Fd memory = made();
  auto mapped = PairMemory::map(memory, kRing, problem);
  REQUIRE(mapped.has_value());
  std::byte* at = mapped->control();
  std::string said = in_child([&]() -> std::string {
    unsigned char present = 0;
    for (std::byte* place : {at, mapped->ring(0), mapped->ring(0) + kRing, mapped->ring(1), mapped->ring(1) + kRing})
      if (mincore(place, 4096, &present) == 0 || errno != ENOMEM) return "still mapped";
    if (fcntl(memory.get(), F_GETFD) != -1) return "still open";
    void* other = mmap(at, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    mapped.reset();
    return other == at && mincore(at, 4096, &present) == 0 ? "gone" : "took away what was there";
  });
  CHECK_EQ(said, std::string("gone"));
  at[0] = std::byte{1};  // and here it is as before
  CHECK(fcntl(memory.get(), F_GETFD) != -1);
}

CASE("nothing stays mapped or open") {
  auto count = [] {
    std::ifstream maps("/proc/self/maps");
    int found = 0;
    for (std::string line; std::getline(maps, line);) found += line.find("memfd:ringdp") != std::string::npos;
    return found;
  };
  CHECK_EQ(count(), 0);
  {
    std::string problem;
    Fd memory = made();
    auto mapped = PairMemory::map(memory, kRing, problem);
    CHECK(mapped && count() > 0);
  }
  CHECK_EQ(count(), 0);
}

CASE("limits and filters refuse in words, and nobody dies of a signal") {
  auto has = [](const std::string& text, const char* part) {
    if (text.find(part) == std::string::npos) report_failure(__FILE__, __LINE__, "'" + text + "' without " + part);
  };
  auto limited = [](__rlimit_resource what, rlim_t to) {
    return in_child([=] {
      rlimit limit{to, to};
      return setrlimit(what, &limit) == 0 ? problem_of_creating() : "cannot set a limit";
    });
  };
  has(limited(RLIMIT_FSIZE, 2 * kRing), "ulimit -f");
  CHECK_EQ(limited(RLIMIT_FSIZE, static_cast<rlim_t>(right_size())), std::string("no problem"));
  has(limited(RLIMIT_NOFILE, 3), "memfd_create: Too many open files");
  auto filtered = [](int number, int error_number) {
    return in_child([=] { return forbid(number, error_number) ? problem_of_creating() : "no seccomp"; });
  };
  has(filtered(SYS_memfd_create, EPERM), "memfd_create: Operation not permitted (errno 1) (a seccomp filter?)");
  has(filtered(SYS_memfd_create, ENOSYS), "memfd_create: Function not implemented");
  has(filtered(SYS_fallocate, ENOSPC), "fallocate: No space left on device");
  has(filtered(SYS_fcntl, EPERM), "sealing the memory: ");
  std::string unmappable = in_child([] {
    Fd memory = made();
    return forbid(SYS_madvise, EINVAL) ? problem_of(memory) : "no seccomp";
  });
  has(unmappable, "madvise: Invalid argument");
}

}  // namespace ringdp::testing
