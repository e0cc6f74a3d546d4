#include "link/flow.h"

#include <algorithm>

#include "link/connection.h"

namespace ringdp {

uint64_t FlowIdentity::elements(uint64_t bytes) const {
  return bytes / std::max<std::size_t>(1, dtype_size(shape.dtype));
}

std::string FlowIdentity::place() const {
  if (!between.empty()) return between;
  return (sequence & kCallbackBit) != 0 ? "in a callback" : "#" + std::to_string(sequence);
}

std::string FlowIdentity::text() const {
  std::string whole = shape.text();
  auto paren = whole.find('(');
  std::string out = whole.substr(0, paren);
  out += " " + place();
  if (paren != std::string::npos) out += " " + whole.substr(paren);
  if (!name.empty()) out += " '" + name + "'";
  return out;
}

bool Disagreement::name_unknown() const {
  return theirs.shape.name_hash != 0 && theirs.shape.name_hash != mine.shape.name_hash;
}

Error Disagreement::explain(const PeerInfo& self, const PeerInfo& peer_info, const std::string& peer_name) const {
  std::string its = theirs.shape.text(), own = mine.shape.text();
  bool look_alike = its == own;
  if (!mine.name.empty()) own += " '" + mine.name + "'";
  if (!name_unknown())
    its += theirs.shape.name_hash == 0 ? "" : " '" + mine.name + "'";
  else
    its += peer_name.empty() ? " under another name" : " '" + peer_name + "'";
  if (look_alike && theirs.shape.name_hash == mine.shape.name_hash)
    its += " with another layout (splits, parameters, divisor, order of summation, or which ranks share a host)";
  if (look_alike && theirs.shape.name_hash == 0 && mine.shape.name_hash != 0) its += " (without a name)";
  ErrorContext context;
  self.fill_self(context);
  peer_info.fill_peer(context);
  context.operation = mine.text();
  context.sequence = static_cast<int64_t>(mine.sequence);
  context.name = mine.name;
  context.cause = "the ranks disagree";
  context.advice = "call the same operations with the same shapes and dtypes in the same order on every rank";
  return Error(ErrorKind::kMismatch,
               std::string("ranks disagree about ") + (mine.between.empty() ? "operation " : "a message ") +
                   mine.place() + ": " + self.text() + " does " + own + ", " + peer_info.text() + " does " + its +
                   "; " + context.advice + (beside.empty() ? "" : "; " + beside),
               context);
}

}  // namespace ringdp
