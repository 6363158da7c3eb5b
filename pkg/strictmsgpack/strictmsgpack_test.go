package strictmsgpack_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/strictmsgpack"
)

func TestDecode(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]any{
		"\xc0": nil, "\xc3": true, "\x07": int64(7), "\xff": int64(-1), "\xcc\xff": uint64(255), "\xd0\x80": int64(-128),
		"\xca\x3f\x80\x00\x00": 1.0, "\xa1a": "a", "\xc4\x01\xff": []byte{0xff},
		"\x92\x01\x81\xa1a\x90": []any{int64(1), map[string]any{"a": []any{}}},
	} {
		if got, err := strictmsgpack.Decode([]byte(in)); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %#v, %v; want %#v", in, got, err, want)
		}
	}
	for in, want := range map[string]string{
		"": "ends early", "\xdd\xff\xff\xff\xff": "ends early", "\xc6\xff\xff\xff\xff": "ends early",
		"\x01\x02": "1 bytes after", "\xd4\x01\x02": "code 0xd4", "\xc1": "code 0xc1", "\xa1\xff": "not UTF-8",
		"\x82\xa1a\x01\xa1a\x02": `"a" comes twice`, "\x81\x01\x02": "key 1; must be a text",
		strings.Repeat("\x91", 100):                            "more than 16 levels",
		"\xdd\x00\x02\x00\x00" + strings.Repeat("\x01", 2<<16): "more than 65536 values",
	} {
		if got, err := strictmsgpack.Decode([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: %v, %v; want %q", in, got, err, want)
		}
	}
}
