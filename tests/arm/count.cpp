// Prints the instructions of a prompt and of a token of decode of SmolLM2-135M, as `instructions.c` counts them.
//
// Compiled with a .cpp file of runtime/execution/native/src before it (g++ -include). One thread computes. Weights and
// keys are zeros, because the instructions do not depend on numbers. The difference of a model with two layers and one
// with one layer stands for all further layers. Argument: the counter's file.
#include <fcntl.h>

#include <cstdio>

using namespace ramet;

namespace {

constexpr int64_t kHidden = 576, kInner = 1536, kLayers = 30, kHeads = 9, kKvHeads = 3, kDim = 64, kVocab = 49152;
constexpr int64_t kPrompt = 256, kPage = 16;

Matrix matrix(int64_t n, int64_t k, Storage storage, int64_t bits = 0, bool is_paired = false) {
    Matrix w = {nullptr, nullptr, n, k, storage, is_paired, bits, 32, bits == 4, 0, 0};
    w.data = ramet_allocate(w.bytes());
    return w;
}

// Instructions of a step of `rows` rows behind `cached` ones.
double count(Decoder& decoder, int64_t layers, const volatile uint64_t* counter, int64_t cached, int64_t rows) {
    std::vector<int32_t> pages(2 * kPrompt / kPage), index(rows), visible(rows);
    std::iota(pages.begin(), pages.end(), 0), std::iota(index.begin(), index.end(), 0);
    std::iota(visible.begin(), visible.end(), cached + 1);
    std::vector<int64_t> tokens(rows, 1), slots(rows);
    std::iota(slots.begin(), slots.end(), cached);
    std::vector<float> angles(rows * kDim / 2), logits(kVocab);
    const Span span = {pages.data(), cached + rows, nullptr, nullptr, 0};
    const Edge edge = {rows, 0, index.data(), visible.data(), nullptr};
    Group group = {};
    group.last_layer = layers, group.num_rows = rows, group.kv_write = slots.data();
    group.cosine = group.sine = angles.data(), group.spans = &span, group.edges = &edge, group.num_edges = 1;
    const int64_t last = rows - 1;
    const Step step = {tokens.data(), rows, &group, 1, nullptr, 0, &last, 1, logits.data()};
    const uint64_t before = *counter;
    decoder.forward(step);
    return double(*counter - before) / 1e6;
}

void measure(const char* name, Storage storage, int64_t bits, const volatile uint64_t* counter) {
    Team team(1);
    static std::vector<float> ones(kHidden, 1.0f);
    const int64_t is_bf16 = storage != Storage::kFloat32, width = 2 * kPrompt * kKvHeads * kDim * 4;
    Layer layer = {};
    layer.input_norm = layer.post_norm = ones.data();
    layer.inputs[0] = matrix((kHeads + 2 * kKvHeads) * kDim, kHidden, storage, bits);
    layer.o = matrix(kHidden, kHeads * kDim, storage, bits);
    layer.gate_up = matrix(2 * kInner, kHidden, storage, bits, true);
    layer.down = matrix(kHidden, kInner, storage, bits);
    layer.kv = {ramet_allocate(width), ramet_allocate(width), nullptr};
    const std::vector<Layer> layers(2, layer);
    Model model = {};
    model.hidden = kHidden, model.inner = kInner, model.vocab = kVocab, model.num_layers = 2, model.eps = 1e-5f;
    model.embedding_scale = 1, model.gate = Into::kSilu, model.shape = {kHeads, kKvHeads, kDim, kPage, is_bf16};
    model.layers = layers.data(), model.norm = ones.data();
    model.head = model.table = matrix(kVocab, kHidden, storage, bits ? 8 : 0);
    double prompts[2], tokens[2];
    Decoder decoder(model, team);
    for (int i = 0; i < 2; ++i) {
        prompts[i] = count(decoder, i + 1, counter, 0, kPrompt);
        tokens[i] = count(decoder, i + 1, counter, kPrompt, 1);
    }
    auto whole = [](const double (&counts)[2]) { return counts[0] + (kLayers - 1) * (counts[1] - counts[0]); };
    std::printf("%s: a prompt of %ld tokens %.0f, a token of decode %.1f million\n", name, long(kPrompt), whole(prompts),
                whole(tokens));
    std::fflush(stdout);
}

}  // namespace

int main(int, char** arguments) {
    const int file = open(arguments[1], O_RDONLY);
    const void* counter = mmap(nullptr, sizeof(uint64_t), PROT_READ, MAP_SHARED, file, 0);
    if (counter == MAP_FAILED) return 1;
    const auto* number = static_cast<const volatile uint64_t*>(counter);
    measure("float32", Storage::kFloat32, 0, number);
    measure("bfloat16", Storage::kBfloat16, 0, number);
    measure("4 bits", Storage::kCodes, 4, number);
    measure("8 bits", Storage::kCodes, 8, number);
}
