// The error of a peer to which a rank cannot connect; its text is true on every rank. Pure functions, any thread.
#pragma once

#include <string>

#include "base/error.h"
#include "mesh/connector.h"
#include "mesh/link.h"

namespace ringdp {

struct UnreachableText {
  ErrorKind kind = ErrorKind::kHandshake;
  std::string text;
  std::string advice;
};

// `when`: "while the ranks met", of a peer that was lost.
UnreachableText unreachable_text(const PeerInfo& self, const PeerInfo& peer, const Connector::Failure& failure,
                                 const std::string& when);

}  // namespace ringdp
