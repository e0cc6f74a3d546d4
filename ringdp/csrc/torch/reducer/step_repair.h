// StepRepair: what a step needs to be made again after a member was lost: the gradients of each bucket as they were
// before it was sent, in jobs whose members may change (engine/elastic_group.h). The means go into a second memory of
// the bucket, and the two change places when the step counts; so no gradient is copied, unless the program may know
// where the first one is. Without such a group it does nothing and keeps nothing. Owned by the Reducer's layout, used
// under its lock.
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
  // `weighted`: buckets are multiplied by a factor of their rank.
  StepRepair(ReducerGroup& group, BucketStore& store, GradientCompression& compression, BucketReducer& buckets,
             bool weighted);

  bool on() const { return elastic_ != nullptr; }
  ElasticGroup& elastic() const { return *elastic_; }
  BackwardUnit& backward() const { return *backward_; }
  uint64_t view() const { return view_; }  // in which this step's buckets are sent

  void follow_members();  // at any time: the group's ranks, and what belongs to them, are those of the present view
  // Between two steps: `body` calls operations on the group, and may be called again without a member that was lost.
  void as_unit(const std::string& what, const std::function<void()>& body);
  void begin_step();
  // The buckets of this step cannot be sent in its view: all go at its end.
  void withhold() { withholds_ = withheld_ = true; }
  // The bucket is about to be sent. False: it is sent at the end of the step, with all others, as on all ranks.
  bool keep(Bucket& bucket);
  // Some buckets were not sent, or in a view that is over.
  bool must_send_again() const { return withheld_ || view_ != elastic_->view(); }
  // Ends what is left of the operations; all buckets that were kept can be sent again, to the members of the present
  // view.
  void restore();
  // The step counts: the buckets hold the means.
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
  std::shared_ptr<ElasticGroup> elastic_;   // the process group's; null: its members stay
  std::shared_ptr<BackwardUnit> backward_;  // the same
  std::vector<Kept> kept_;                  // by bucket
  uint64_t view_ = 0;
  bool withholds_ = false;
  bool withheld_ = false;
};

}  // namespace ringdp
