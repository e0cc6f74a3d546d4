// A test framework of one page: named cases, checks that may be made from any thread, ranks as threads.
//
//   CASE("what should hold") { CHECK(a == b); CHECK_EQ(got, wanted); CHECK_THROWS(ErrorKind::kValue, call()); }
//
// A failed check is printed and the case goes on; REQUIRE leaves the thread's part of the case. A case that takes
// longer than its limit (60 s; --limit-s N) ends the process with its name.
//   tests [--list] [--limit-s N] [--file test_x] [part of a name …]
#pragma once

#include <functional>
#include <sstream>
#include <string>
#include <string_view>

#include "base/error.h"

namespace ringdp::testing {

struct RequireFailed {};

// Any thread.
void report_failure(const char* file, int line, const std::string& message);

// Runs body(rank) on one thread per rank and joins them all. An exception becomes a failure that names the rank.
void run_ranks(int world_size, const std::function<void(int rank)>& body);

struct Registration {
  Registration(const char* name, const char* file, void (*body)());
};

template <class T>
std::string shown(const T& value) {
  if constexpr (requires(std::ostream& out) { out << value; }) {
    std::ostringstream text;
    text << value;
    return text.str();
  } else if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else {
    return "(not printable)";
  }
}

// Messages are put together in testing.cpp, once, instead of in every check.
void report_unequal(const char* file, int line, const char* expression, const std::string& got,
                    const std::string& wanted);
void report_wrong_kind(const char* file, int line, const char* expression, ErrorKind wanted, const Error& thrown);
void report_nothing_thrown(const char* file, int line, const char* expression);

template <class A, class B>
bool check_equal(const A& got, const B& wanted, const char* expression, const char* file, int line) {
  if (got == wanted) return true;
  report_unequal(file, line, expression, shown(got), shown(wanted));
  return false;
}

// Returns the error's message, empty when nothing was thrown.
template <class Call>
std::string check_throws(ErrorKind kind, Call&& call, const char* expression, const char* file, int line) {
  try {
    call();
  } catch (const Error& error) {
    if (error.kind() != kind) report_wrong_kind(file, line, expression, kind, error);
    return error.what();
  }
  report_nothing_thrown(file, line, expression);
  return {};
}

#define RINGDP_JOIN_(a, b) a##b
#define RINGDP_JOIN(a, b) RINGDP_JOIN_(a, b)

#define RINGDP_CASE(name, number)                                                                              \
  static void RINGDP_JOIN(case_, number)();                                                                    \
  static const ::ringdp::testing::Registration RINGDP_JOIN(registration_, number)(name, __FILE__,              \
                                                                                  RINGDP_JOIN(case_, number)); \
  static void RINGDP_JOIN(case_, number)()

#define CASE(name) RINGDP_CASE(name, __COUNTER__)

#define CHECK(condition) ((condition) ? (void)0 : ::ringdp::testing::report_failure(__FILE__, __LINE__, #condition))

// The message is made only where it is needed: there are loops of millions of checks.
#define CHECK_MSG(condition, message) \
  ((condition) ? (void)0 : ::ringdp::testing::report_failure(__FILE__, __LINE__, message))

#define REQUIRE(condition)                                               \
  do {                                                                   \
    if (!(condition)) {                                                  \
      ::ringdp::testing::report_failure(__FILE__, __LINE__, #condition); \
      throw ::ringdp::testing::RequireFailed();                          \
    }                                                                    \
  } while (false)

#define CHECK_EQ(got, wanted) ::ringdp::testing::check_equal(got, wanted, #got, __FILE__, __LINE__)

#define CHECK_THROWS(kind, ...) \
  ::ringdp::testing::check_throws(kind, [&] { (void)(__VA_ARGS__); }, #__VA_ARGS__, __FILE__, __LINE__)

}  // namespace ringdp::testing
