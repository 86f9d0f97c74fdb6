// The entry points, called through ctypes (runtime/execution/native/library.py): plain C, raw pointers, no Python.
//
// Each instruction set has its own library, compiled from the same sources with other flags.
#pragma once

#include "choose.h"
#include "decoder.h"
#include "system.h"

#define RAMET_API extern "C" __attribute__((visibility("default")))

// Version of the structures and functions below. Python refuses libraries with another version.
RAMET_API int64_t ramet_interface() { return 17; }

// Whether this processor has the instruction sets that the library was compiled for.
RAMET_API int64_t ramet_supported() { return ramet::supported(); }

RAMET_API ramet::Team* ramet_team_create(int64_t threads) { return new ramet::Team(int(threads)); }
RAMET_API void ramet_team_destroy(ramet::Team* team) { delete team; }

RAMET_API void* ramet_allocate(int64_t bytes) { return ramet::allocate(size_t(bytes)); }
RAMET_API void ramet_free(void* data, int64_t bytes) { munmap(data, size_t(bytes)); }

RAMET_API int64_t ramet_matrix_bytes(const ramet::Matrix* w) { return w->bytes(); }
// Number of columns in all panels of a matrix, padding included; its bias has as many entries.
RAMET_API int64_t ramet_matrix_columns(const ramet::Matrix* w) { return w->panels() * ramet::kPanel; }
RAMET_API void ramet_pack(ramet::Team* team, const ramet::Matrix* w, const void* source) {
    ramet::pack(*team, *w, source);
}

RAMET_API void ramet_multiply(ramet::Team* team, const ramet::Product* product) {
    team->run([&](int) {
        static thread_local ramet::Buffer<uint32_t> room;
        ramet::multiply(*team, *product, room);
    });
}

// The experts of one layer alone: x [m, hidden] += their outputs for `in` [m, hidden].
RAMET_API void ramet_mix(ramet::Team* team, const ramet::Experts* experts, const float* in, float* x, int64_t hidden,
                         int64_t m) {
    ramet::Mixture mixture;
    mixture.reserve(*experts, hidden, m);
    team->run([&](int) {
        ramet::Buffer<uint32_t> room;
        mixture.run(*team, *experts, in, x, hidden, hidden, m, room);
    });
}

// The attention of one layer, without the other operations: q (rotated) and out are [num_rows, heads, dim].
RAMET_API void ramet_attend(ramet::Team* team, const ramet::Shape* shape, const ramet::LayerKV* kv,
                            const ramet::Span* spans, const ramet::Edge* edges, int64_t num_edges, int64_t num_rows,
                            const float* q, float* out) {
    ramet::Attention attention(*shape);
    attention.plan(spans, edges, num_edges, num_rows, team->size());
    const int64_t width = shape->heads * shape->dim;
    team->run([&](int) {
        ramet::Attention::Scratch scratch;
        attention.run(*team, *kv, q, width, out, width, scratch);
        team->barrier();
        if (attention.merges()) attention.merge(*team, *kv, out, width);
    });
}

RAMET_API void ramet_argmax(ramet::Team* team, const float* rows, int64_t num_rows, int64_t n, int64_t* out) {
    ramet::argmax(*team, rows, num_rows, n, out);
}

RAMET_API void ramet_choose(ramet::Team* team, const float* rows, int64_t n, const ramet::Choice* choices,
                            int64_t num_choices, int64_t* out) {
    ramet::choose(*team, rows, n, choices, num_choices, out);
}

RAMET_API void ramet_measure(ramet::Team* team, const float* rows, int64_t n, const int64_t* index,
                             const int64_t* tokens, int64_t count, int64_t top, float* chosen, int64_t* ids,
                             float* values) {
    ramet::measure(*team, rows, n, index, tokens, count, top, chosen, ids, values);
}

RAMET_API ramet::Decoder* ramet_decoder_create(const ramet::Model* model, ramet::Team* team) {
    return new ramet::Decoder(*model, *team);
}
RAMET_API void ramet_decoder_destroy(ramet::Decoder* decoder) { delete decoder; }
RAMET_API void ramet_decoder_forward(ramet::Decoder* decoder, const ramet::Step* step) { decoder->forward(*step); }
RAMET_API void ramet_decoder_project(ramet::Decoder* decoder, const ramet::Projection* wanted) {
    decoder->project(*wanted);
}
