#include "codec/plugin.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../include/ringdp/compressor.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/sha256.h"
#include "base/types.h"
#include "kernels/elements.h"
#include "kernels/kernels.h"

namespace ringdp {
namespace {

using Functions = ringdp_compressor;
constexpr const char* kEntryPoint = "ringdp_compressor_v1";
constexpr std::size_t kMostBytesPerElement = 8;
constexpr std::size_t kMostBytesBeside = 1024;
constexpr std::size_t kLongestName = 64;
constexpr std::size_t kUnit = 256;  // a multiple of each block; CompressedPlan::kUnit
constexpr int32_t kPluginBit = 1 << 30;

struct Slot {
  const Functions* functions = nullptr;
  Plugin plugin;
  Codec codec{};
};

// Written under the mutex, before its number is published; constant from then on.
std::array<Slot, kMostPlugins> slots;
std::atomic<std::size_t> loaded{0};
std::mutex loading;

// ---- The functions of a Codec, from those of a library ----

float* scratch(std::size_t count) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local std::size_t size = 0;
  if (size < count) {
    memory = std::make_unique_for_overwrite<float[]>(count);
    size = count;
  }
  return memory.get();
}

Encoded seen(const Slot& slot, const char* function, int returned, std::size_t count) {
  if (returned == RINGDP_FINITE) return Encoded::kFinite;
  if (returned == RINGDP_NOT_FINITE) return Encoded::kNonFinite;
  throw Error(ErrorKind::kValue, "compressor '" + slot.plugin.name + "' (" + slot.plugin.path +
                                     ") failed: " + function + " returned " + std::to_string(returned) + " for " +
                                     std::to_string(count) + " elements");
}

Encoded compress_by(const Slot& slot, std::byte* code, const float* x, std::size_t count) {
  return seen(slot, "compress", slot.functions->compress(code, x, count), count);
}

Encoded feed_back_by(const Slot& slot, std::byte* code, const float* x, const float* residual, float* new_residual,
                     float factor, std::size_t count) {
  if (slot.functions->compress_with_feedback != nullptr && new_residual != residual) {
    const int returned = slot.functions->compress_with_feedback(code, x, residual, new_residual, factor, count);
    return seen(slot, "compress_with_feedback", returned, count);
  }
  float* v = scratch(2 * count);
  float* decoded = v + count;
  for (std::size_t i = 0; i < count; ++i) v[i] = x[i] + factor * residual[i];
  if (compress_by(slot, code, v, count) == Encoded::kNonFinite) {
    std::memmove(new_residual, residual, count * sizeof(float));
    return Encoded::kNonFinite;
  }
  slot.functions->decode_set(decoded, code, count);
  const float inverse = 1.0f / factor;
  for (std::size_t i = 0; i < count; ++i) new_residual[i] = (v[i] - decoded[i]) * inverse;
  return Encoded::kFinite;
}

void decode_add_by(const Slot& slot, float* sum, const std::byte* code, std::size_t count) {
  if (slot.functions->decode_add != nullptr) return slot.functions->decode_add(sum, code, count);
  float* decoded = scratch(count);
  slot.functions->decode_set(decoded, code, count);
  for (std::size_t i = 0; i < count; ++i) sum[i] = kernels::one_nan(sum[i] + decoded[i]);
}

Encoded inspect_by(const Slot& slot, const std::byte* code, std::size_t count) {
  float* decoded = scratch(count);
  slot.functions->decode_set(decoded, code, count);
  return inspect_elements(decoded, count);
}

// A Codec's functions have no context argument, so each slot has functions of its own.
template <std::size_t kSlot>
struct OfSlot {
  static std::size_t encoded_bytes(std::size_t count) {
    return count == 0 ? 0 : slots[kSlot].functions->size_bound(count);
  }
  static Encoded compress(std::byte* code, const float* x, std::size_t count) {
    return count == 0 ? Encoded::kFinite : compress_by(slots[kSlot], code, x, count);
  }
  static Encoded compress_with_feedback(std::byte* code, const float* x, const float* residual, float* new_residual,
                                        float factor, std::size_t count) {
    return count == 0 ? Encoded::kFinite : feed_back_by(slots[kSlot], code, x, residual, new_residual, factor, count);
  }
  static void decode_set(float* out, const std::byte* code, std::size_t count) {
    if (count != 0) slots[kSlot].functions->decode_set(out, code, count);
  }
  static void decode_add(float* sum, const std::byte* code, std::size_t count) {
    if (count != 0) decode_add_by(slots[kSlot], sum, code, count);
  }
  static Encoded inspect(const std::byte* code, std::size_t count) {
    return count == 0 ? Encoded::kFinite : inspect_by(slots[kSlot], code, count);
  }
  static constexpr Codec codec() {
    return {.id = static_cast<CodecId>(kFirstPlugin + kSlot),
            .name = {},
            .block = 0,
            .encoded_bytes = encoded_bytes,
            .compress = compress,
            .compress_with_feedback = compress_with_feedback,
            .decode_set = decode_set,
            .decode_add = decode_add,
            .inspect = inspect,
            .inspect_decodes = true};
  }
};

template <std::size_t... kSlots>
constexpr std::array<Codec, kMostPlugins> codecs_of(std::index_sequence<kSlots...>) {
  return {OfSlot<kSlots>::codec()...};
}
constexpr std::array<Codec, kMostPlugins> kCodecs = codecs_of(std::make_index_sequence<kMostPlugins>());

// ---- Loading ----

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorKind::kValue, "the compressor library " + path + " cannot be used: " + why);
}

std::string canonical(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> found(::realpath(path.c_str(), nullptr), &std::free);
  if (!found) refuse(path, errno_text(errno));
  return found.get();
}

std::string digest_of(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status{};
  if (!file || ::fstat(file.get(), &status) != 0) refuse(path, errno_text(errno));
  if (!S_ISREG(status.st_mode)) refuse(path, "it is not a file");
  std::vector<std::byte> bytes(static_cast<std::size_t>(status.st_size));
  std::size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t got = ::read(file.get(), bytes.data() + at, bytes.size() - at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path, errno_text(errno));
    if (got == 0) break;
    at += static_cast<std::size_t>(got);
  }
  bytes.resize(at);
  return hex_encode(sha256(bytes));
}

struct CloseLibrary {
  void operator()(void* library) const { ::dlclose(library); }
};
using Library = std::unique_ptr<void, CloseLibrary>;

std::string dl_error() {
  const char* text = ::dlerror();
  return text != nullptr ? text : "the loader does not say why";
}

bool is_name(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-';
  };
  return !name.empty() && name.size() <= kLongestName && std::all_of(name.begin(), name.end(), allowed);
}

void check_sizes(const std::string& path, const Functions& it) {
  std::size_t before = 0, count_before = 0;
  const auto say = [&](std::size_t count, std::size_t bytes) {
    return "size_bound(" + std::to_string(count) + ") is " + std::to_string(bytes);
  };
  const auto check = [&](std::size_t count) {
    const std::size_t bytes = it.size_bound(count);
    if (bytes != it.size_bound(count)) refuse(path, say(count, bytes) + " once and another number the next time");
    if (bytes == 0 || bytes > kMostBytesPerElement * count + kMostBytesBeside)
      refuse(path, say(count, bytes) + " bytes; it must be from 1 to " +
                       std::to_string(kMostBytesPerElement * count + kMostBytesBeside));
    if (bytes < before) refuse(path, say(count, bytes) + " bytes, less than " + say(count_before, before));
    before = bytes;
    count_before = count;
  };
  for (std::size_t count = 1; count <= 4 * kUnit; ++count) check(count);
  for (std::size_t count = 8 * kUnit; count <= std::size_t{1} << 30; count *= 2) check(count);
}

const Functions& functions_of(const std::string& path, void* library) {
  const auto entry = reinterpret_cast<decltype(&ringdp_compressor_v1)>(::dlsym(library, kEntryPoint));
  if (entry == nullptr)
    refuse(path, std::string("it has no function ") + kEntryPoint + " (in C++ it must be extern \"C\"): " + dl_error());
  const Functions* it = entry();
  if (it == nullptr) refuse(path, std::string(kEntryPoint) + " returned NULL");
  if (it->abi_version != RINGDP_COMPRESSOR_ABI)
    refuse(path, "it has version " + std::to_string(it->abi_version) + " of the interface, this ringdp has version " +
                     std::to_string(RINGDP_COMPRESSOR_ABI) + ": build it with the header of this ringdp");
  if (it->struct_size != sizeof(Functions))
    refuse(path, "its struct ringdp_compressor has " + std::to_string(it->struct_size) +
                     " bytes, that of this ringdp " + std::to_string(sizeof(Functions)) +
                     ": build it with the header of this ringdp");
  if (it->name == nullptr || !is_name({it->name, ::strnlen(it->name, kLongestName + 1)}))
    refuse(path, "its name must have 1 to 64 of the characters A-Z a-z 0-9 _ . -");
  if (it->block == 0 || kUnit % it->block != 0)
    refuse(path, "its block is " + std::to_string(it->block) + "; it must divide 256");
  if (it->reserved != 0) refuse(path, "`reserved` must be 0");
  const std::pair<const char*, bool> needed[] = {{"size_bound", it->size_bound != nullptr},
                                                 {"compress", it->compress != nullptr},
                                                 {"decode_set", it->decode_set != nullptr}};
  for (const auto& [name, there] : needed)
    if (!there) refuse(path, std::string(name) + " is NULL");
  check_sizes(path, *it);
  return *it;
}

void check_name_is_free(const std::string& path, const std::string& name) {
  for (const std::string_view built_in : kCodecNames)
    if (built_in == name) refuse(path, "the codec '" + name + "' is built in; call it something else");
  for (std::size_t i = 0; i < loaded; ++i)
    if (slots[i].plugin.name == name)
      refuse(path, "another library with a codec '" + name + "' is loaded already, from " + slots[i].plugin.path +
                       "; a library that was built again can only be loaded by a new process");
}

uint64_t identity_of(const Plugin& it) {
  return hash_text(it.name + "\n" + std::to_string(it.abi_version) + "\n" + std::to_string(it.block) + "\n" +
                   it.sha256);
}

}  // namespace

const Plugin& load_plugin(const std::string& path) {
  const std::lock_guard lock(loading);
  Plugin plugin;
  plugin.path = canonical(path);
  plugin.sha256 = digest_of(plugin.path);
  if (const Plugin* before = find_plugin(plugin.sha256)) return *before;
  const std::size_t place = loaded;
  if (place == kMostPlugins)
    refuse(plugin.path, "a process can load " + std::to_string(kMostPlugins) + " of them, and has");
  Library library(::dlopen(plugin.path.c_str(), RTLD_NOW | RTLD_LOCAL));
  if (!library) refuse(plugin.path, dl_error());
  const Functions& functions = functions_of(plugin.path, library.get());
  plugin.name = functions.name;
  plugin.abi_version = functions.abi_version;
  plugin.block = functions.block;
  plugin.identity = identity_of(plugin);
  check_name_is_free(plugin.path, plugin.name);
  (void)library.release();
  Slot& slot = slots[place];
  slot.functions = &functions;
  slot.plugin = std::move(plugin);
  slot.codec = kCodecs[place];
  slot.codec.name = slot.plugin.name;
  slot.codec.block = slot.plugin.block;
  loaded.store(place + 1, std::memory_order_release);
  remember_codec(wire_number(slot.codec.id), slot.plugin.name + " (sha256 " + slot.plugin.sha256.substr(0, 16) + ")");
  return slot.plugin;
}

const Plugin* find_plugin(std::string_view sha256) {
  const std::size_t count = loaded.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < count; ++i)
    if (slots[i].plugin.sha256 == sha256) return &slots[i].plugin;
  return nullptr;
}

bool is_plugin(CodecId id) { return static_cast<std::size_t>(id) >= kFirstPlugin; }

const Codec* plugin_codec(CodecId id) {
  const std::size_t place = static_cast<std::size_t>(id) - kFirstPlugin;
  return is_plugin(id) && place < loaded.load(std::memory_order_acquire) ? &slots[place].codec : nullptr;
}

const Codec* plugin_codec(std::string_view name) {
  const std::size_t count = loaded.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < count; ++i)
    if (slots[i].plugin.name == name) return &slots[i].codec;
  return nullptr;
}

std::string plugin_names() {
  std::string names;
  const std::size_t count = loaded.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < count; ++i) names += ", " + slots[i].plugin.name;
  return names;
}

int32_t wire_number(CodecId id) {
  if (!is_plugin(id)) return static_cast<int32_t>(id);
  return kPluginBit | static_cast<int32_t>(codec_identity(id) & (kPluginBit - 1));
}

uint64_t codec_identity(CodecId id) {
  if (!is_plugin(id)) return static_cast<uint64_t>(id);
  return slots[static_cast<std::size_t>(id) - kFirstPlugin].plugin.identity;
}

}  // namespace ringdp
