// ringdp._C for elastic jobs: groups whose members may change after a loss. Calls that may block release the GIL.
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "torch/backend/lasting_group.h"
#include "torch/backend/process_group.h"
#include "torch/bindings/bindings.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using GroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;

std::shared_ptr<ElasticGroup> elastic_of(const GroupPointer& group) {
  const ProcessGroupRing* ring = ring_of(*group, c10::kCPU);
  return ring == nullptr ? nullptr : ring->elastic();
}

ElasticGroup& required(const std::shared_ptr<ElasticGroup>& elastic) {
  if (!elastic) throw Error(ErrorKind::kState, "the members of this process group cannot change");
  return *elastic;
}

GroupPointer make_lasting_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  return c10::make_intrusive<LastingGroup>(store, rank, size);
}

void follow(const GroupPointer& group) {
  auto* lasting = dynamic_cast<LastingGroup*>(group.get());
  if (lasting == nullptr) throw Error(ErrorKind::kState, "this process group was not made for an elastic job");
  lasting->follow(elastic_of(group));
}

void on_change(const GroupPointer& group, py::function listener) {
  const auto kept = shared_function(std::move(listener));
  const py::gil_scoped_release no_gil;
  required(elastic_of(group)).on_change([kept](const ViewChange& change) {
    const py::gil_scoped_acquire gil;
    try {
      (*kept)(change.view, change.places, change.lost_names, change.decision.cause, change.counted,
              change.decision.replay);
    } catch (py::error_already_set& error) {  // the change is done: a listener cannot stop it
      error.discard_as_unraisable("on_change");
    }
  });
}

// The operations of `body` belong to a unit that is run later, and waits for them.
void before_unit(const py::function& body) {
  const UnitScope scope;
  body();
}

// A loss that `body` raises has become a Python exception.
void run_unit(const GroupPointer& group, const std::string& what, const py::function& body) {
  const py::gil_scoped_release no_gil;
  required(elastic_of(group))
      .run_unit([&] { return UnitDescription{.what = what}; },
                [&](bool /*again*/) {
                  const py::gil_scoped_acquire gil;
                  try {
                    body();
                  } catch (py::error_already_set& error) {
                    const py::module_ errors = py::module_::import("ringdp.errors");
                    if (!error.type().is(errors.attr("PeerLostError"))) throw;
                    throw Error(ErrorKind::kPeerLost, error.what());
                  }
                });
}

}  // namespace

void bind_elastic(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def("make_lasting_group", &make_lasting_group, py::arg("store"), py::arg("rank"), py::arg("size"),
             "torch's ProcessGroup, whose rank and size are those of an elastic group's present members.");
  module.def("follow_view", &follow, py::arg("process_group"), NoGil(),
             "From now on the rank and size of a group of make_lasting_group are those of its backend's members.");
  module.def(
      "is_elastic", [](const GroupPointer& group) { return elastic_of(group) != nullptr; }, py::arg("process_group"),
      "Whether the group continues after the loss of members.");
  module.def(
      "view_of", [](const GroupPointer& group) { return required(elastic_of(group)).view(); }, py::arg("process_group"),
      "The number of the present view, from 1.");
  module.def(
      "members_of", [](const GroupPointer& group) { return required(elastic_of(group)).places(); },
      py::arg("process_group"),
      "The present members: their ranks at the start of the job, or the numbers that newcomers got.");
  module.def(
      "units_left", [](const GroupPointer& group) { return required(elastic_of(group)).left(); },
      py::arg("process_group"), "How many units this rank has left, over all views.");
  module.def(
      "go_on_in",
      [](const GroupPointer& group, const std::string& world, uint64_t view) {
        return required(elastic_of(group)).go_on_in(world, view);
      },
      py::arg("process_group"), py::arg("world"), py::arg("view"), NoGil(),
      "All members of the view go on over the connections of this name (prepare_world), with its newcomers; they call "
      "it after the "
      "same\nunit. False: a member was lost meanwhile, and they go on without it where they were.");
  module.def(
      "go_on_without",
      [](const GroupPointer& group, const std::vector<int>& ranks, uint64_t view, const std::string& cause) {
        return required(elastic_of(group)).go_on_without(ranks, view, cause);
      },
      py::arg("process_group"), py::arg("ranks"), py::arg("view"), py::arg("cause"), NoGil(),
      "All members of the view but these go on without them; they call it after the same unit.");
  module.def(
      "enter_world",
      [](const GroupPointer& group, uint64_t view, uint64_t left) { required(elastic_of(group)).enter(view, left); },
      py::arg("process_group"), py::arg("view"), py::arg("left"), NoGil(),
      "On a newcomer: become a member of the view that go_on_in has made.");
  module.def(
      "has_calls_in_flight",
      [](const GroupPointer& group) { return required(elastic_of(group)).has_calls_in_flight(); },
      py::arg("process_group"), "Whether operations that belong to no unit have not ended.");
  module.def(
      "lose_member",
      [](const GroupPointer& group, int place, const std::string& cause) {
        required(elastic_of(group)).lose(place, cause);
      },
      py::arg("process_group"), py::arg("place"), py::arg("cause"), NoGil(),
      "The present member of this number (members_of) is lost from now on.");
  module.def(
      "before_first_unit", [](const GroupPointer& group) { return required(elastic_of(group)).first_unit(); },
      py::arg("process_group"),
      "Whether no unit was completed in the present view, which is not the first: ranks may have entered it at "
      "different places of the program, so operations of later units wait for the first one.");
  module.def("before_unit", &before_unit, py::arg("body"),
             "Calls `body()`, whose operations belong to a later unit, which waits for them.");
  module.def(
      "on_change", &on_change, py::arg("process_group"), py::arg("listener"),
      "Called after each change, by the thread that makes it, with (view, members, lost, cause, counted, replay).");
  module.def(
      "run_unit", &run_unit, py::arg("process_group"), py::arg("what"), py::arg("body"),
      "Calls `body()` as a unit on all members; again after the loss of one, unless it had returned on all. `what` "
      "is its name in the log.");
}

}  // namespace ringdp
