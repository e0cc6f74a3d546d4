// What the launcher's door is made of: the messages of a handshake, and relayed connections.
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "meet/handshake.h"
#include "torch/bindings/bindings.h"
#include "transport/relay.h"
#include "transport/tls_bridge.h"

namespace ringdp {
namespace {

namespace py = pybind11;

std::span<const std::byte> view_of(const py::bytes& bytes) {
  const std::string_view text = bytes;
  return std::as_bytes(std::span(text));
}

py::bytes seal(const py::bytes& secret, const py::bytes& transcript, uint32_t type, uint64_t number, uint32_t tls) {
  HandshakeFields fields;
  fields.tls = static_cast<TlsMode>(tls);
  fields.type = static_cast<HandshakeType>(type);
  fields.purpose = Purpose::kDoor;
  fields.number = number;
  random_bytes(fields.nonce);
  const HandshakeMessage message = encode_handshake(fields, view_of(secret), view_of(transcript));
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}

// Type, version, number and way of TLS; nullopt: not a message of a door, or of another secret.
std::optional<std::tuple<uint32_t, uint32_t, uint64_t, uint32_t>> open(const py::bytes& secret,
                                                                       const py::bytes& transcript,
                                                                       const py::bytes& bytes) {
  HandshakeMessage message{};
  if (view_of(bytes).size() != message.size()) return std::nullopt;
  std::copy_n(view_of(bytes).begin(), message.size(), message.begin());
  const auto fields = decode_handshake(message, view_of(secret), view_of(transcript));
  if (!fields || fields->purpose != Purpose::kDoor) return std::nullopt;
  return std::tuple(static_cast<uint32_t>(fields->type), fields->version, fields->number,
                    static_cast<uint32_t>(fields->tls));
}

}  // namespace

void bind_door(py::module_& module) {
  module.def("protocol_version", [] { return kProtocolVersion; }, "Of what ranks and launchers say to each other.");
  module.def("handshake_bytes", [] { return kHandshakeBytes; }, "Of each message of a handshake.");
  module.def("seal_door_message", &seal, py::arg("secret"), py::arg("transcript"), py::arg("type"), py::arg("number"),
             py::arg("tls"), "A message of a handshake (docs/reference/wire_format.md) with a door.");
  module.def("open_door_message", &open, py::arg("secret"), py::arg("transcript"), py::arg("message"),
             "Its type, protocol version, number and way of TLS (tls_mode); None: it is none, or of another secret.");
  py::class_<Relay>(module, "Relay", "Moves bytes between pairs of sockets, in a thread of its own.")
      .def(py::init<>())
      .def(
          "join", [](Relay& relay, int one, int other) { relay.join(Fd(one), Fd(other)); }, py::arg("one"),
          py::arg("other"), "Takes both descriptors over.")
      .def_property_readonly("pairs", [](const Relay& relay) { return relay.counts().pairs; })
      .def_property_readonly("bytes", [](const Relay& relay) { return relay.counts().bytes; });
  module.def(
      "tls_mode", [](const py::dict& config) { return static_cast<uint32_t>(tls_settings(config).mode); },
      py::arg("config"), "Of a RingConfig: 0 without TLS, 1 with the job's secret, 2 with certificates.");
  py::class_<TlsBridge>(module, "TlsBridge", "Moves bytes between plain sockets and connections that speak TLS.")
      .def(py::init([](const py::dict& config) { return std::make_unique<TlsBridge>(tls_settings(config)); }),
           py::arg("config"))
      .def(
          "join",
          [](TlsBridge& bridge, int plain, int connection, const py::bytes& key, bool dialled) {
            Digest digest{};
            const auto bytes = view_of(key);
            if (bytes.size() != digest.size()) throw Error(ErrorKind::kValue, "the key of a connection has 32 bytes");
            std::copy(bytes.begin(), bytes.end(), digest.begin());
            bridge.join(Fd(plain), Fd(connection), digest, dialled);
          },
          py::arg("plain"), py::arg("connection"), py::arg("key"), py::arg("dialled"),
          "Takes both descriptors over. `key`: the same at both ends, 32 bytes.");
}

}  // namespace ringdp
