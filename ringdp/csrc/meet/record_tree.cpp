#include "meet/record_tree.h"

#include <algorithm>

namespace ringdp {
namespace {

constexpr std::size_t kMostTextBytes = std::size_t{64} << 10;  // a block cannot ask for more memory than that per rank

// Characters of UTF-8 stay whole: a store may be one of texts.
std::size_t common_start(const std::string& a, const std::string& b) {
  std::size_t same = 0;
  while (same < std::min(a.size(), b.size()) && a[same] == b[same]) ++same;
  const auto inside = [&](const std::string& it) {
    return same < it.size() && (static_cast<unsigned char>(it[same]) & 0xC0U) == 0x80U;
  };
  while (same > 0 && (inside(a) || inside(b))) --same;
  return same;
}

}  // namespace

std::string join_texts(const std::vector<std::string>& texts) {
  std::string out;
  std::vector<std::string> before;
  for (const std::string& text : texts) {
    std::vector<std::string> lines = split(text, '\n');
    std::size_t equal = 0;
    const auto close_equal = [&] {
      if (equal > 0) out += "=" + std::to_string(equal) + "\n";
      equal = 0;
    };
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const std::string& above = i < before.size() ? before[i] : std::string();
      if (i < before.size() && lines[i] == above) {
        ++equal;
        continue;
      }
      close_equal();
      const std::size_t same = common_start(lines[i], above);
      out += std::to_string(same) + ":" + lines[i].substr(same) + "\n";
    }
    close_equal();
    out += "\n";
    before = std::move(lines);
  }
  return out;
}

std::optional<std::vector<std::string>> split_texts(const std::string& block, std::size_t count) {
  std::vector<std::string> texts, before, lines;
  std::size_t bytes = 0;
  const auto add = [&](std::string line) {
    bytes += line.size() + 1;
    lines.push_back(std::move(line));
    return bytes <= kMostTextBytes;
  };
  for (std::size_t at = 0; at < block.size();) {
    const std::size_t end = block.find('\n', at);
    if (end == std::string::npos) return std::nullopt;
    const std::string line = block.substr(at, end - at);
    at = end + 1;
    if (line.empty()) {
      if (texts.size() == count) return std::nullopt;
      std::string& text = texts.emplace_back();
      for (const std::string& it : lines) text += it + "\n";
      before = std::exchange(lines, {});
      bytes = 0;
      continue;
    }
    if (line.front() == '=') {
      const int64_t equal = number(line.substr(1));
      if (equal < 1 || equal > static_cast<int64_t>(before.size()) - static_cast<int64_t>(lines.size()))
        return std::nullopt;
      for (int64_t i = 0; i < equal; ++i)
        if (!add(before[lines.size()])) return std::nullopt;
      continue;
    }
    const std::size_t colon = line.find(':');
    const std::string above = lines.size() < before.size() ? before[lines.size()] : std::string();
    const int64_t same = colon == std::string::npos ? -1 : number(line.substr(0, colon));
    if (same < 0 || same > static_cast<int64_t>(above.size())) return std::nullopt;
    if (!add(above.substr(0, static_cast<std::size_t>(same)) + line.substr(colon + 1))) return std::nullopt;
  }
  if (texts.size() != count || !lines.empty()) return std::nullopt;
  return texts;
}

std::vector<int> RecordTree::children_of(int rank, int world) {
  std::vector<int> out;
  const int64_t end = end_of(rank, world);
  for (int64_t width = 1; rank + width < end; width *= kWays)
    for (int64_t child = rank + width; child < std::min(end, rank + kWays * width); child += width)
      out.push_back(static_cast<int>(child));
  return out;
}

int RecordTree::end_of(int rank, int world) {
  if (rank == 0) return world;
  int64_t width = 1;
  while (rank % (width * kWays) == 0) width *= kWays;
  return static_cast<int>(std::min<int64_t>(world, rank + width));
}

RecordTree::RecordTree(Store& store, std::string kind, int rank, int world)
    : store_(store),
      kind_(std::move(kind)),
      rank_(rank),
      world_(world),
      missing_(children_of(rank, world)),
      unseen_(missing_),
      below_(static_cast<std::size_t>(end_of(rank, world) - rank)) {}

std::string RecordTree::block_key(int rank) const {
  return end_of(rank, world_) - rank == 1 ? text_key(rank) : kind_ + "s/" + std::to_string(rank);
}

void RecordTree::set(const std::string& text) {
  store_.set(text_key(rank_), text);
  below_.front() = text;
  set_ = true;
}

RecordTree::Found RecordTree::step(bool singly) {
  Found found;
  if (complete_) return found;
  if (!missing_.empty()) {
    std::vector<std::string> keys;
    for (int child : missing_) keys.push_back(block_key(child));
    const std::vector<int> asked = missing_;
    if (const auto blocks = store_.find_all(keys)) {
      for (std::size_t i = 0; i < asked.size(); ++i) take(asked[i], (*blocks)[i], found);
    } else if (singly) {
      for (std::size_t i = 0; i < asked.size(); ++i)
        if (const auto block = store_.find(keys[i])) take(asked[i], *block, found);
      for (int child : std::vector<int>(unseen_))
        if (auto text = store_.find(text_key(child))) {
          std::erase(unseen_, child);
          found.texts.emplace_back(child, std::move(*text));
        }
    }
  }
  if (set_ && !joined_ && missing_.empty()) {
    if (below_.size() > 1) store_.set(block_key(rank_), join_texts(below_));
    below_.clear();
    joined_ = true;
    complete_ = rank_ == 0;
  }
  if (!joined_ || complete_) return found;
  const auto all = store_.find(block_key(0));
  if (!all) return found;
  auto texts = split_texts(*all, static_cast<std::size_t>(world_));
  complete_ = texts.has_value();
  if (!complete_) found.unreadable = 0;
  for (int rank = 0; complete_ && rank < world_; ++rank)
    found.texts.emplace_back(rank, std::move((*texts)[static_cast<std::size_t>(rank)]));
  return found;
}

void RecordTree::take(int child, const std::string& block, Found& found) {
  const auto count = static_cast<std::size_t>(end_of(child, world_) - child);
  auto texts = count == 1 ? std::optional(std::vector{block}) : split_texts(block, count);
  if (!texts) {
    found.unreadable = child;
    return;
  }
  std::erase(missing_, child);
  std::erase(unseen_, child);
  for (std::size_t i = 0; i < count; ++i) {
    found.texts.emplace_back(child + static_cast<int>(i), (*texts)[i]);
    below_[static_cast<std::size_t>(child - rank_) + i] = std::move((*texts)[i]);
  }
}

RecordTree::Awaited RecordTree::awaited(std::size_t most) const {
  Awaited out;
  look_below(0, most, out);
  return out;
}

void RecordTree::look_below(int rank, std::size_t most, Awaited& out) const {
  const auto count = [&] { return out.absent.size() + out.silent.size(); };
  if (count() >= most || store_.find(block_key(rank))) return;
  const bool came = end_of(rank, world_) - rank > 1 && store_.find(text_key(rank));
  if (!came) out.absent.push_back(rank);
  const std::size_t so_far = count();
  for (int child : children_of(rank, world_)) look_below(child, most, out);
  if (came && count() == so_far) out.silent.push_back(rank);
}

}  // namespace ringdp
