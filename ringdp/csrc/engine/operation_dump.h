// The content of a dump file: the recorder's records, members, failures and stacks, as JSON
// (docs/how-to/diagnosis.md). Pure functions, any thread.
#pragma once

#include <cstdint>
#include <string>

#include "engine/operation_record.h"
#include "link/connection.h"

namespace ringdp {

struct DumpHead {
  PeerInfo self;
  int world = 1;
  std::string reason;  // "failure: …", "signal"
  std::string stacks;  // of this process, see process_stacks
};

std::string dump_text(const OperationRecorder& recorder, const DumpHead& head);

// A text as a JSON string, in quotes.
std::string json_text(const std::string& text);

}  // namespace ringdp
