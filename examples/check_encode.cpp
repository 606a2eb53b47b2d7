// Checks an encoder against the golden vectors. One file, nothing but C++17.
//
//   g++ -std=c++17 -O2 -o check_encode examples/check_encode.cpp
//   ./check_encode vectors/raw/edge-scalar.json vectors/raw/edge-group.json
//
// Put your functions in the place of those under "YOUR CODE"; or compile with -DUSER_ENCODER and link an
// object file that defines the seven functions declared there. -DBROKEN_TIES rounds ties away from zero, to
// show what a failure looks like. Use no option that changes floating point: -ffast-math flushes subnormals.
//
// A raw file of vectors is JSON, which says what each vector is and where its arrays lie, and a .bin beside
// it with their bytes, little-endian. Exit codes: 0 all equal, 1 something differs, 2 a file cannot be read.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// A group rule of SPEC section 3: how many elements share a scale, and their format.
struct Rule {
    const char* name;
    int group;
    const char* element;
    uint32_t qmax;   // fp32 bits of the largest magnitude after scaling
    uint32_t floor;  // fp32 bits; bounds amax, in N2 the scale
};

[[maybe_unused]] static uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// ---- YOUR CODE ------------------------------------------------------------------------
//
// encode_FORMAT gives the code of an fp32 number (SPEC section 2), scale_code the scale code of a group whose
// largest magnitude is amax; quantize writes the codes of a group, one per byte, and returns its scale code
// (SPEC section 3).

extern "C" {
uint8_t encode_e4m3fn(float x);
uint8_t encode_e4m3fnuz(float x);
uint8_t encode_e2m1(float x);
uint8_t encode_ue8m0(float x);
uint16_t encode_bf16(float x);
}
uint8_t scale_code(const Rule& rule, float amax);
uint8_t quantize(const Rule& rule, const float* x, uint8_t* codes);

#ifndef USER_ENCODER
// v / 2^shift to the nearest integer, ties to the even one.
static uint32_t shift_right(uint32_t v, int shift) {
    if (shift > 24) return 0;  // v has at most 24 bits where a shift is this large: less than half
    const uint32_t kept = v >> shift, rest = v & ((1u << shift) - 1), half = 1u << (shift - 1);
#ifdef BROKEN_TIES
    return kept + (rest >= half);
#else
    return kept + (rest > half || (rest == half && (kept & 1)));
#endif
}

// The code of a finite magnitude in a format with that many mantissa bits, that bias and that largest code.
static uint32_t magnitude_code(uint32_t magnitude, int mantissa, int bias, uint32_t largest) {
    const int drop = 23 - mantissa, least = 128 - bias;  // exponent field of the smallest normal number
    const int exponent = static_cast<int>(magnitude >> 23);
    uint32_t code;
    if (exponent >= least) {
        code = shift_right(magnitude - (static_cast<uint32_t>(127 - bias) << 23), drop);
    } else {
        const uint32_t significand = (magnitude & 0x7FFFFF) | (exponent ? 0x800000u : 0u);
        code = shift_right(significand, drop + least - std::max(exponent, 1));
    }
    return std::min(code, largest);
}

extern "C" {
uint8_t encode_e4m3fn(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7F;
    return static_cast<uint8_t>(magnitude_code(magnitude, 3, 7, 0x7E) | (bits >> 24 & 0x80));
}

uint8_t encode_e4m3fnuz(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x80;
    const uint32_t code = magnitude_code(magnitude, 3, 8, 0x7F);
    return static_cast<uint8_t>(code ? code | (bits >> 24 & 0x80) : 0);  // 80 is NaN, there is no -0
}

uint8_t encode_e2m1(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7;
    return static_cast<uint8_t>(magnitude_code(magnitude, 1, 1, 0x7) | (bits >> 28 & 0x8));
}

uint8_t encode_ue8m0(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
    if (magnitude >= 0x7F800000 || (magnitude && bits >> 31)) return 0xFF;
    if (magnitude <= 0x00400000) return 0;  // 2^-127
    return static_cast<uint8_t>(std::min((magnitude + 0x7FFFFF) >> 23, 0xFEu));
}

uint16_t encode_bf16(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7FFF;
    return static_cast<uint16_t>(shift_right(magnitude, 16) | (bits >> 16 & 0x8000));
}
}

static bool is(const char* left, const char* right) { return std::strcmp(left, right) == 0; }

uint8_t scale_code(const Rule& rule, float amax) {
    if (is(rule.name, "N2/16")) {
        const float scale = std::max(amax * from_bits(0x3E2AAAAB), from_bits(rule.floor));  // 1/6
        return encode_e4m3fn(std::min(scale, 448.0f));
    }
    const uint32_t a = std::max(bits_of(amax), rule.floor);
    if (a >= 0x7F800000) return is(rule.element, "e2m1") ? 0xFE : 0xFF;
    // Mantissas decide whether the octave of qmax serves amax, so that no logarithm is needed.
    const uint32_t exponent = (a >> 23) + 127 - (rule.qmax >> 23);
    return static_cast<uint8_t>(exponent + ((a & 0x7FFFFF) > (rule.qmax & 0x7FFFFF)));
}

uint8_t quantize(const Rule& rule, const float* x, uint8_t* codes) {
    uint32_t amax = 0;
    for (int i = 0; i < rule.group; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFF;
        if (magnitude <= 0x7F800000) amax = std::max(amax, magnitude);  // NaN has no part in it
    }
    const uint8_t scale = scale_code(rule, from_bits(amax));
    const bool divide = is(rule.name, "N2/16");
    float factor;
    if (divide) {  // the scale, an E4M3 number; the floor keeps it from being 0
        const int exponent = scale >> 3;
        const float fraction = static_cast<float>((scale & 7) + (exponent ? 8 : 0));
        factor = fraction * from_bits(static_cast<uint32_t>(std::max(exponent, 1) + 117) << 23);
    } else if (scale == 0xFF) {
        factor = 0;
    } else {
        factor = scale == 0xFE ? from_bits(0x00400000) : from_bits((254u - scale) << 23);
    }
    for (int i = 0; i < rule.group; ++i) {
        const float scaled = divide ? x[i] / factor : x[i] * factor;
        codes[i] = is(rule.element, "e4m3fn")     ? encode_e4m3fn(scaled)
                   : is(rule.element, "e4m3fnuz") ? encode_e4m3fnuz(scaled)
                                                  : encode_e2m1(scaled);
    }
    return scale;
}
#endif

// ---- The checker ----------------------------------------------------------------------

static const Rule RULES[] = {
    {"P1/64", 64, "e4m3fn", 0x43E00000, 0x38D1B717},
    {"P1/32", 32, "e4m3fn", 0x43E00000, 0x38D1B717},
    {"P1/128", 128, "e4m3fn", 0x43E00000, 0x38D1B717},
    {"P1/64-fnuz", 64, "e4m3fnuz", 0x43600000, 0x38D1B717},
    {"P1/32-fnuz", 32, "e4m3fnuz", 0x43600000, 0x38D1B717},
    {"M1/32", 32, "e2m1", 0x40C00000, 0x01C00000},
    {"N2/16", 16, "e2m1", 0x40C00000, 0x3B000000},
};

// As much of JSON as these files use: objects, arrays, strings, integers; other words are kept as text.
struct Json {
    std::string text;
    std::vector<Json> items;
    std::vector<std::pair<std::string, Json>> members;

    const Json& at(const char* key) const {
        for (const auto& member : members)
            if (member.first == key) return member.second;
        throw std::runtime_error(std::string("no ") + key);
    }
    size_t number() const {
        if (text.empty() || text.size() > 15 || text.find_first_not_of("0123456789") != std::string::npos)
            throw std::runtime_error("not a size: " + text.substr(0, 20));
        return static_cast<size_t>(std::stoull(text));
    }
};

class Parser {
public:
    explicit Parser(const std::string& text) : text_(text) {}

    Json whole() {
        Json json = value(0);
        if (peek() != '\0' || at_ != text_.size()) fail();
        return json;
    }

private:
    const std::string& text_;
    size_t at_ = 0;

    [[noreturn]] void fail() const {
        throw std::runtime_error("not JSON at byte " + std::to_string(at_));
    }
    char peek() {
        while (at_ < text_.size() && std::strchr(" \n\r\t", text_[at_])) ++at_;
        return at_ < text_.size() ? text_[at_] : '\0';
    }
    bool take(char c) {
        if (peek() != c) return false;
        ++at_;
        return true;
    }
    std::string string() {
        std::string found;
        if (!take('"')) fail();
        for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
            if (text_[at_] == '\\') ++at_;  // no file here has escapes but of quotes
            if (at_ < text_.size()) found += text_[at_];
        }
        if (at_ >= text_.size()) fail();
        ++at_;
        return found;
    }
    Json value(int depth) {
        Json json;
        if (depth > 16) fail();
        if (take('{')) {
            if (take('}')) return json;
            do {
                std::string key = string();
                if (!take(':')) fail();
                json.members.emplace_back(std::move(key), value(depth + 1));
            } while (take(','));
            if (!take('}')) fail();
        } else if (take('[')) {
            if (take(']')) return json;
            do json.items.push_back(value(depth + 1));
            while (take(','));
            if (!take(']')) fail();
        } else if (peek() == '"') {
            json.text = string();
        } else {
            while (at_ < text_.size() && !std::strchr(",]} \n\r\t", text_[at_])) json.text += text_[at_++];
            if (json.text.empty()) fail();
        }
        return json;
    }
};

static std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot be opened");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The elements of an array as unsigned integers: bit patterns of fp32 and bf16, codes of u8 and u16.
static std::vector<uint32_t> elements(const Json& array, const std::string& body) {
    const std::string& dtype = array.at("dtype").text;
    const size_t size = dtype == "u8" ? 1 : dtype == "fp32" ? 4 : dtype == "u16" || dtype == "bf16" ? 2 : 0;
    const size_t first = array.at("offset").number(), bytes = array.at("bytes").number();
    if (!size) throw std::runtime_error("an array of " + dtype);
    if (first > body.size() || bytes > body.size() - first)
        throw std::runtime_error("an array that ends behind the file");
    size_t count = 1;
    for (const Json& extent : array.at("shape").items) {
        if (extent.number() && count > body.size() / extent.number()) throw std::runtime_error("a huge shape");
        count *= extent.number();
    }
    if (count * size != bytes) throw std::runtime_error("an array whose shape is not its size");
    std::vector<uint32_t> found(count, 0);
    for (size_t i = 0; i < bytes; ++i)
        found[i / size] |= static_cast<uint32_t>(static_cast<uint8_t>(body[first + i])) << 8 * (i % size);
    return found;
}

// Values as fp32 numbers: bf16 is widened.
static std::vector<float> values(const Json& array, const std::string& body) {
    std::vector<float> found;
    const int shift = array.at("dtype").text == "bf16" ? 16 : 0;
    for (const uint32_t bits : elements(array, body)) found.push_back(from_bits(bits << shift));
    return found;
}

static uint32_t encode(const std::string& format, float x) {
    if (format == "e4m3fn") return encode_e4m3fn(x);
    if (format == "e4m3fnuz") return encode_e4m3fnuz(x);
    if (format == "e2m1") return encode_e2m1(x);
    if (format == "ue8m0") return encode_ue8m0(x);
    if (format == "bf16") return encode_bf16(x);
    throw std::runtime_error("no format " + format);
}

static const Rule& rule_of(const Json& vector) {
    for (const Rule& rule : RULES)
        if (vector.at("parameters").at("rule").text == rule.name) return rule;
    throw std::runtime_error("no rule " + vector.at("parameters").at("rule").text);
}

struct Counts {
    size_t vectors = 0, different = 0, left_out = 0;
};

// Prints the first element that is not as expected.
static bool equal(const Json& vector, const char* name, const std::vector<uint32_t>& got,
                  const std::string& body) {
    const std::vector<uint32_t> want = elements(vector.at("expected").at(name), body);
    if (want.size() != got.size()) throw std::runtime_error(std::string("other sizes of ") + name);
    for (size_t i = 0; i < want.size(); ++i) {
        if (want[i] == got[i]) continue;
        std::printf("DIFFERS %s %s[%zu]: expected %02x, got %02x (%s)\n", vector.at("id").text.c_str(), name, i,
                    want[i], got[i], vector.at("comment").text.c_str());
        return false;
    }
    return true;
}

static void check(const Json& vector, const std::string& body, Counts& counts) {
    const std::string& operation = vector.at("operation").text;
    bool good = true;
    if (operation == "encode") {
        std::vector<uint32_t> codes;
        for (const float x : values(vector.at("inputs").at("x"), body))
            codes.push_back(encode(vector.at("parameters").at("fmt").text, x));
        good = equal(vector, "codes", codes, body);
    } else if (operation == "encode_scale") {
        std::vector<uint32_t> codes;
        for (const float amax : values(vector.at("inputs").at("amax"), body))
            codes.push_back(scale_code(rule_of(vector), amax));
        good = equal(vector, "scale_codes", codes, body);
    } else if (operation == "quantize") {
        const Rule& rule = rule_of(vector);
        const std::vector<float> x = values(vector.at("inputs").at("x"), body);
        const size_t group = static_cast<size_t>(rule.group);
        if (x.size() % group) throw std::runtime_error("a row that is no whole number of groups");
        std::vector<uint8_t> codes(x.size());
        std::vector<uint32_t> scales;
        for (size_t i = 0; i < x.size(); i += group) scales.push_back(quantize(rule, &x[i], &codes[i]));
        good = equal(vector, "scale_codes", scales, body);
        good = equal(vector, "codes", {codes.begin(), codes.end()}, body) && good;
    } else {
        ++counts.left_out;
        return;
    }
    ++counts.vectors;
    counts.different += !good;
}

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: %s vectors/raw/NAME.json ...\n", argv[0]);
        return 2;
    }
    Counts counts;
    for (int i = 1; i < argc; ++i) {
        const std::string path = argv[i];
        try {
            const std::string text = read(path);
            const Json json = Parser(text).whole();
            if (json.at("schema").text != "1" || json.at("byte_order").text != "little")
                throw std::runtime_error("another schema or byte order");
            const std::string body = read(path.substr(0, path.rfind('.')) + ".bin");
            if (body.size() != json.at("bytes").number()) throw std::runtime_error("a .bin of another size");
            for (const Json& vector : json.at("vectors").items) check(vector, body, counts);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "%s: %s\n", path.c_str(), error.what());
            return 2;
        }
    }
    std::printf("%zu vectors checked, %zu differ; %zu are about other operations\n", counts.vectors,
                counts.different, counts.left_out);
    return counts.different ? 1 : 0;
}
