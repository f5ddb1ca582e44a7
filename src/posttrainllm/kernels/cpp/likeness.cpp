// Real words and verbatim copies: see statistics.h for what each function promises and
// text/likeness.py for the definitions.
//
// Words: what was written is kept, and the corpus, read as a stream, says which of it it knows. So
// the memory is that of the written texts, and a corpus can be of any length.
// Copies: a suffix automaton of the written texts (Blumer and others, 1985): its states are the sets
// of ends that pieces of the texts have in common. Read along a stream, it holds at every byte the
// longest piece of any text that the stream has just ended: one look-up or few a byte, no bisection.

#include "letters.h"
#include "statistics.h"

namespace {

constexpr uint32_t LEAST_LETTERS = 3;
constexpr uint32_t NO_LETTER = 0xFFFD;

inline void* after(void* address, uint64_t bytes) {
  return static_cast<char*>(address) + ((bytes + 7) & ~7ull);
}

inline uint64_t mix(uint64_t value) {
  value *= 0x9E3779B97F4A7C15u;
  return value ^ value >> 32;
}

// A power of two, over a third more than `most`, so that a hash table is never full.
uint64_t table_size(uint64_t most) {
  uint64_t size = 16;
  while (size < most + most / 3 + 1) size *= 2;
  return size;
}

// ---- characters ----------------------------------------------------------------------------------

// The first range that does not end before a character, or null.
template <class Range, uint64_t N>
const Range* range_from(const Range (&ranges)[N], uint32_t code) {
  uint64_t low = 0, high = N;
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (ranges[middle].last < code) low = middle + 1;
    else high = middle;
  }
  return low < N ? &ranges[low] : nullptr;
}

bool is_letter(uint32_t code) {
  if (code < 0x80) return (code | 0x20) - 'a' < 26;
  const Letters* range = range_from(LETTERS, code);
  return range && range->first <= code;
}

// Lower case of one letter, the sigma at the end of a Greek word like every other.
uint32_t lower(uint32_t code) {
  constexpr uint32_t FINAL_SIGMA = 0x3C2, SIGMA = 0x3C3;
  if (code < 0x80) return code - 'A' < 26 ? code + 32 : code;
  if (code == FINAL_SIGMA) return SIGMA;
  const Lower* range = range_from(LOWER, code);
  const bool inside =
      range && range->first <= code && (code - range->first) % uint32_t(range->step) == 0;
  return inside ? uint32_t(int32_t(code) + range->delta) : code;
}

// UTF-8, byte by byte. What is no UTF-8 comes out as NO_LETTER, as often as it likes.
struct Decoder {
  uint32_t code, left, low, high;  // of the next byte: at least low, at most high
};

template <class Take>
inline void decode(Decoder& decoder, uint32_t byte, Take take) {
  if (decoder.left) {
    if (byte >= decoder.low && byte <= decoder.high) {
      decoder.code = decoder.code << 6 | (byte & 0x3F);
      decoder.low = 0x80;
      decoder.high = 0xBF;
      if (--decoder.left == 0) take(decoder.code);
      return;
    }
    decoder.left = 0;
    take(NO_LETTER);
  }
  if (byte < 0x80) return take(byte);
  if (byte < 0xC2 || byte > 0xF4) return take(NO_LETTER);
  decoder.left = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  decoder.code = byte & (0x3F >> decoder.left);
  // Neither longer than needed, nor a surrogate, nor beyond U+10FFFF.
  decoder.low = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  decoder.high = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
}

// ---- words ---------------------------------------------------------------------------------------

struct Entry {
  uint64_t hash;
  uint64_t start;       // in the store
  uint32_t n_bytes;     // 0 for an empty entry
  uint32_t written[2];  // how often each group has it
  uint32_t parts;       // bits: which parts of the corpus have it
};

struct Words {
  Entry* entries;
  uint64_t size;   // a power of two
  uint8_t* store;  // the written words, one behind the other
  uint64_t stored;
  uint8_t* word;  // the one that is being read
  uint64_t room;  // in bytes, of the store and of the word
  uint64_t n_bytes, n_letters;  // of the word; n_bytes may go beyond the room, and then it is unknown
  Decoder decoder;
};

// Lower case takes at most half as many bytes again: U+023A has two, U+2C65 three.
inline uint64_t room_for(uint64_t n_bytes) { return 2 * n_bytes + 8; }
inline uint64_t most_words(uint64_t n_bytes) { return n_bytes / LEAST_LETTERS + 1; }

Entry& entry_of(Words& words) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (uint64_t i = 0; i < words.n_bytes; i++) hash = (hash ^ words.word[i]) * 0x100000001B3u;
  for (uint64_t at = mix(hash) & (words.size - 1);; at = (at + 1) & (words.size - 1)) {
    Entry& entry = words.entries[at];
    if (entry.n_bytes == 0) {
      entry.hash = hash;
      return entry;
    }
    if (entry.hash != hash || entry.n_bytes != words.n_bytes) continue;
    uint64_t same = 0;
    while (same < words.n_bytes && words.store[entry.start + same] == words.word[same]) same++;
    if (same == words.n_bytes) return entry;
  }
}

inline void append(Words& words, uint32_t byte) {
  if (words.n_bytes < words.room) words.word[words.n_bytes] = uint8_t(byte);
  words.n_bytes++;
}

void append_letter(Words& words, uint32_t code) {
  words.n_letters++;
  if (code < 0x80) return append(words, code);
  const uint32_t more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  append(words, ((0xFF00 >> (more + 1)) & 0xFF) | code >> (6 * more));
  for (uint32_t i = more; i > 0; i--) append(words, 0x80 | ((code >> (6 * (i - 1))) & 0x3F));
}

// End the word: `found` is told of it when it is one.
template <class Found>
inline void end_word(Words& words, Found found) {
  if (words.n_letters >= LEAST_LETTERS && words.n_bytes <= words.room) found(entry_of(words));
  words.n_bytes = words.n_letters = 0;
}

template <class Found>
inline void take_byte(Words& words, uint32_t byte, Found found) {
  constexpr uint32_t DOTTED_I = 0x130;  // its lower case is an i and a dot, which is no letter
  decode(words.decoder, byte, [&](uint32_t code) {
    if (code == DOTTED_I) {
      append_letter(words, 'i');
      end_word(words, found);
    } else if (is_letter(code)) {
      append_letter(words, lower(code));
    } else {
      end_word(words, found);
    }
  });
}

inline auto knows(uint32_t part) {
  return [part](Entry& entry) {
    if (entry.n_bytes) entry.parts |= 1u << part;
  };
}

// ---- copies --------------------------------------------------------------------------------------

constexpr uint32_t ROOT = 0, NOWHERE = UINT32_MAX;
constexpr uint32_t TEXT_ENDS = 256;  // a symbol beside the bytes: no piece goes over it

struct State {
  uint32_t length;  // of the longest piece that leads here
  uint32_t link;    // where its longest end leads that leads elsewhere
};

struct Edge {
  uint64_t key;  // state and symbol, plus 1; 0 for an empty edge
  uint64_t target;
};

struct Copies {
  State* states;
  Edge* edges;
  uint64_t size;  // of the edges, a power of two
  uint32_t n_states, last;
  uint32_t state;  // while reading: where the stream has led,
  uint32_t length;  // and how many bytes of it
  uint64_t position;
  uint64_t best_length, best_place;
};

// An automaton of n symbols has at most 2 n states and 3 n edges.
inline uint64_t most_states(uint64_t n) { return 2 * n + 1; }
inline uint64_t most_edges(uint64_t n) { return 3 * n; }

inline Edge& edge(const Copies& copies, uint32_t state, uint32_t symbol) {
  const uint64_t key = uint64_t(state) * (TEXT_ENDS + 1) + symbol + 1;
  uint64_t at = mix(key) & (copies.size - 1);
  while (copies.edges[at].key && copies.edges[at].key != key) at = (at + 1) & (copies.size - 1);
  return copies.edges[at];
}

inline uint32_t follow(const Copies& copies, uint32_t state, uint32_t symbol) {
  const Edge& found = edge(copies, state, symbol);
  return found.key ? uint32_t(found.target) : NOWHERE;
}

inline void lead(Copies& copies, uint32_t state, uint32_t symbol, uint32_t target) {
  edge(copies, state, symbol) = {uint64_t(state) * (TEXT_ENDS + 1) + symbol + 1, target};
}

// A copy of a state for its shorter pieces.
uint32_t split(Copies& copies, uint32_t state, uint32_t length) {
  const uint32_t copy = copies.n_states++;
  copies.states[copy] = {length, copies.states[state].link};
  for (uint32_t symbol = 0; symbol <= TEXT_ENDS; symbol++) {
    const uint32_t target = follow(copies, state, symbol);
    if (target != NOWHERE) lead(copies, copy, symbol, target);
  }
  return copy;
}

void extend(Copies& copies, uint32_t symbol) {
  State* states = copies.states;
  const uint32_t now = copies.n_states++;
  states[now] = {states[copies.last].length + 1, ROOT};
  uint32_t at = copies.last;
  copies.last = now;
  while (at != NOWHERE && follow(copies, at, symbol) == NOWHERE) {
    lead(copies, at, symbol, now);
    at = states[at].link;
  }
  if (at == NOWHERE) return;
  uint32_t target = follow(copies, at, symbol);
  if (states[target].length != states[at].length + 1) {
    const uint32_t whole = target;
    target = split(copies, whole, states[at].length + 1);
    while (at != NOWHERE && follow(copies, at, symbol) == whole) {
      lead(copies, at, symbol, target);
      at = states[at].link;
    }
    states[whole].link = target;
  }
  states[now].link = target;
}

}  // namespace

extern "C" {

uint64_t likeness_words_bytes(uint64_t n_bytes) {
  return sizeof(Words) + 8 + table_size(most_words(n_bytes)) * sizeof(Entry) +
         2 * (room_for(n_bytes) + 8);
}

void likeness_words_begin(void* state, uint64_t n_bytes) {
  Words& words = *static_cast<Words*>(state);
  words.size = table_size(most_words(n_bytes));
  words.room = room_for(n_bytes);
  words.entries = static_cast<Entry*>(after(state, sizeof(Words)));
  words.store = static_cast<uint8_t*>(after(words.entries, words.size * sizeof(Entry)));
  words.word = static_cast<uint8_t*>(after(words.store, words.room));
  words.stored = words.n_bytes = words.n_letters = 0;
  words.decoder = {0, 0, 0, 0};
  for (uint64_t i = 0; i < words.size; i++) words.entries[i] = {0, 0, 0, {0, 0}, 0};
}

void likeness_words_written(void* state, const uint8_t* text, uint64_t n, uint32_t group) {
  Words& words = *static_cast<Words*>(state);
  const auto found = [&](Entry& entry) {
    if (entry.n_bytes == 0) {
      entry.n_bytes = uint32_t(words.n_bytes);
      entry.start = words.stored;
      for (uint64_t i = 0; i < words.n_bytes; i++) words.store[words.stored++] = words.word[i];
    }
    entry.written[group]++;
  };
  for (uint64_t i = 0; i < n; i++) take_byte(words, text[i], found);
  // Half a character ends a word; the end of the text cuts it, and then it is none.
  if (words.decoder.left) end_word(words, found);
  words.decoder.left = 0;
  words.n_bytes = words.n_letters = 0;
}

void likeness_words_read(void* state, const uint8_t* piece, uint64_t n, uint32_t part) {
  Words& words = *static_cast<Words*>(state);
  for (uint64_t i = 0; i < n; i++) take_byte(words, piece[i], knows(part));
}

void likeness_words_end(void* state, uint32_t part) {
  Words& words = *static_cast<Words*>(state);
  words.decoder.left = 0;
  end_word(words, knows(part));
}

void likeness_words_count(const void* state, uint64_t* out, uint32_t group, uint32_t parts) {
  const Words& words = *static_cast<const Words*>(state);
  out[0] = out[1] = 0;
  for (uint64_t i = 0; i < words.size; i++) {
    const Entry& entry = words.entries[i];
    out[0] += entry.written[group];
    if (entry.parts & parts) out[1] += entry.written[group];
  }
}

uint64_t likeness_copy_bytes(uint64_t n_bytes, uint64_t n_texts) {
  const uint64_t n = n_bytes + n_texts;
  return sizeof(Copies) + 8 + most_states(n) * sizeof(State) +
         table_size(most_edges(n)) * sizeof(Edge);
}

void likeness_copy_begin(void* state, uint64_t n_bytes, uint64_t n_texts) {
  Copies& copies = *static_cast<Copies*>(state);
  const uint64_t n = n_bytes + n_texts;
  copies.size = table_size(most_edges(n));
  copies.states = static_cast<State*>(after(state, sizeof(Copies)));
  copies.edges = static_cast<Edge*>(after(copies.states, most_states(n) * sizeof(State)));
  for (uint64_t i = 0; i < copies.size; i++) copies.edges[i].key = 0;
  copies.states[ROOT] = {0, NOWHERE};
  copies.n_states = 1;
  copies.last = copies.state = ROOT;
  copies.length = 0;
  copies.position = copies.best_length = copies.best_place = 0;
}

void likeness_copy_written(void* state, const uint8_t* text, uint64_t n) {
  Copies& copies = *static_cast<Copies*>(state);
  for (uint64_t i = 0; i < n; i++) extend(copies, text[i]);
  extend(copies, TEXT_ENDS);
}

void likeness_copy_read(void* state, const uint8_t* piece, uint64_t n) {
  Copies& copies = *static_cast<Copies*>(state);
  for (uint64_t i = 0; i < n; i++) {
    uint32_t target = follow(copies, copies.state, piece[i]);
    while (target == NOWHERE && copies.state != ROOT) {
      copies.state = copies.states[copies.state].link;
      copies.length = copies.states[copies.state].length;
      target = follow(copies, copies.state, piece[i]);
    }
    if (target != NOWHERE) {
      copies.state = target;
      copies.length++;
    }
    copies.position++;
    if (copies.length > copies.best_length) {
      copies.best_length = copies.length;
      copies.best_place = copies.position - copies.length;
    }
  }
}

void likeness_copy_longest(const void* state, uint64_t* out) {
  out[0] = static_cast<const Copies*>(state)->best_length;
  out[1] = static_cast<const Copies*>(state)->best_place;
}

uint32_t likeness_unseen(uint64_t* starts, const uint64_t* sizes, uint64_t count, uint64_t n_val) {
  uint64_t most = 0;
  for (uint64_t i = 0; i < count; i++) most = sizes[i] > most ? sizes[i] : most;
  if (count == 0 || n_val < most) return 0;
  const uint64_t free = n_val - most, steps = count > 1 ? count - 1 : 1;
  for (uint64_t i = 0; i < count; i++) starts[i] = free * i / steps;
  return 1;
}

}  // extern "C"
