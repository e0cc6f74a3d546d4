// The compressed all-reduce and the codecs for Python, over tensors: float32, on the CPU, contiguous.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "codec/codec.h"
#include "codec/plugin.h"
#include "codec/promises.h"
#include "collective/compressed_plan.h"
#include "torch/backend/c10d_compressed_all_reduce.h"
#include "torch/backend/process_group.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/flat_tensors.h"
#include "torch/device/device_codec.h"
#include "torch/reducer/gradient_compression.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using MaybeTensor = std::optional<at::Tensor>;

[[noreturn]] void refuse_compressed(const std::string& why) {
  throw Error(ErrorKind::kValue, "all_reduce_compressed: " + why);
}

// A FiniteReport for Python: `own` is an index into the buffer.
struct BufferReport {
  std::shared_ptr<FiniteReport> report;  // shared with the operation
  const std::byte* begin;

  int64_t own() const {
    return report->own == nullptr ? -1 : (report->own - begin) / static_cast<int64_t>(sizeof(float));
  }
};

void require_apart(const std::vector<int64_t>& offsets, const std::vector<int64_t>& counts, int64_t numel) {
  std::vector<std::size_t> order(offsets.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return offsets[a] < offsets[b]; });
  int64_t end = 0;
  for (const std::size_t i : order) {
    const std::string range =
        "elements " + std::to_string(offsets[i]) + " to " + std::to_string(offsets[i] + counts[i]);
    if (offsets[i] < 0 || counts[i] < 0 || counts[i] > numel - offsets[i])
      refuse_compressed(range + " are not in a buffer of " + std::to_string(numel));
    if (counts[i] > 0 && offsets[i] < end) refuse_compressed(range + " are in two sections");
    end = std::max(end, offsets[i] + counts[i]);
  }
}

void add_residuals(CompressedSection& section, const at::Tensor& residual, const at::Tensor& next,
                   const std::string& name) {
  require_flat(residual, at::kFloat, name);
  require_flat(next, at::kFloat, "new " + name);
  const auto count = static_cast<int64_t>(section.count);
  if (residual.numel() != count || next.numel() != count)
    refuse_compressed(name + " has " + std::to_string(residual.numel()) + " and " + std::to_string(next.numel()) +
                      " elements, its section " + std::to_string(count));
  section.residual = residual.const_data_ptr<float>();
  section.new_residual = next.mutable_data_ptr<float>();
}

// The first residual is read, the second is written.
c10::intrusive_ptr<c10d::Work> all_reduce_over_c10d(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                    const at::Tensor& buffer,
                                                    const std::vector<CompressedSection>& sections,
                                                    const Compression& compression,
                                                    std::shared_ptr<FiniteReport> report,
                                                    std::vector<at::Tensor> kept) {
  C10dCompressedAllReduce::Call call;
  call.group = group;
  call.buffer = buffer;
  call.compression = compression;
  call.report = std::move(report);
  call.kept = std::move(kept);
  const at::Tensor which = at::zeros({1}, at::kInt);
  call.kept.push_back(which);
  for (const CompressedSection& section : sections) {
    C10dCompressedAllReduce::Section& one = call.sections.emplace_back();
    one.x = section.x;
    one.count = section.count;
    one.owner_offset = section.owner_offset;
    if (section.residual == nullptr) continue;
    one.feedback.both[0] = const_cast<float*>(section.residual);  // only read: `which` says so
    one.feedback.both[1] = section.new_residual;
    one.feedback.which = which.const_data_ptr<int32_t>();
  }
  return C10dCompressedAllReduce::begin(std::move(call))->work();
}

std::pair<c10::intrusive_ptr<c10d::Work>, BufferReport> all_reduce_compressed(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const at::Tensor& buffer, const std::vector<int64_t>& offsets,
    const std::vector<int64_t>& counts, const std::vector<uint32_t>& owner_offsets,
    const std::vector<MaybeTensor>& residuals, const std::vector<MaybeTensor>& new_residuals, const std::string& codec,
    float loss_scale, std::size_t divisor, bool exchange) {
  const std::size_t sections_count = offsets.size();
  for (const std::size_t size : {counts.size(), owner_offsets.size(), residuals.size(), new_residuals.size()})
    if (size != sections_count)
      refuse_compressed("as many counts, owner offsets, residuals and new residuals as offsets: " +
                        std::to_string(size) + " are not " + std::to_string(sections_count));
  require_flat(buffer, at::kFloat, "the buffer");
  require_apart(offsets, counts, buffer.numel());
  ProcessGroupRing* ring = ring_of(*group, c10::DeviceType::CPU);
  if (ring == nullptr && !exchange) refuse_compressed("the group's backend for the CPU is not ring");
  std::vector<CompressedSection> sections;
  std::vector<at::Tensor> kept;
  for (std::size_t i = 0; i < sections_count; ++i) {
    CompressedSection& section = sections.emplace_back();
    section.x = buffer.mutable_data_ptr<float>() + offsets[i];
    section.count = static_cast<std::size_t>(counts[i]);
    section.owner_offset = owner_offsets[i];
    const std::string name = "residual " + std::to_string(i);
    if (residuals[i].has_value() != new_residuals[i].has_value())
      refuse_compressed(name + " and its new one must both be given");
    if (!residuals[i]) continue;
    add_residuals(section, *residuals[i], *new_residuals[i], name);
    kept.push_back(*residuals[i]);
    kept.push_back(*new_residuals[i]);
  }
  BufferReport report{std::make_shared<FiniteReport>(), static_cast<const std::byte*>(buffer.const_data_ptr())};
  const Compression compression{codec_by_name(codec), loss_scale, divisor};
  py::gil_scoped_release no_gil;
  if (exchange)
    return {all_reduce_over_c10d(group, buffer, sections, compression, report.report, std::move(kept)), report};
  auto work = ring->all_reduce_compressed(buffer, std::move(sections), compression, report.report, std::move(kept));
  return {std::move(work), std::move(report)};
}

// ---- Residuals ----

MaybeTensor current_residual(const Residuals& residuals, const std::string& name) {
  const at::Tensor current = residuals.current(name);
  return current.defined() ? MaybeTensor(current) : std::nullopt;
}

std::pair<at::Tensor, at::Tensor> write_residual(Residuals& residuals, const std::string& name, int64_t numel,
                                                 const at::Device& device) {
  const Residuals::Pair& pair = residuals.write(name, numel, device);
  return {pair.current(), pair.next()};
}

void commit_residuals(Residuals& residuals, bool finite, const std::vector<std::string>& unused) {
  if (!finite) return residuals.drop_step();
  residuals.commit({}, {unused.begin(), unused.end()});
}

// ---- The codecs ----

at::Tensor bytes_tensor(std::size_t bytes) { return at::empty(static_cast<int64_t>(bytes), at::kByte); }
std::byte* code_of(const at::Tensor& code) { return static_cast<std::byte*>(code.mutable_data_ptr()); }

at::Tensor compress(const std::string& name, const at::Tensor& x) {
  const Codec& it = codec(codec_by_name(name));
  require_flat(x, at::kFloat, "x");
  py::gil_scoped_release no_gil;
  const auto count = static_cast<std::size_t>(x.numel());
  at::Tensor code = bytes_tensor(it.encoded_bytes(count));
  it.compress(code_of(code), x.const_data_ptr<float>(), count);
  return code;
}

at::Tensor decompress(const std::string& name, const at::Tensor& code, int64_t numel) {
  const Codec& it = codec(codec_by_name(name));
  require_flat(code, at::kByte, "the code");
  const auto count = static_cast<std::size_t>(numel);
  if (numel < 0 || static_cast<std::size_t>(code.numel()) != it.encoded_bytes(count))
    throw Error(ErrorKind::kValue, "a code of " + std::to_string(code.numel()) + " bytes; " + std::to_string(numel) +
                                       " elements of " + name + " have " +
                                       std::to_string(numel < 0 ? 0 : it.encoded_bytes(count)));
  py::gil_scoped_release no_gil;
  at::Tensor out = at::empty(numel, at::kFloat);
  it.decode_set(out.mutable_data_ptr<float>(), static_cast<const std::byte*>(code.const_data_ptr()), count);
  return out;
}

}  // namespace

void bind_compression(py::module_& module) {
  py::class_<BufferReport>(module, "FiniteReport",
                           "Whether an all-reduce found infinities or NaNs; read when its Work is done.")
      .def_property_readonly("finite", [](const BufferReport& self) { return self.report->finite; })
      .def_property_readonly("own", &BufferReport::own,
                             "Index in the buffer of this rank's first input that was not finite; -1: none was.");
  module.def(
      "all_reduce_compressed", &all_reduce_compressed, py::arg("process_group"), py::arg("buffer"), py::arg("offsets"),
      py::arg("counts"), py::arg("owner_offsets"), py::arg("residuals"), py::arg("new_residuals"), py::arg("codec"),
      py::arg("loss_scale"), py::arg("divisor"), py::arg("exchange") = false,
      "Mean over all ranks of sections of a float32 buffer, in place, as codes on the wire: (Work, FiniteReport).\n"
      "Section i is elements offsets[i] to offsets[i] + counts[i], one parameter; owner_offsets[i] is zlib.crc32 of "
      "its\n"
      "name. residuals, new_residuals: float32 [counts[i]], or None in both for no error feedback. The buffer is\n"
      "`loss_scale` times larger than residuals; the sum is divided by `divisor`. `exchange`: the\n"
      "codes go by the group's all-to-all and all-gather, whatever its backend. Raises ValueError.");
  module.def(
      "owned_elements",
      [](c10::intrusive_ptr<c10d::ProcessGroup> group, std::size_t count, uint32_t owner_offset) {
        ProcessGroupRing* ring = ring_of(*group, c10::kCPU);
        if (ring == nullptr)
          throw Error(ErrorKind::kValue, "owned_elements: the group's backend for the CPU is not ring");
        return owned_elements(ring->group()->all_reduce_view(), count, owner_offset);
      },
      py::arg("process_group"), py::arg("count"), py::arg("owner_offset"),
      "[(begin, end), ...] of the elements of a parameter of `count` whose mean this rank computes when it is "
      "compressed.");
  module.def(
      "owner_weights_of",
      [](c10::intrusive_ptr<c10d::ProcessGroup> group) {
        ProcessGroupRing* ring = ring_of(*group, c10::kCPU);
        return ring == nullptr ? Weights{} : code_hosts(ring->group()->all_reduce_view()).weights;
      },
      py::arg("process_group"),
      "How much each of its hosts owns of what is compressed, by the job's map of uplinks; empty: all own alike.");
  module.def(
      "part_bounds", &part_bounds, py::arg("count"), py::arg("parts"), py::arg("owner_offset"),
      "[parts + 1]: where the parts of a parameter of `count` begin that each rank computes the mean of, when codes "
      "are exchanged and every rank is a host of its own.");
  module.def(
      "has_device_codec", [](const std::string& type) { return device_codec(c10::Device(type).type()) != nullptr; },
      py::arg("device_type"), "Whether the core's codecs can be used on that kind of device.");
  module.def(
      "codec_bytes",
      [](const std::string& name, std::size_t numel) { return codec(codec_by_name(name)).encoded_bytes(numel); },
      py::arg("codec"), py::arg("numel"), "Bytes of the code of `numel` elements.");
  py::class_<Residuals>(
      module, "Residuals",
      "What compression left out of gradients, by parameter: float32 [numel], without loss scale. A step\n"
      "writes it anew beside the one that counts, and `commit` says whether the new one counts.")
      .def(py::init<>())
      .def("current", &current_residual, py::arg("name"), "The one that counts; None where no step has left one.")
      .def("write", &write_residual, py::arg("name"), py::arg("numel"), py::arg("device"),
           "(the one that counts, zeros at first; memory for the next one, all of which this step fills).")
      .def("commit", &commit_residuals, py::arg("finite"), py::arg("unused") = std::vector<std::string>(),
           "The step counts, except for parameters that no rank used; or it was not finite, and counts for none.")
      .def("set", &Residuals::set, py::arg("name"), py::arg("current"), "Copies.")
      .def("drop", &Residuals::drop, py::arg("name"))
      .def("clear", &Residuals::clear);
  py::class_<Plugin>(module, "CodecLibrary", "A codec from a shared library, which stays loaded.")
      .def_readonly("name", &Plugin::name)
      .def_readonly("path", &Plugin::path)
      .def_readonly("sha256", &Plugin::sha256)
      .def_readonly("abi_version", &Plugin::abi_version)
      .def_readonly("block", &Plugin::block);
  module.def("load_codec", &load_plugin, py::arg("path"), py::return_value_policy::reference,
             py::call_guard<py::gil_scoped_release>(),
             "The codec of the shared library at `path`; every call of this module knows its name from now on.\n"
             "Raises ValueError for a file that is not one.");
  module.def("find_codec", &find_plugin, py::arg("sha256"), py::return_value_policy::reference,
             "The one whose file had this digest; None where none is loaded.");
  module.def(
      "codec_broken_promises", [](const std::string& name) { return broken_promises(codec(codec_by_name(name))); },
      py::arg("codec"), py::call_guard<py::gil_scoped_release>(),
      "A sentence for each broken rule of the codec's contract. After one, do not use the codec: it may corrupt "
      "memory.");
  module.def("codec_compress", &compress, py::arg("codec"), py::arg("x"),
             "The code of float32 elements, uint8 [codec_bytes(codec, x.numel())].");
  module.def("codec_decompress", &decompress, py::arg("codec"), py::arg("code"), py::arg("numel"),
             "float32 [numel]. Raises ValueError for a code of another length.");
}

}  // namespace ringdp
