#include "base/error.h"

#include <cstring>
#include <utility>

namespace ringdp {

Error::Error(ErrorKind kind, std::string message, ErrorContext context)
    : kind_(kind), message_(std::move(message)), context_(std::move(context)) {}

const char* error_class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kPeerLost:
      return "PeerLostError";
    case ErrorKind::kTimeout:
      return "RingTimeoutError";
    case ErrorKind::kMismatch:
      return "MismatchError";
    case ErrorKind::kHandshake:
      return "HandshakeError";
    case ErrorKind::kValue:
      return "InvalidArgumentError";
    case ErrorKind::kState:
      return "InvalidStateError";
    case ErrorKind::kSystem:
      return "SystemResourceError";
    case ErrorKind::kDamaged:
      return "DamagedDataError";
    case ErrorKind::kMembership:
      return "MembershipChanged";
    case ErrorKind::kExpelled:
      return "ExpelledError";
    case ErrorKind::kInterrupted:
      break;
  }
  return "RingError";
}

std::string errno_text(int error_number) {
  char buffer[128];
  // The GNU strerror_r, which returns the text and may leave the buffer alone (strerror_r(3)).
  return std::string(strerror_r(error_number, buffer, sizeof(buffer))) + " (errno " + std::to_string(error_number) +
         ")";
}

void throw_system(const std::string& doing, int error_number) {
  ErrorContext context;
  context.cause = errno_text(error_number);
  throw Error(ErrorKind::kSystem, "could not " + doing + ": " + context.cause, context);
}

}  // namespace ringdp
