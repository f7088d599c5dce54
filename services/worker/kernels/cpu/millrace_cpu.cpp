// The C face of the CPU kernels; `kernels/cpu.py` is its only caller. Functions return 0, or 1 when memory ran out.
#include "model.h"
#include "pack.h"
#include "sample.h"

using namespace mr;

namespace {
template <typename F>
int guarded(F body) {
    try {
        body();
        return 0;
    } catch (...) {
        return 1;
    }
}
}  // namespace

extern "C" {

int mr_abi() { return 2; }

void* mr_pool_new(int threads) {
    try {
        return new Pool(threads);
    } catch (...) {
        return nullptr;
    }
}
void mr_pool_free(void* pool) { delete (Pool*)pool; }

void* mr_model_new(const ModelDescription* description) {
    try {
        return new Model(*description);
    } catch (...) {
        return nullptr;
    }
}
void mr_model_free(void* model) { delete (Model*)model; }

int mr_hidden(void* model, void* pool, const StepDescription* step) {
    return guarded([&] { ((Model*)model)->hidden(*(Pool*)pool, *step); });
}

int mr_calibrate(void* model, const StepDescription* step) {
    return guarded([&] { ((Model*)model)->calibrate(*step); });
}

int mr_logits(void* model, void* pool, const float* hidden, int rows, float* out) {
    return guarded([&] { ((Model*)model)->logits(*(Pool*)pool, hidden, rows, out); });
}

int mr_choose(void* pool, const float* logits, int rows, int count, const Draw* draws, int32_t* out) {
    return guarded([&] {
        std::vector<Chooser> choosers(((Pool*)pool)->size());
        Tasks tasks(1);
        std::atomic<int> failed{0};
        ((Pool*)pool)->run(rows == 1, [&](int thread) {
            tasks.each(0, rows, [&](int row) {
                if (guarded([&] { out[row] = choosers[thread].choose(logits + (size_t)row * count, count, draws[row]); }))
                    failed.store(1);
            });
        });
        if (failed.load()) throw std::bad_alloc();
    });
}

// `kind`: 0 float32 kept, 1 float32 to eight bits, 2 Q4_0, 3 Q4_1, 4 Q8_0.
void mr_pack(int kind, const void* source, int outputs, int inputs, uint8_t* target) {
    if (kind == 0) pack_f32((const float*)source, outputs, inputs, target);
    if (kind == 1) pack_q8_from_f32((const float*)source, outputs, inputs, target);
    if (kind == 2 || kind == 3) pack_q4((const uint8_t*)source, outputs, inputs, kind == 3, target);
    if (kind == 4) pack_q8((const uint8_t*)source, outputs, inputs, target);
}
}
