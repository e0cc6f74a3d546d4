#include "transport/openssl.h"

#include <dlfcn.h>

#include <mutex>

#include "base/error.h"

namespace ringdp::openssl {
namespace {

constexpr const char* kInstall =
    "install OpenSSL 3 on this host (Debian and Ubuntu: libssl3; Fedora, RHEL 9 and SUSE: openssl-libs or "
    "libopenssl3), "
    "or start the job without TLS";

[[noreturn]] void refuse(const std::string& library, const std::string& why) {
  const std::string what = "TLS (RINGDP_TLS) needs OpenSSL's " + library + ": " + why;
  ErrorContext context;
  context.cause = what;
  context.advice = kInstall;
  throw Error(ErrorKind::kSystem, what + "; " + kInstall, context);
}

std::string last_problem() {
  const char* text = dlerror();
  return text != nullptr ? text : "it cannot be loaded";
}

// As if they had been linked: OpenSSL's callbacks reach them too.
Functions& table() {
  static Functions found;
  return found;
}

}  // namespace

const Functions& functions() { return table(); }

// The library stays loaded: it has exit handlers of its own, and Python's ssl module may use it too.
void load(const std::string& library) {
  static std::mutex mutex;
  static bool loaded = false;
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) refuse(library, last_problem());
  std::lock_guard lock(mutex);
  if (loaded) return;
  Functions found;
#define RINGDP_LOOK_UP(name, result, arguments)                             \
  found.name = reinterpret_cast<result(*) arguments>(dlsym(handle, #name)); \
  if (found.name == nullptr) refuse(library, last_problem());
  RINGDP_OPENSSL(RINGDP_LOOK_UP)
#undef RINGDP_LOOK_UP
  table() = found;
  loaded = true;
}

}  // namespace ringdp::openssl
