// BackwardUnit: the steps that count together. One backward may use several reducers; its steps are one unit of their
// elastic group, so that a lost rank's part is in the means of all of them or of none. A backward inside a node of
// another one (reentrant checkpointing) is a part of that one. Invariant: an ended step waits here while other steps
// or calls of its backward are open; once none is, all of them are made, in the order in which they began, which is
// the same on all ranks. Owned by the group's ProcessGroupRing. Any thread, without the GIL; a reducer's own lock may
// be held in `begin` alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/elastic_group.h"

namespace ringdp {

// Calls `run` at the end of the backward that this thread runs, without the GIL; the backward raises its exception.
// Its warnings become Python's on every device: a backward of tensors on a device ends in a thread of autograd, where
// torch would print them to stderr, past Python's filters.
void at_end_of_backward(std::function<void()> run);

class BackwardUnit : public std::enable_shared_from_this<BackwardUnit> {
 public:
  // A step of one reducer. Called by the thread that runs the backward, without the reducer's lock.
  class Step {
   public:
    virtual ~Step() = default;
    virtual int64_t number() = 0;
    virtual const char* also_lost() = 0;        // see UnitDescription
    virtual bool must_send_again() = 0;         // a bucket was not sent, or was sent in an earlier view
    virtual void send_again() = 0;              // sends all buckets with their old gradients to the present members
    virtual std::vector<double> weights() = 0;  // see ElasticGroup::set_weights
    virtual void wait() = 0;                    // waits until its buckets have their means
    virtual void counts() = 0;                  // hands out the means
    // Called in a catch block: the step does not count, and is not repeated. Throws that exception with the step's
    // number.
    [[noreturn]] virtual void stopped() = 0;
  };

  explicit BackwardUnit(std::shared_ptr<ElasticGroup> elastic) : elastic_(std::move(elastic)) {}

  // The step's backward has begun in this thread. The backward's graph task owns `alive`.
  void begin(const std::shared_ptr<Step>& step, const std::shared_ptr<void>& alive);
  // It has run to its end. `complete`: false: the step lacks gradients, and does not count. If no other step or call
  // of the backward is open, the means of all its steps are handed out when this returns.
  void end(const Step& step, bool complete);
  // The step's reducer is called in a node of a backward that this thread runs (checkpointing): a step that begins
  // there ends with that backward. A step of the same reducer that waits for that end is made now: a reducer has one
  // step at a time.
  void called_in_backward(const Step& step);

 private:
  using Steps = std::vector<std::shared_ptr<Step>>;
  struct Open {
    const void* id;  // the step's address; for a mere call of a reducer, that of `alive`
    bool is_step;
    std::weak_ptr<Step> step;
    std::weak_ptr<void> alive;  // expired: an exception has ended the backward
    int task;                   // autograd's number of the backward
    std::thread::id thread;
    bool ended = false;

    bool with(int other, std::thread::id runs_in) const { return task == other || thread == runs_in; }
  };

  void release(const void* alive);
  // With the lock held.
  Steps take_ended();           // of the backward that this thread runs, if no step or call of it is open
  Steps take_what_has_ended();  // of that backward, even if some are open
  void forget_orphans();

  void make(const Steps& steps);
  void reduce(const Steps& steps, bool again);

  const std::shared_ptr<ElasticGroup> elastic_;  // shared with the process group
  std::mutex mutex_;                             // guards the members below
  std::vector<Open> open_;                       // in the order in which they began
};

}  // namespace ringdp
