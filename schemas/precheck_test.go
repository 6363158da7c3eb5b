package schemas_test

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// key is a one-entry map header and its key "k".
const key = "\x81\xa1k"

// hostile are byte strings no event may be, with a word of why.
var hostile = []struct {
	name, data, want string
}{
	{"nothing", "", "empty"},
	{"not a map", "\x90", "must be a map"},
	{"null", "\xc0", "must be a map"},
	{"bytes that claim 4 GiB", key + "\xc6\xff\xff\xff\xff", "beyond the bytes left"},
	{"string that claims 4 GiB", key + "\xdb\xff\xff\xff\xff", "beyond the bytes left"},
	{"bytes one too long", key + "\xc4\x02a", "beyond the bytes left"},
	{"short string one too long", key + "\xa2a", "beyond the bytes left"},
	{"list of 100 million", key + "\xdd\x05\xf5\xe1\x00", "beyond the bytes left"},
	{"map of 15.7 million", "\xdf\x00\xf0\x00\x00", "beyond the bytes left"},
	{"inner map of 15.7 million", key + "\xdf\x00\xf0\x00\x00", "beyond the bytes left"},
	{"map with more keys than bytes", "\x8f\xa1k\x01", "beyond the bytes left"},
	{"ends before a value", key, "ends within"},
	{"ends within a number", key + "\xcf\x00", "beyond the bytes left"},
	{"ends within a length", key + "\xc6\x00", "ends within a length"},
	{"ends within a map length", "\xde\x00", "ends within a length"},
	{"bytes after the map", "\x80\x00", "1 bytes after"},
	{"a second map", "\x80\x80", "1 bytes after"},
	{"twelve million nested lists", key + strings.Repeat("\x91", 7<<20) + "\x00", "nested too deep"},
	{"nested one too deep", key + strings.Repeat("\x91", schemas.MaxDepth) + "\x00", "nested too deep"},
	{"nested maps one too deep", strings.Repeat(key, schemas.MaxDepth+1) + "\x00", "nested too deep"},
	{"empty list one too deep", key + strings.Repeat("\x91", schemas.MaxDepth-1) + "\x90", "nested too deep"},
	{"fixed extension", key + "\xd4\x01\x00", "extension"},
	{"extension", key + "\xc7\x01\x01\x00", "extension"},
	{"timestamp extension", key + "\xd6\xff\x00\x00\x00\x00", "extension"},
	{"unused code", key + "\xc1", "0xc1"},
	{"integer key", "\x81\x01\x01", "key that is not a string"},
	{"null key", "\x81\xc0\x01", "key that is not a string"},
	{"bytes as key", "\x81\xc4\x01k\x01", "key that is not a string"},
	{"map as key", "\x81\x80\x01", "key that is not a string"},
	{"duplicate key", "\x82\xa1k\x01\xa1k\x02", "came before at byte 4"},
	{"duplicate key encoded otherwise", "\x82\xa1k\x01\xd9\x01k\x02", "came before"},
	{"duplicate empty key", "\x82\xa0\x01\xa0\x02", "came before"},
	{"duplicate inner key", key + "\x82\xa1k\x01\xa1k\x02", "came before"},
	{"duplicate key of a large map", largeMap(100, 99), "came before"},
	{"too many keys", largeMap(schemas.MaxMapKeys+1, -1), "too many keys"},
	{"key too long", "\x81\xda\x01\x01" + strings.Repeat("k", schemas.MaxKeyBytes+1) + "\x01", "key too long"},
	{"string that is not UTF-8", key + "\xa2\xc3\x28", "not UTF-8"},
	{"key that is not UTF-8", "\x81\xa1\xff\x01", "not UTF-8"},
	{"list too long", key + "\xdc\x20\x01" + strings.Repeat("\x01", schemas.MaxListItems+1), "list too long"},
	{"too many values", key + "\x99" + strings.Repeat("\xdc\x20\x00"+strings.Repeat("\x01", 8192), 9), "too many values"},
	{"too long", key + "\xc6\x00\x80\x00\x00" + strings.Repeat("\x00", 8<<20), "bytes; must be at most"},
}

// largeMap has n keys, of which the last repeats number repeat unless that is negative.
func largeMap(n, repeat int) string {
	var b strings.Builder
	b.WriteString("\xde" + string([]byte{byte(n >> 8), byte(n)}))
	for i := range n {
		if i == n-1 && repeat >= 0 {
			i = n - 2
		}
		k := strconv.Itoa(i)
		b.WriteByte(0xa0 | byte(len(k)))
		b.WriteString(k + "\x01")
	}
	return b.String()
}

func TestPrecheck_hostile(t *testing.T) {
	for _, tt := range hostile {
		t.Run(tt.name, func(t *testing.T) {
			data := []byte(tt.data)
			err := schemas.Precheck(data)
			if !errors.Is(err, schemas.ErrMalformed) || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("Precheck = %v, want ErrMalformed with %q", err, tt.want)
			}
			for _, e := range schemas.Events() {
				if err := schemas.Decode(data, e); !errors.Is(err, schemas.ErrMalformed) {
					t.Errorf("Decode into %T = %v, want ErrMalformed", e, err)
				}
			}
		})
	}
}

func TestPrecheck_accepts(t *testing.T) {
	tests := []struct{ name, data string }{
		{"empty map", "\x80"},
		{"every scalar", "\xdc"}, // replaced below: a list is no event, so it sits in a map
		{"eight levels", key + strings.Repeat("\x91", 6) + "\x90"},
		{"as many keys as allowed", largeMap(schemas.MaxMapKeys, -1)},
		{"longest key", "\x81\xda\x01\x00" + strings.Repeat("k", schemas.MaxKeyBytes) + "\x01"},
		{"keys that share a prefix", "\x83\xa0\x01\xa1k\x01\xa2kk\x01"},
		{"same key on two levels", key + key + "\x01"},
		{"longest list", key + "\xdc\x20\x00" + strings.Repeat("\x01", schemas.MaxListItems)},
		{"map with a 32-bit length", "\xdf\x00\x00\x00\x01\xa1k\xdd\x00\x00\x00\x01\xdb\x00\x00\x00\x01s"},
	}
	tests[1].data = key + "\xdc\x00\x16" + // 22 values
		"\x00\x7f\xe0\xff\xc0\xc2\xc3" +
		"\xcc\x01\xcd\x00\x01\xce\x00\x00\x00\x01\xcf\x00\x00\x00\x00\x00\x00\x00\x01" +
		"\xd0\xff\xd1\xff\xff\xd2\xff\xff\xff\xff\xd3\xff\xff\xff\xff\xff\xff\xff\xff" +
		"\xca\x00\x00\x00\x00\xcb\x00\x00\x00\x00\x00\x00\x00\x00" +
		"\xc4\x01\xff\xc5\x00\x01\xff\xc6\x00\x00\x00\x01\xff" +
		"\xa1s\xd9\x01s"
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := schemas.Precheck([]byte(tt.data)); err != nil {
				t.Errorf("Precheck = %v, want nil", err)
			}
		})
	}
}

// Every prefix of an event, and an event with any one byte cut out or more behind,
// must come to an error or to an event, never to a panic.
func TestDecode_truncated(t *testing.T) {
	for _, s := range samples(t) {
		if s.name == "request-extremes" {
			continue // 40 KB of the same: the others have every field
		}
		data, err := schemas.Encode(s.event)
		if err != nil {
			t.Fatal(err)
		}
		for n := range data {
			if err := schemas.Decode(data[:n], blank(t, s.event)); !errors.Is(err, schemas.ErrMalformed) {
				t.Fatalf("%s cut at %d of %d: %v, want ErrMalformed", s.name, n, len(data), err)
			}
			_ = schemas.Decode(append(bytes.Clone(data[:n]), data[n+1:]...), blank(t, s.event))
		}
	}
}

func TestPrecheck_allocations(t *testing.T) {
	data := encoded(t, largeStep())
	many := []byte(largeMap(schemas.MaxMapKeys, -1))
	if n := testing.AllocsPerRun(100, func() {
		if schemas.Precheck(data) != nil || schemas.Precheck(many) != nil {
			t.Fatal("refused")
		}
	}); n != 0 {
		t.Errorf("Precheck allocates %v times, want 0", n)
	}
}

func encoded(t testing.TB, e schemas.Event) []byte {
	t.Helper()
	data, err := schemas.Encode(e)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// largeStep is a step with 512 KiB of latents: 1024 x 1024 pixels in F16.
func largeStep() *schemas.Step {
	s := sdeStep()
	s.Latents = []schemas.IndexedTensor{{Index: 2, Tensor: schemas.Tensor{
		DType: "F16", Shape: []int64{4096, 64}, Data: bytes.Repeat([]byte{0x12, 0x34}, 4096*64),
	}}}
	return s
}

func BenchmarkPrecheck(b *testing.B) {
	for _, bb := range []struct {
		name  string
		event schemas.Event
	}{{"event=step/latents=512KiB", largeStep()}, {"event=trajectory/steps=4", completedTrajectory(b)}} {
		b.Run(bb.name, func(b *testing.B) {
			data := encoded(b, bb.event)
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				if err := schemas.Precheck(data); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
