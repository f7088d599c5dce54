// From the file's rows to panels. Runs once at load.
#pragma once
#include <vector>

#include "linear.h"

namespace mr {

static inline float from_half(uint16_t h) { return _cvtsh_ss(h); }
static inline uint16_t to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

static void pack_f32(const float* source, int outputs, int inputs, uint8_t* target) {
    float* out = (float*)target;
    for (int panel = 0; panel * LANES < outputs; panel++)
        for (int k = 0; k < inputs; k++)
            for (int lane = 0; lane < LANES; lane++, out++) {
                int row = panel * LANES + lane;
                *out = row < outputs ? source[(size_t)row * inputs + k] : 0.0f;
            }
}

// Blocks of GGUF's Q4_0 (scale, 16 bytes; value = scale × (q - 8)) or Q4_1 (scale, minimum, 16 bytes).
static void pack_q4(const uint8_t* source, int outputs, int inputs, bool minimum, uint8_t* target) {
    int groups = inputs / GROUP, block = minimum ? 20 : 18;
    for (int panel = 0; panel * LANES < outputs; panel++)
        for (int g = 0; g < groups; g++, target += Q4_BYTES) {
            memset(target, 0, Q4_BYTES);
            uint16_t* scales = (uint16_t*)(target + 256);
            for (int lane = 0; lane < LANES && panel * LANES + lane < outputs; lane++) {
                const uint8_t* from = source + ((size_t)(panel * LANES + lane) * groups + g) * block;
                memcpy(scales + lane, from, 2);
                if (minimum)
                    memcpy(scales + LANES + lane, from + 2, 2);
                else
                    scales[LANES + lane] = to_half(-8.0f * from_half(scales[lane]));
                for (int j = 0; j < 4; j++) memcpy(target + j * 64 + lane * 4, from + block - 16 + j * 4, 4);
            }
        }
}

static inline void put_q8(uint8_t* target, int lane, const int8_t* values, uint16_t scale) {
    memcpy(target + 512 + lane * 2, &scale, 2);
    for (int i = 0; i < GROUP; i++) target[i / 4 * 64 + lane * 4 + i % 4] = (uint8_t)(values[i] + 128);
}

// Blocks of GGUF's Q8_0 (scale, 32 signed bytes).
static void pack_q8(const uint8_t* source, int outputs, int inputs, uint8_t* target) {
    int groups = inputs / GROUP;
    for (int panel = 0; panel * LANES < outputs; panel++)
        for (int g = 0; g < groups; g++, target += Q8_BYTES) {
            memset(target, 128, 512);
            memset(target + 512, 0, 32);
            for (int lane = 0; lane < LANES && panel * LANES + lane < outputs; lane++) {
                const uint8_t* from = source + ((size_t)(panel * LANES + lane) * groups + g) * 34;
                uint16_t scale;
                memcpy(&scale, from, 2);
                put_q8(target, lane, (const int8_t*)(from + 2), scale);
            }
        }
}

// Floats rounded to eight bits by groups of 32.
static void pack_q8_from_f32(const float* source, int outputs, int inputs, uint8_t* target) {
    int groups = inputs / GROUP;
    for (int panel = 0; panel * LANES < outputs; panel++)
        for (int g = 0; g < groups; g++, target += Q8_BYTES) {
            memset(target, 128, 512);
            memset(target + 512, 0, 32);
            for (int lane = 0; lane < LANES && panel * LANES + lane < outputs; lane++) {
                const float* from = source + (size_t)(panel * LANES + lane) * inputs + g * GROUP;
                float top = 0.0f;
                for (int i = 0; i < GROUP; i++) top = std::fmax(top, std::fabs(from[i]));
                uint16_t scale = to_half(top / 127.0f);
                float stored = from_half(scale);
                int8_t values[GROUP];
                for (int i = 0; i < GROUP; i++) {
                    float q = stored > 0.0f ? std::nearbyint(from[i] / stored) : 0.0f;
                    values[i] = (int8_t)std::fmax(-127.0f, std::fmin(127.0f, q));
                }
                put_q8(target, lane, values, scale);
            }
        }
}

}  // namespace mr
