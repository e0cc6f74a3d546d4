// The one exception of the core. Becomes the matching class of ringdp/errors.py at the Python border (csrc/torch,
// core_module.cpp), which is the only place exceptions leave C++. Any thread.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace ringdp {

enum class ErrorKind : uint8_t {
  kPeerLost = 0,     // PeerLostError (ConnectionError): a rank died, left, or its connection broke
  kTimeout = 1,      // RingTimeoutError (TimeoutError)
  kMismatch = 2,     // MismatchError (ValueError): ranks call different operations, or with different arguments
  kHandshake = 3,    // HandshakeError (ConnectionError): rendezvous or handshake failed, or another job
  kValue = 4,        // InvalidArgumentError (ValueError): this rank's own arguments
  kState = 5,        // InvalidStateError: used after shutdown, after a failure, in a forked child
  kSystem = 6,       // SystemResourceError (OSError): descriptors, memory, ports
  kInterrupted = 7,  // not seen by users: a Python signal handler raised during a wait
  kDamaged = 8,      // DamagedDataError (PeerLostError): bytes were corrupted on the way
  kMembership =
      9,          // MembershipChanged (PeerLostError): the group has other members now, and an operation was unfinished
  kExpelled = 10  // ExpelledError (PeerLostError): the other members go on without this rank
};

// The fields of an error. Empty and -1 mean "not known".
struct ErrorContext {
  int rank = -1;     // the rank that raises
  std::string host;  // its host
  int peer = -1;     // the guilty rank
  std::string peer_host;
  int64_t peer_pid = -1;
  std::string operation;  // "all_reduce #17 (float32[4096], SUM)"
  int64_t sequence = -1;
  std::string name;          // bucket or user given name, parameter names
  std::string cause;         // "connection reset by peer"
  std::string advice;        // what to do
  bool unexplained = false;  // a connection ended, and no rank has given the reason
  int64_t view = -1;         // of an elastic group, after the change that the error reports
  std::vector<int> survivors;
};

const char* error_class_name(ErrorKind kind);  // in ringdp/errors.py

// Its kind, text and context do not change after it is made, so all threads may read it.
class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message, ErrorContext context = {});

  const char* what() const noexcept override { return message_.c_str(); }
  ErrorKind kind() const noexcept { return kind_; }
  const ErrorContext& context() const noexcept { return context_; }

 private:
  ErrorKind kind_;
  std::string message_;
  ErrorContext context_;
};

// Error(kSystem) with errno's text; `doing` reads "bind to 10.0.0.1:29501".
[[noreturn]] void throw_system(const std::string& doing, int error_number);

std::string errno_text(int error_number);

}  // namespace ringdp
