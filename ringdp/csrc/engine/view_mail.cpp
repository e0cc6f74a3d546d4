#include "engine/view_mail.h"

#include <string>
#include <utility>

#include "base/text.h"

namespace ringdp {
namespace {

constexpr std::size_t kMostLetters = 4096;  // of all groups: 16 MiB

}  // namespace

static_assert(kViewBytes == kMessageBytes);

class ViewMail::Post final : public ViewPost {
 public:
  Post(ViewMail& mail, uint64_t group) : mail_(mail), group_(group) {}
  ~Post() override { mail_.take(group_); }
  Post(const Post&) = delete;
  Post& operator=(const Post&) = delete;

  void send(int place, std::vector<std::byte> bytes) override { mail_.send(group_, place, bytes); }
  Letters receive() override { return mail_.receive(group_); }
  std::vector<int> unreachable(const std::vector<int>& places) override { return mail_.unreachable(places); }

 private:
  ViewMail& mail_;
  const uint64_t group_;
};

ViewMail::ViewMail(DriverRole& role, PeerLinks& links, std::function<void()> look_at_all)
    : role_(role), links_(links), look_at_all_(std::move(look_at_all)) {}

// A member may be ahead of this rank, which has not come to agree, or not even made the group: its messages wait. What is too
// much is dropped, as a message may be at any time: it is repeated.
void ViewMail::arrived(int from, uint64_t group, std::span<const std::byte> message) {
  MutexLock lock(mutex_);
  if (kept_ >= kMostLetters) return;
  ++kept_;
  letters_[group].emplace_back(from, std::vector(message.begin(), message.end()));
}

std::unique_ptr<ViewPost> ViewMail::post(uint64_t group) { return std::make_unique<Post>(*this, group); }

void ViewMail::send(uint64_t group, int place, const std::vector<std::byte>& bytes) {
  role_.run([&] {
    Link* link = links_[place];
    if (link == nullptr || !link->usable()) return;
    link->send_view(group, std::string(text_of(bytes)));
    links_.send_to(place);
  });
}

ViewPost::Letters ViewMail::receive(uint64_t group) {
  role_.run(look_at_all_);
  return take(group);
}

std::vector<int> ViewMail::unreachable(const std::vector<int>& places) {
  std::vector<int> out;
  role_.run([&] {
    for (const int place : places)
      if (const Link* link = links_[place]; link != nullptr && !link->usable()) out.push_back(place);
  });
  return out;
}

ViewPost::Letters ViewMail::take(uint64_t group) {
  MutexLock lock(mutex_);
  const auto found = letters_.find(group);
  if (found == letters_.end()) return {};
  ViewPost::Letters letters = std::move(found->second);
  letters_.erase(found);
  kept_ -= letters.size();
  return letters;
}

}  // namespace ringdp
