// The codecs for Python, over buffers: for tests, tools and callers without tensors (core_module.cpp). GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <span>
#include <string>

#include "base/error.h"
#include "codec/codec.h"
#include "codec/plugin.h"
#include "codec/promises.h"

namespace ringdp {

// Holds a contiguous Python buffer for reading. A local variable of the calling thread.
class ReadView {
 public:
  explicit ReadView(const pybind11::buffer& buffer) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw pybind11::error_already_set();
  }
  ~ReadView() { PyBuffer_Release(&view_); }
  ReadView(const ReadView&) = delete;
  ReadView& operator=(const ReadView&) = delete;

  std::size_t size() const { return static_cast<std::size_t>(view_.len); }
  const std::byte* bytes() const { return static_cast<const std::byte*>(view_.buf); }
  std::span<const float> floats() const {
    if (size() % sizeof(float) != 0)
      throw Error(ErrorKind::kValue, std::to_string(size()) + " bytes: not a multiple of 4 (float32)");
    return {static_cast<const float*>(view_.buf), size() / sizeof(float)};
  }

 private:
  Py_buffer view_{};
};

inline std::byte* writable(pybind11::bytes& bytes) {
  return reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr()));
}

inline pybind11::bytes codec_compress(const std::string& name, const pybind11::buffer& x) {
  const Codec& it = codec(codec_by_name(name));
  const ReadView view(x);
  const auto values = view.floats();
  pybind11::bytes code(nullptr, it.encoded_bytes(values.size()));
  it.compress(writable(code), values.data(), values.size());
  return code;
}

inline std::pair<pybind11::bytes, pybind11::bytes> codec_compress_with_feedback(const std::string& name,
                                                                                const pybind11::buffer& x,
                                                                                const pybind11::buffer& residual,
                                                                                float factor) {
  const Codec& it = codec(codec_by_name(name));
  const ReadView view(x), left(residual);
  const auto values = view.floats();
  if (left.size() != view.size())
    throw Error(ErrorKind::kValue, "a residual of " + std::to_string(left.size()) + " bytes for " +
                                       std::to_string(view.size()) + " bytes of elements");
  pybind11::bytes code(nullptr, it.encoded_bytes(values.size())), next(nullptr, view.size());
  it.compress_with_feedback(writable(code), values.data(), left.floats().data(),
                            reinterpret_cast<float*>(writable(next)), factor, values.size());
  return {code, next};
}

inline void require_code_bytes(const Codec& it, std::size_t bytes, std::size_t count) {
  if (bytes == it.encoded_bytes(count)) return;
  throw Error(ErrorKind::kValue, "a code of " + std::to_string(bytes) + " bytes; " + std::to_string(count) +
                                     " elements of " + std::string(it.name) + " have " +
                                     std::to_string(it.encoded_bytes(count)));
}

inline pybind11::bytes codec_decompress(const std::string& name, const pybind11::buffer& code, std::size_t numel) {
  const Codec& it = codec(codec_by_name(name));
  const ReadView view(code);
  require_code_bytes(it, view.size(), numel);
  pybind11::bytes out(nullptr, numel * sizeof(float));
  it.decode_set(reinterpret_cast<float*>(writable(out)), view.bytes(), numel);
  return out;
}

inline bool codec_finite(const std::string& name, const pybind11::buffer& code, std::size_t numel) {
  const Codec& it = codec(codec_by_name(name));
  const ReadView view(code);
  require_code_bytes(it, view.size(), numel);
  return it.inspect(view.bytes(), numel) == Encoded::kFinite;
}

inline pybind11::list codec_specs() {
  namespace py = pybind11;
  py::list out;
  for (int number = 0; number < kCodecCount; ++number) {
    const Codec& it = codec(static_cast<CodecId>(number));
    py::list levels;
    for (const int level : it.spec.levels) levels.append(level);
    py::dict row;
    row["name"] = it.name;
    row["number"] = number;
    row["block"] = it.block;
    row["bits"] = it.spec.bits;
    row["scale_bytes"] = it.spec.scale_bytes;
    row["lowest"] = it.spec.lowest;
    row["highest"] = it.spec.highest;
    row["levels"] = levels;
    out.append(row);
  }
  return out;
}

inline void bind_codecs(pybind11::module_& module) {
  namespace py = pybind11;
  module.def(
      "codec_specs", &codec_specs,
      "The built-in codecs in the order of their numbers on the wire, a dict each: name, number, block (elements that "
      "share a scale; 1: none does), bits (of an element's code), scale_bytes, lowest, highest (whole numbers that "
      "are multiplied with the scale), levels (those that have a code; empty: all).");
  module.def(
      "codec_bytes",
      [](const std::string& name, std::size_t numel) { return codec(codec_by_name(name)).encoded_bytes(numel); },
      py::arg("codec"), py::arg("numel"), "Bytes of the code of `numel` elements.");
  module.def(
      "load_codec", [](const std::string& path) { return load_plugin(path).name; }, py::arg("path"),
      "The name of the codec of the shared library at `path`, which this module knows from now on.");
  module.def(
      "codec_broken_promises", [](const std::string& name) { return broken_promises(codec(codec_by_name(name))); },
      py::arg("codec"), "What the codec does against its contract, a sentence each.");
  module.def("codec_compress", &codec_compress, py::arg("codec"), py::arg("x"), "The code of float32 elements.");
  module.def("codec_compress_with_feedback", &codec_compress_with_feedback, py::arg("codec"), py::arg("x"),
             py::arg("residual"), py::arg("factor") = 1.0F,
             "(code, new residual) of x + factor * residual, both bytes; residuals are float32.");
  module.def("codec_decompress", &codec_decompress, py::arg("codec"), py::arg("code"), py::arg("numel"),
             "The float32 elements of a code, as bytes.");
  module.def("codec_finite", &codec_finite, py::arg("codec"), py::arg("code"), py::arg("numel"),
             "Whether all that the code stands for is finite.");
}

}  // namespace ringdp
