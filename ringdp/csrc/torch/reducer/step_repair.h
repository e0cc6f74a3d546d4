// StepRepair: keeps what a repeated step needs after the loss of a member, in elastic jobs (engine/elastic_group.h):
// the gradients of each bucket before it was sent. The means are written to a second memory of the bucket, and the two
// are swapped when the step counts; so no gradient is copied, unless the program may have the address of the first.
// Without such a group it does nothing. Owned by the Reducer's layout, used under its lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/elastic_group.h"
#include "torch/backend/backward_unit.h"
#include "torch/reducer/bucket.h"
#include "torch/reducer/bucket_reducer.h"
#include "torch/reducer/bucket_store.h"
#include "torch/reducer/gradient_compression.h"
#include "torch/reducer/reducer_group.h"

namespace ringdp {

class StepRepair {
 public:
  // `weighted`: buckets are multiplied by their rank's factor.
  StepRepair(ReducerGroup& group, BucketStore& store, GradientCompression& compression, BucketReducer& buckets,
             bool weighted);

  bool on() const { return elastic_ != nullptr; }
  ElasticGroup& elastic() const { return *elastic_; }
  BackwardUnit& backward() const { return *backward_; }
  uint64_t view() const { return view_; }  // of this step's buckets

  void follow_members();  // any time: updates the group's ranks and dependent state to the present view
  // Between two steps: runs `body`, which calls operations on the group, and repeats it after the loss of a member.
  void as_unit(const std::string& what, const std::function<void()>& body);
  void begin_step();
  // The buckets of this step cannot be sent in its view: all are sent at its end.
  void withhold() { withholds_ = withheld_ = true; }
  // Called before the bucket is sent. False: it is sent at the end of the step, with all others, as on all ranks.
  bool keep(Bucket& bucket);
  // Whether a bucket was not sent, or was sent in an earlier view.
  bool must_send_again() const { return withheld_ || view_ != elastic_->view(); }
  // Waits for the old operations; then all kept buckets can be sent again, to the members of the present view.
  void restore();
  // The step counts: swaps the means into the buckets.
  void accept();

 private:
  struct Kept {
    at::Tensor spare;  // the bucket's second memory, or a copy of its gradients
    bool copied = false;
    bool filled = false;  // in this step
  };

  ReducerGroup& group_;
  BucketStore& store_;
  GradientCompression& compression_;
  BucketReducer& buckets_;
  const bool weighted_;
  std::shared_ptr<ElasticGroup> elastic_;   // the process group's; null: not elastic
  std::shared_ptr<BackwardUnit> backward_;  // likewise
  std::vector<Kept> kept_;                  // by bucket
  uint64_t view_ = 0;
  bool withholds_ = false;
  bool withheld_ = false;
};

}  // namespace ringdp
