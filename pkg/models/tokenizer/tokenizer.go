// Package tokenizer turns text into token ids and back, for byte-level BPE vocabularies with
// the pre-tokenization of Qwen2. Load reads a Tokenizer from a folder; its Encode gives
// exactly the ids of the reference implementations, or Load fails.
//
// A vocabulary gives each token an id; merges say which pairs of tokens become one. Added
// tokens are matched in the text as a whole; special ones among them, such as the end of a
// turn, are not text.
package tokenizer

import (
	"container/heap"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Tokenizer is the byte-level BPE of the Qwen2 family. Encode first splits the text at added tokens; it normalizes
// the rest to NFC, splits it into words (see splitWord), and merges the bytes of each word pair by pair, in the
// order in which the merges were learned. It is immutable and safe for concurrent use.
type Tokenizer struct {
	tokens []string         // by id, in bytes; "" where there is no token
	bytes  [256]int32       // id of each single byte
	merges map[pair]merge   // adjacent ids to what they become
	raw    []addedToken     // added tokens matched in the text as it is, longest first
	normed []addedToken     // the same in the normalized text
	added  map[int32]string // added tokens by id
	// special are the added tokens that are not text.
	special map[int32]bool
}

// pair is two adjacent token ids.
type pair struct{ left, right int32 }

// merge says which id a pair becomes; pairs with lower ranks are merged first.
type merge struct{ rank, id int32 }

// addedToken is a token that is found in the text as a whole, before words are split.
type addedToken struct {
	content string
	id      int32
}

var errNotUTF8 = errors.New("text is not valid UTF-8")

// Encode returns the token ids of text, without template or padding. It fails on text
// that is not valid UTF-8.
func (t *Tokenizer) Encode(text string) ([]int32, error) {
	if !utf8.ValidString(text) {
		return nil, errNotUTF8
	}
	var ids []int32
	splitAtTokens(text, t.raw, func(part string, id int32) {
		if id >= 0 {
			ids = append(ids, id)
			return
		}
		splitAtTokens(nfc(part), t.normed, func(part string, id int32) {
			if id >= 0 {
				ids = append(ids, id)
				return
			}
			for part != "" {
				n := splitWord(part)
				ids = t.appendWord(ids, part[:n])
				part = part[n:]
			}
		})
	})
	return ids, nil
}

// Decode returns the bytes that ids stand for: the NFC of the encoded text. Unknown ids
// are an error.
func (t *Tokenizer) Decode(ids []int32) (string, error) {
	var b strings.Builder
	for _, id := range ids {
		if s, ok := t.added[id]; ok {
			b.WriteString(s)
			continue
		}
		if id < 0 || int(id) >= len(t.tokens) || t.tokens[id] == "" {
			return "", fmt.Errorf("token id %d: not in the vocabulary", id)
		}
		b.WriteString(t.tokens[id])
	}
	return b.String(), nil
}

// Piece returns the bytes of a token, none for a special one and for an id that is not in the
// vocabulary.
func (t *Tokenizer) Piece(id int32) string {
	if s, ok := t.added[id]; ok {
		if t.special[id] {
			return ""
		}
		return s
	}
	if id < 0 || int(id) >= len(t.tokens) {
		return ""
	}
	return t.tokens[id]
}

// Size returns one more than the largest id: the least number of rows of an embedding.
func (t *Tokenizer) Size() int {
	n := len(t.tokens)
	for id := range t.added {
		n = max(n, int(id)+1)
	}
	return n
}

// splitAtTokens calls f for the parts of text in order, with the id of an added token, or -1
// for other text. If several tokens match at a position, the longest counts.
func splitAtTokens(text string, added []addedToken, f func(part string, id int32)) {
	start := 0
	for i := 0; i < len(text) && len(added) > 0; {
		k := slices.IndexFunc(added, func(a addedToken) bool { return strings.HasPrefix(text[i:], a.content) })
		if k < 0 {
			i++
			continue
		}
		if start < i {
			f(text[start:i], -1)
		}
		i += len(added[k].content)
		start = i
		f(added[k].content, added[k].id)
	}
	if start < len(text) {
		f(text[start:], -1)
	}
}

// appendWord merges the bytes of one word and appends the ids. A heap orders the pairs by rank,
// then by position, so that a word of n bytes needs O(n log n) time.
func (t *Tokenizer) appendWord(ids []int32, word string) []int32 {
	if len(word) == 1 {
		return append(ids, t.bytes[word[0]])
	}
	nodes := make([]node, len(word))
	for i := range nodes {
		nodes[i] = node{id: t.bytes[word[i]], prev: int32(i) - 1, next: int32(i) + 1}
	}
	nodes[len(nodes)-1].next = -1
	var q mergeQueue
	consider := func(i int32) {
		if i < 0 || nodes[i].next < 0 {
			return
		}
		p := pair{nodes[i].id, nodes[nodes[i].next].id}
		if m, ok := t.merges[p]; ok {
			heap.Push(&q, candidate{merge: m, pair: p, at: i})
		}
	}
	for i := range nodes {
		consider(int32(i))
	}
	for len(q) > 0 {
		c := heap.Pop(&q).(candidate)
		left := &nodes[c.at]
		if left.id != c.pair.left || left.next < 0 || nodes[left.next].id != c.pair.right {
			continue // one of the two has been merged meanwhile
		}
		right := &nodes[left.next]
		left.id, right.id = c.merge.id, -1
		left.next = right.next
		if right.next >= 0 {
			nodes[right.next].prev = c.at
		}
		consider(left.prev)
		consider(c.at)
	}
	for i := int32(0); i >= 0; i = nodes[i].next {
		ids = append(ids, nodes[i].id)
	}
	return ids
}

// node is a symbol of a word, in a list linked both ways; id is -1 once it was merged
// into its left neighbour.
type node struct{ id, prev, next int32 }

// candidate is a pair that could be merged at a place.
type candidate struct {
	merge merge
	pair  pair
	at    int32
}

type mergeQueue []candidate

func (q mergeQueue) Len() int { return len(q) }

func (q mergeQueue) Less(i, j int) bool {
	if q[i].merge.rank != q[j].merge.rank {
		return q[i].merge.rank < q[j].merge.rank
	}
	return q[i].at < q[j].at
}

func (q mergeQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

func (q *mergeQueue) Push(x any) { *q = append(*q, x.(candidate)) }

func (q *mergeQueue) Pop() any {
	last := len(*q) - 1
	c := (*q)[last]
	*q = (*q)[:last]
	return c
}
