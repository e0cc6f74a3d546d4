// What the parts of the fake device share.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "machine.h"

namespace fake_cuda {

inline const c10::Device kDevice(c10::DeviceType::CUDA, 0);

c10::Allocator* allocator();          // of the device's memory
bool is_pinned(const void* address);  // by the pinned memory's allocator
inline void queue(std::function<void()> work) { Machine::here().queue(current_stream(), std::move(work)); }

}  // namespace fake_cuda
