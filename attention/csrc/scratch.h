// Working memory.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace stepgraph {

// Memory of one thread, kept between calls.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }

    // Forgets what was taken, and makes room for num_bytes and some alignment.
    void reset(std::size_t num_bytes) {
        used_ = 0;
        if (num_bytes <= size_) return;
        std::free(memory_);
        size_ = (num_bytes + 4095) / 4096 * 4096;
        memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
        if (!memory_) {
            size_ = 0;
            throw std::bad_alloc();
        }
    }

    template <class T>
    T* take(std::size_t count) {
        T* result = reinterpret_cast<T*>(memory_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return result;
    }

private:
    char* memory_ = nullptr;
    std::size_t size_ = 0, used_ = 0;
};

}  // namespace stepgraph
