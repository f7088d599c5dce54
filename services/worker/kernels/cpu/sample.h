// One token from each row of logits; the meaning is `runtime/choosing.py`, the noise `runtime/noise.py`.
// Noise for a whole vocabulary costs a hash a token: the two logarithms are taken only where an upper bound of the
// noise could beat the best so far.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

namespace mr {

struct Draw {
    double temperature, top_p, min_p;
    uint64_t key;
    int32_t top_k, reserved;
};

constexpr double NOISE_SPAN = 26.5;
constexpr int BATCH = 256;

static inline uint32_t noise_bits(uint32_t token, uint64_t key) {
    uint32_t x = token * 0x9E3779B1u + (uint32_t)key;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    x = (x ^ (x >> 16)) + (uint32_t)(key >> 32);
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}
static inline double gumbel(uint32_t bits) { return -std::log(-std::log(((double)bits + 0.5) * 0x1p-32)); }

// At least the Gumbel noise of `bits`: -log(-log u) <= -log(1 - u), and log2(1 + m) >= m for the mantissa.
static inline float noise_bound(uint32_t bits) {
    float rest = (float)(int32_t)(~bits >> 1) * 2.0f + 0.25f;
    int32_t raw;
    memcpy(&raw, &rest, 4);
    return 22.18071f + 0.01f - 0.6931472f * ((float)raw * 0x1p-23f - 127.0f);
}

struct Candidate {
    float logit;
    int32_t id;
    bool operator<(const Candidate& other) const {
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

class Chooser {
  public:
    // The id, or -1 when no token is allowed or a logit is NaN.
    int32_t choose(const float* logits, int count, const Draw& draw) {
        V best = splat(-INFINITY);
        int bad = 0, i = 0;
        for (; i + LANES <= count; i += LANES) best = vmax(best, load(logits + i));
        float top = max_lanes(best);
        for (; i < count; i++) top = logits[i] > top ? logits[i] : top;
        for (i = 0; i < count; i++) bad |= logits[i] != logits[i];
        if (bad || !std::isfinite(top)) return -1;
        int32_t first = 0;
        while (logits[first] != top) first++;
        if (draw.temperature == 0.0 || draw.top_k == 1) return first;
        double floor = draw.min_p > 0.0 ? std::log(draw.min_p) : -INFINITY;
        if (draw.top_p >= 1.0 && draw.top_k == 0) return whole(logits, count, draw, top, first, floor);
        filter(logits, count, draw, top, floor);
        return loudest(draw, top);
    }

  private:
    static double scaled(float logit, float top, const Draw& draw) { return ((double)logit - top) / draw.temperature; }

    int32_t whole(const float* logits, int count, const Draw& draw, float top, int32_t first, double floor) {
        int32_t winner = first;
        double best = gumbel(noise_bits(first, draw.key));
        const double least = floor > -NOISE_SPAN ? floor : -NOISE_SPAN;
        const float inverse = (float)(1.0 / draw.temperature);
        alignas(64) float bounds[BATCH];
        for (int start = 0; start < count; start += BATCH) {
            int n = count - start < BATCH ? count - start : BATCH;
            for (int i = 0; i < n; i++)
                bounds[i] = (logits[start + i] - top) * inverse + noise_bound(noise_bits(start + i, draw.key));
            for (int i = 0; i < n; i++) {
                if (!(bounds[i] > (float)best)) continue;
                double z = scaled(logits[start + i], top, draw);
                if (z < least) continue;
                double score = z + gumbel(noise_bits(start + i, draw.key));
                if (score > best) {
                    best = score;
                    winner = start + i;
                }
            }
        }
        return winner;
    }

    void gather(const float* logits, int count, float least) {
        kept_.clear();
        for (int i = 0; i < count; i++)
            if (logits[i] >= least && logits[i] > -INFINITY) kept_.push_back({logits[i], i});
    }

    // A logit that at least `k` tokens reach: the k-th best of the best of each run of 64.
    float reached_by(const float* logits, int count, int k) {
        bests_.clear();
        for (int start = 0; start < count; start += 64) {
            float best = -INFINITY;
            for (int i = start; i < count && i < start + 64; i++) best = logits[i] > best ? logits[i] : best;
            bests_.push_back(best);
        }
        if (k > (int)bests_.size()) return -INFINITY;
        std::nth_element(bests_.begin(), bests_.begin() + (k - 1), bests_.end(), std::greater<float>());
        return bests_[k - 1];
    }

    void filter(const float* logits, int count, const Draw& draw, float top, double floor) {
        if (draw.top_k > 0 || floor > -INFINITY) {
            gather(logits, count, draw.top_k > 0 ? reached_by(logits, count, draw.top_k) : -INFINITY);
            if (floor > -INFINITY)
                std::erase_if(kept_, [&](const Candidate& c) { return scaled(c.logit, top, draw) < floor; });
            std::sort(kept_.begin(), kept_.end());
            if (draw.top_k > 0 && (int)kept_.size() > draw.top_k) kept_.resize(draw.top_k);
            if (draw.top_p < 1.0) {
                double total = 0.0;
                for (const auto& c : kept_) total += std::exp(scaled(c.logit, top, draw));
                nucleus(draw, top, total);
            }
            return;
        }
        const double total = mass(logits, count, draw, top);
        for (double reach = 6.0; reach < 100.0; reach *= 2.0) {
            gather(logits, count, (float)(top - reach * draw.temperature));
            std::sort(kept_.begin(), kept_.end());
            if (nucleus(draw, top, total)) return;
        }
        gather(logits, count, -INFINITY);
        std::sort(kept_.begin(), kept_.end());
        nucleus(draw, top, total);
    }

    // Keeps the shortest beginning whose mass reaches top_p of `total`; false when all of it does not.
    bool nucleus(const Draw& draw, float top, double total) {
        double sum = 0.0;
        for (size_t i = 0; i < kept_.size(); i++) {
            sum += std::exp(scaled(kept_[i].logit, top, draw));
            if (sum >= draw.top_p * total) {
                kept_.resize(i + 1);
                return true;
            }
        }
        return false;
    }

    static double mass(const float* logits, int count, const Draw& draw, float top) {
        const V inverse = splat((float)(1.0 / draw.temperature)), peak = splat(top), zero = splat(-80.0f);
        double total = 0.0;
        int i = 0;
        while (i + LANES <= count) {
            V sum = splat(0.0f);
            for (int step = 0; step < 64 && i + LANES <= count; step++, i += LANES)
                sum = add(sum, vexp(vmax(mul(sub(load(logits + i), peak), inverse), zero)));
            total += (double)sum_lanes(sum);
        }
        for (; i < count; i++) total += std::exp(scaled(logits[i], top, draw));
        return total;
    }

    int32_t loudest(const Draw& draw, float top) const {
        int32_t winner = kept_[0].id;
        double best = -INFINITY;
        for (const auto& c : kept_) {
            double score = scaled(c.logit, top, draw) + gumbel(noise_bits(c.id, draw.key));
            if (score > best) {
                best = score;
                winner = c.id;
            }
        }
        return winner;
    }

    std::vector<Candidate> kept_;
    std::vector<float> bests_;
};

}  // namespace mr
