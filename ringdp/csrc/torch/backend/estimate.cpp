// The answer to torch's time estimation, by the cost model, which is Python's.
#include <torch/csrc/utils/pybind.h>

#include "collective/algorithm_table.h"
#include "torch/backend/process_group.h"

namespace ringdp {

float ProcessGroupRing::endTimeEstimate() {
  namespace py = pybind11;
  const std::shared_ptr<GroupHandle> estimated = group();
  const std::vector<OperationShape> operations = estimated->end_estimate();
  const py::gil_scoped_acquire gil;
  py::list described;
  for (const OperationShape& it : operations)
    described.append(py::make_tuple(std::string(collective_name(it.what)),
                                    std::string(algorithm_name(static_cast<Algorithm>(it.algorithm))),
                                    std::string(dtype_name(it.dtype)), it.count * dtype_size(it.dtype)));
  const py::object model = py::module_::import("ringdp.tools.estimate").attr("estimated_us");
  return model(described, estimated->view().hosts).cast<float>();
}

}  // namespace ringdp
