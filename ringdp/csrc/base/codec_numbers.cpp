#include "base/codec_numbers.h"

#include <map>
#include <mutex>

#include "base/types.h"

namespace ringdp {
namespace {

struct Known {
  std::mutex mutex;
  std::map<int32_t, std::string> texts;
};

Known& known() {
  static Known it;
  return it;
}

}  // namespace

void remember_codec(int32_t number, std::string text) {
  const std::lock_guard lock(known().mutex);
  known().texts[number] = std::move(text);
}

std::string codec_text(int32_t number) {
  if (number >= 0 && number < kCodecCount) return std::string(codec_name(static_cast<CodecId>(number)));
  const std::lock_guard lock(known().mutex);
  const auto found = known().texts.find(number);
  return found != known().texts.end() ? found->second
                                      : "codec " + std::to_string(number) + ", which is not loaded here";
}

}  // namespace ringdp
