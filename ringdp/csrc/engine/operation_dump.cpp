#include "engine/operation_dump.h"

#include <chrono>
#include <cstdio>
#include <set>

#include "base/process_stacks.h"
#include "base/text.h"

namespace ringdp {
namespace {

int64_t wall_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

template <typename Items, typename Format>
std::string list_of(const Items& items, const char* between, Format format) {
  std::string out;
  for (const auto& it : items) out += (out.empty() ? "" : between) + format(it);
  return "[" + out + "]";
}

std::string number(int64_t value) { return std::to_string(value); }

std::string field(const char* name, const std::string& value) { return json_text(name) + ":" + value; }

std::string flow_text(const FlowTimes& flow) {
  return "{" + field("peer", number(flow.peer)) + "," + field("sends", flow.sends ? "true" : "false") + "," +
         field("first_ns", number(flow.first_ns)) + "," + field("last_ns", number(flow.last_ns)) + "," +
         field("moved", std::to_string(flow.moved)) + "," + field("total", std::to_string(flow.total)) + "}";
}

std::string operation_text(const OperationRecord& it) {
  const char* order = (it.sequence & kMessageBit) != 0    ? "message"
                      : (it.sequence & kCallbackBit) != 0 ? "callback"
                                                          : "collective";
  std::string out = "{" + field("number", std::to_string(it.number));
  out += "," + field("group", json_text(std::to_string(it.group)));
  out += "," + field("sequence", std::to_string(it.sequence & ~(kMessageBit | kCallbackBit)));
  out += "," + field("order", json_text(order));
  out += "," + field("kind", json_text(std::string(collective_name(it.shape.what))));
  out += "," + field("dtype", json_text(std::string(dtype_name(it.shape.dtype))));
  out += "," + field("op", json_text(std::string(reduce_op_name(it.shape.op))));
  out += "," + field("root", number(it.shape.root));
  out += "," + field("count", std::to_string(it.shape.count));
  out += "," + field("bytes", std::to_string(it.bytes()));
  out += "," + field("text", json_text(it.shape.text()));
  if (!it.name.empty()) out += "," + field("name", json_text(it.name));
  out += "," + field("state", json_text(operation_state_name(it.state)));
  out += "," + field("queued_ns", number(it.queued_ns)) + "," + field("started_ns", number(it.started_ns)) + "," +
         field("ended_ns", number(it.ended_ns));
  if (it.call_site >= 0) out += "," + field("call_site", number(it.call_site));
  out += "," + field("flows", list_of(it.flows, ",", flow_text));
  if (it.flows_left_out > 0) out += "," + field("flows_left_out", std::to_string(it.flows_left_out));
  return out + "}";
}

std::string group_text(const RecordedGroup& it) {
  return "{" + field("id", json_text(std::to_string(it.id))) + "," + field("name", json_text(it.name)) + "," +
         field("members", list_of(it.members, ",", [](int member) { return number(member); })) + "," +
         field("removed", it.removed ? "true" : "false") + "}";
}

std::string failure_text(const RecordedFailure& it) {
  return "{" + field("at_ns", number(it.at_ns)) + "," + field("group", json_text(std::to_string(it.group))) + "," +
         field("sequence", std::to_string(it.sequence & ~(kMessageBit | kCallbackBit))) + "," +
         field("guilty", number(it.guilty)) + "," + field("kind", json_text(it.kind)) + "," +
         field("text", json_text(it.text)) + "}";
}

}  // namespace

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string dump_text(const OperationRecorder& recorder, const DumpHead& head) {
  const std::vector<OperationRecord> operations = recorder.all();
  std::set<int32_t> sites;
  for (const OperationRecord& it : operations)
    if (it.call_site >= 0) sites.insert(it.call_site);
  std::string out = "{" + field("format", "1");
  out += "," + field("rank", number(head.self.rank)) + "," + field("world", number(head.world)) + "," +
         field("host", json_text(head.self.host)) + "," + field("pid", number(head.self.pid));
  out += "," + field("reason", json_text(head.reason));
  out += "," + field("at_ns", number(nanoseconds_of(Clock::now()))) + "," + field("unix_ns", number(wall_clock_ns()));
  out += "," + field("called", std::to_string(recorder.called()));
  out += ",\n" + field("groups", list_of(recorder.groups(), ",\n", group_text));
  out += ",\n" + field("failures", list_of(recorder.failures(), ",\n", failure_text));
  std::string texts;
  for (const int32_t site : sites)
    texts += (texts.empty() ? "" : ",\n") + field(number(site).c_str(), json_text(call_site_text(site)));
  out += ",\n" + field("call_sites", "{" + texts + "}");
  out += ",\n" + field("stacks", json_text(head.stacks));
  out += ",\n" + field("operations", list_of(operations, ",\n", operation_text));
  return out + "}\n";
}

}  // namespace ringdp
