// Aligned, zeroed memory that grows.
#pragma once

#include <cstdlib>
#include <cstring>
#include <new>

#include "vec.h"

namespace ramet {

// An array of T that keeps its memory from step to step. Growing loses the contents.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // Memory for `count` elements; elements that were never written are zero.
    T* reserve(int64_t count) {
        if (count > capacity_) {
            std::free(data_);
            capacity_ = 0;
            size_t bytes = size_t(round_up(count * int64_t(sizeof(T)), 64));
            data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
            if (data_ == nullptr) throw std::bad_alloc();
            std::memset(static_cast<void*>(data_), 0, bytes);
            capacity_ = count;
        }
        return data_;
    }

    T* data() const { return data_; }

  private:
    T* data_ = nullptr;
    int64_t capacity_ = 0;
};

}  // namespace ramet
