// OperationRecord and what belongs to it, for Python: the recorder's content, as `operations` and `operations_since`
// give it. Included by the two modules (core_module.cpp with pip's pybind11, torch/bindings/process_group_bindings.cpp
// with torch's).
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "engine/operation_record.h"

namespace ringdp {

inline std::tuple<std::vector<OperationRecord>, uint64_t, uint64_t> operations_since(const OperationRecorder& recorder,
                                                                                     uint64_t cursor) {
  uint64_t lost = 0;
  std::vector<OperationRecord> records = recorder.ended_since(cursor, lost);
  return {std::move(records), cursor, lost};
}

inline void bind_records(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<FlowTimes>(module, "FlowTimes", py::module_local(),
                        "Bytes of one operation to or from one peer. Times: time.monotonic_ns(); 0: not yet.")
      .def_readonly("peer", &FlowTimes::peer, "Rank in the job.")
      .def_readonly("sends", &FlowTimes::sends, "To the peer; otherwise from it.")
      .def_readonly("first_ns", &FlowTimes::first_ns)
      .def_readonly("last_ns", &FlowTimes::last_ns, "The last byte so far.")
      .def_readonly("moved", &FlowTimes::moved, "Bytes so far.")
      .def_readonly("total", &FlowTimes::total, "Bytes in all.")
      .def_readonly("work_first_ns", &FlowTimes::work_first_ns,
                    "Work on its bytes began: encoding, adding, decoding, copying; 0: none was noted.")
      .def_readonly("work_last_ns", &FlowTimes::work_last_ns, "And ended so far.")
      .def_readonly("work_ns", &FlowTimes::work_ns, "Spent on it.");
  py::class_<OperationRecord>(module, "OperationRecord", py::module_local(),
                              "One operation of this rank. Times: time.monotonic_ns(); 0: that has not happened.")
      .def_readonly("number", &OperationRecord::number, "Counts the operations of all groups as they were called.")
      .def_readonly("ended_number", &OperationRecord::ended_number, "Counts them as they ended; 0: it is in flight.")
      .def_readonly("group", &OperationRecord::group, "The number of a RecordedGroup.")
      .def_readonly("sequence", &OperationRecord::sequence, "In its group; the same on all members.")
      .def_property_readonly(
          "in_order", [](const OperationRecord& self) { return (self.sequence & (kCallbackBit | kMessageBit)) == 0; },
          "It has a place in the order of its group: not a message, not issued inside a callback.")
      .def_property_readonly(
          "kind", [](const OperationRecord& self) { return std::string(collective_name(self.shape.what)); },
          "'all_reduce', …")
      .def_property_readonly("dtype",
                             [](const OperationRecord& self) { return std::string(dtype_name(self.shape.dtype)); })
      .def_property_readonly("op",
                             [](const OperationRecord& self) { return std::string(reduce_op_name(self.shape.op)); })
      .def_property_readonly("text", [](const OperationRecord& self) { return self.shape.text(); })
      .def_property_readonly(
          "algorithm", [](const OperationRecord& self) { return self.shape.algorithm; },
          "Its number, see algorithms().")
      .def_property_readonly(
          "root", [](const OperationRecord& self) { return self.shape.root; },
          "Or a message's tag, or the codec of a compressed all-reduce; -1: none.")
      .def_property_readonly(
          "count", [](const OperationRecord& self) { return self.shape.count; }, "Elements of one rank's input.")
      .def_property_readonly("bytes", &OperationRecord::bytes, "Of one rank's input.")
      .def_readonly("name", &OperationRecord::name)
      .def_readonly("call_site", &OperationRecord::call_site)
      .def_property_readonly(
          "state", [](const OperationRecord& self) { return std::string(operation_state_name(self.state)); },
          "'queued', 'started', 'done' or 'failed'.")
      .def_readonly("queued_ns", &OperationRecord::queued_ns, "The call.")
      .def_readonly("started_ns", &OperationRecord::started_ns, "Its turn came in its group.")
      .def_readonly("ended_ns", &OperationRecord::ended_ns)
      .def_readonly("flows", &OperationRecord::flows)
      .def_readonly("flows_left_out", &OperationRecord::flows_left_out);
  py::class_<RecordedGroup>(module, "RecordedGroup", py::module_local(), "A group of which operations are recorded.")
      .def_readonly("id", &RecordedGroup::id)
      .def_readonly("name", &RecordedGroup::name)
      .def_readonly("members", &RecordedGroup::members, "Ranks in the job.")
      .def_readonly("removed", &RecordedGroup::removed);
}

}  // namespace ringdp
