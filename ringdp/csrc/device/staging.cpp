#include "device/staging.h"

#include <algorithm>
#include <functional>

namespace ringdp {
namespace {

constexpr std::size_t kAlignment = 64;  // pieces begin on it: no element is cut

std::size_t piece_bytes_of(std::size_t bytes) {
  const std::size_t each = (bytes + Staging::kPieces - 1) / Staging::kPieces;
  return std::max(Staging::kPieceBytes, (each + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace

void Staging::mirror(std::span<std::byte> host, std::byte* device, bool reads, bool writes) {
  if (host.empty()) return;
  Mirror& it = mirrors_.emplace_back(Mirror{.host = host,
                                            .device = device,
                                            .reads = reads,
                                            .there = reads ? 0 : host.size(),
                                            .piece_bytes = piece_bytes_of(host.size()),
                                            .pieces = {}});
  if (writes) it.pieces.resize((host.size() + it.piece_bytes - 1) / it.piece_bytes);
  if (!reads) return;
  bytes_expected_ += host.size();
  for (std::size_t begin = 0; begin < host.size(); begin += it.piece_bytes) {
    const std::size_t end = std::min(host.size(), begin + it.piece_bytes);
    arrivals_.push_back({mirrors_.size() - 1, end, queue_->to_host(host.data() + begin, device + begin, end - begin)});
  }
}

bool Staging::poll() {
  const std::size_t before = come_;
  for (; come_ < arrivals_.size() && queue_->done(arrivals_[come_].ticket); ++come_) {
    const Arrival& arrival = arrivals_[come_];
    Mirror& mirror = mirrors_[arrival.mirror];
    bytes_there_ += arrival.upto - mirror.there;
    mirror.there = arrival.upto;
  }
  if (come_ == before) return false;
  if (!all_there()) return true;
  for (Mirror& mirror : mirrors_) {  // ranges that were final before
    if (mirror.reads) continue;
    for (std::size_t i = 0; i < mirror.pieces.size(); ++i) {
      const std::size_t begin = i * mirror.piece_bytes;
      const std::size_t size = std::min(mirror.piece_bytes, mirror.host.size() - begin);
      if (!mirror.pieces[i].copied && mirror.pieces[i].final_bytes >= size) copy_back(mirror, i, i + 1);
    }
  }
  return true;
}

const Staging::Mirror* Staging::find(const std::byte* address) const {
  const auto holds = [&](const Mirror& it) {
    const std::less_equal<> before;
    return before(it.host.data(), address) && !before(it.host.data() + it.host.size(), address);
  };
  const auto found = std::find_if(mirrors_.begin(), mirrors_.end(), holds);
  return found == mirrors_.end() ? nullptr : &*found;
}

std::size_t Staging::there(std::span<const std::byte> memory) const {
  if (memory.empty() || all_there()) return memory.size();
  const Mirror* mirror = find(memory.data());
  if (mirror == nullptr) return memory.size();
  const auto begin = static_cast<std::size_t>(memory.data() - mirror->host.data());
  return mirror->there <= begin ? 0 : std::min(memory.size(), mirror->there - begin);
}

const std::byte* Staging::device_address(const std::byte* host) const {
  const Mirror* mirror = host == nullptr ? nullptr : find(host);
  return mirror == nullptr ? nullptr : mirror->device + (host - mirror->host.data());
}

void Staging::final(std::span<const std::byte> memory) {
  if (memory.empty()) return;
  auto* mirror = const_cast<Mirror*>(find(memory.data()));
  if (mirror == nullptr || mirror->pieces.empty()) return;
  auto at = static_cast<std::size_t>(memory.data() - mirror->host.data());
  const std::size_t upto = at + memory.size();
  while (at < upto) {
    const std::size_t number = at / mirror->piece_bytes;
    const std::size_t begin = number * mirror->piece_bytes;
    const std::size_t end = std::min(mirror->host.size(), begin + mirror->piece_bytes);
    Piece& piece = mirror->pieces[number];
    piece.final_bytes += std::min(upto, end) - at;
    at = std::min(upto, end);
    if (piece.copied)
      piece.late = true;
    else if (piece.final_bytes >= end - begin && may_go_back(*mirror))
      copy_back(*mirror, number, number + 1);
  }
}

void Staging::copy_back(Mirror& mirror, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    mirror.pieces[i].copied = true;
    mirror.pieces[i].late = false;
  }
  const std::size_t from = begin * mirror.piece_bytes;
  const std::size_t upto = std::min(mirror.host.size(), end * mirror.piece_bytes);
  results_.push_back(queue_->to_device(mirror.device + from, mirror.host.data() + from, upto - from));
}

void Staging::finish() {
  for (Mirror& mirror : mirrors_) {
    const auto open = [&](std::size_t i) { return !mirror.pieces[i].copied || mirror.pieces[i].late; };
    for (std::size_t begin = 0; begin < mirror.pieces.size();) {
      std::size_t end = begin;
      while (end < mirror.pieces.size() && open(end)) ++end;
      if (end > begin) copy_back(mirror, begin, end);
      begin = std::max(end, begin + 1);
    }
  }
  for (auto& work : at_end_) results_.push_back(queue_->follow(std::move(work)));
  at_end_.clear();
}

bool Staging::landed() {
  // The last pieces first: they are the most likely to be missing.
  for (std::size_t i = results_.size(); i-- > 0;)
    if (!queue_->done(results_[i])) return false;
  for (std::size_t i = arrivals_.size(); i-- > come_;)
    if (!queue_->done(arrivals_[i].ticket)) return false;
  return true;
}

}  // namespace ringdp
