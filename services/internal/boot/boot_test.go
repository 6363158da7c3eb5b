package boot_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

func TestExitCode(t *testing.T) {
	base := errors.New("x")
	for _, tc := range []struct {
		name string
		err  error
		want int
	}{
		{"nil", nil, 0},
		{"usage of nil", boot.Usage(nil), 0},
		{"plain", base, 1},
		{"usage", boot.Usage(base), 2},
		{"wrapped usage", fmt.Errorf("w: %w", boot.Usage(base)), 2},
	} {
		if got := boot.ExitCode(tc.err); got != tc.want {
			t.Errorf("%s: got %d, want %d", tc.name, got, tc.want)
		}
	}
	if !errors.Is(boot.Usage(base), base) {
		t.Error("usage hides its cause")
	}
}

func TestBytes(t *testing.T) {
	for _, tc := range []struct {
		text string
		want boot.Bytes
		show string
	}{
		{"0", 0, "0B"},
		{"1B", 1, "1B"},
		{"1KB", 1000, "1000B"},
		{"1KiB", 1024, "1KiB"},
		{"64 MiB", 64 * boot.MiB, "64MiB"},
		{"1.5GiB", 1536 * boot.MiB, "1536MiB"},
		{"2TiB", 2 * boot.TiB, "2TiB"},
		{"9007199254740993B", 9007199254740993, "9007199254740993B"},
	} {
		var got boot.Bytes
		if err := got.UnmarshalText([]byte(tc.text)); err != nil || got != tc.want {
			t.Errorf("%q: got %d, %v; want %d", tc.text, got, err, tc.want)
		}
		if got.String() != tc.show {
			t.Errorf("%q prints as %q, want %q", tc.text, got, tc.show)
		}
		var again boot.Bytes
		if err := again.UnmarshalText([]byte(got.String())); err != nil || again != got {
			t.Errorf("%q: round trip gave %d, %v", got, again, err)
		}
	}
	for _, bad := range []string{
		"", "B", "64", "-1B", "1.5B", "-1MiB", "1MiBB", "1e400GiB", "NaNB", "InfB", "9EiB",
		"99999999TiB", "0x10B", "1_0B", "64mib",
	} {
		var got boot.Bytes
		if err := got.UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q: got %d, want an error", bad, got)
		}
	}
}

func TestNATS_Validate(t *testing.T) {
	for _, tc := range []struct {
		name string
		edit func(*boot.NATS)
		want string // "" for none
	}{
		{"default", func(*boot.NATS) {}, ""},
		{"several", func(n *boot.NATS) { n.URL = "nats://a:1, tls://b:2" }, ""},
		{"empty", func(n *boot.NATS) { n.URL = " " }, "nats.url: empty"},
		{"scheme", func(n *boot.NATS) { n.URL = "http://a" }, `nats.url: "http://a"; must be nats://`},
		{"no host", func(n *boot.NATS) { n.URL = "localhost" }, "nats.url"},
		{"no password in the message", func(n *boot.NATS) { n.URL = "http://u:hunter2@a" }, "***@a"},
		{"token and creds", func(n *boot.NATS) { n.Token, n.CredsFile = "a", "b" }, "nats.token"},
		{"key without certificate", func(n *boot.NATS) { n.KeyFile = "k" }, "nats.tls_cert"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := boot.DefaultNATS()
			tc.edit(&n)
			err := n.Validate()
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestLog_Check(t *testing.T) {
	good := boot.DefaultLog()
	if err := schemas.CheckFields(&good); err != nil {
		t.Error(err)
	}
	err := schemas.CheckFields(&boot.Log{Level: "loud", Format: "xml"})
	for _, want := range []string{`log.level: "loud"; must be one of trace, debug`, `log.format: "xml"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
