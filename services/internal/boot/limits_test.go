package boot_test

import (
	"bytes"
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

func TestAge(t *testing.T) {
	for text, want := range map[string]boot.Age{
		"0": 0, "forever": -1, "14d": boot.Age(14 * 24 * time.Hour), "36h": boot.Age(36 * time.Hour), "2m": boot.Age(2 * time.Minute),
	} {
		var got boot.Age
		if err := got.UnmarshalText([]byte(text)); err != nil || got != want {
			t.Errorf("%q: got %v, %v", text, got, err)
		}
		var again boot.Age
		if err := again.UnmarshalText([]byte(got.String())); err != nil || again != got {
			t.Errorf("%q is printed as %q, which reads as %v, %v", text, got, again, err)
		}
	}
	for _, text := range []string{"", "7", "1s", "-1h", "0d", "99999d", "for ever", "1.5d"} {
		if err := new(boot.Age).UnmarshalText([]byte(text)); err == nil || !strings.Contains(err.Error(), "must be") {
			t.Errorf("%q: got %v", text, err)
		}
	}
}

// Every limit is of a stream of the contract, and every stream that fills has one.
func TestLimits_Streams(t *testing.T) {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	var l boot.Limits
	l.Flags(fs)
	if err := fs.Parse([]string{
		"--max-steps-bytes", "2GiB", "--max-steps-age", "forever",
		"--max-blobs-bytes=1GiB",
	}); err != nil {
		t.Fatal(err)
	}
	want := map[string]bus.StreamLimit{
		schemas.StreamSteps:      {Stream: schemas.StreamSteps, MaxBytes: 2 << 30, MaxAge: -1},
		schemas.StreamBlobBucket: {Stream: schemas.StreamBlobBucket, MaxBytes: 1 << 30},
	}
	got := map[string]bus.StreamLimit{}
	for _, s := range l.Streams() {
		got[s.Stream] = s
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
	for _, s := range schemas.Streams() {
		small := s.Name == schemas.StreamPolicies || s.Name == schemas.StreamApplied ||
			s.Name == schemas.StreamControl || s.Name == schemas.StreamAdvisories
		if flag := boot.SizeFlag(s.Name); (flag == "") != small || flag != "" && fs.Lookup(flag) == nil {
			t.Errorf("%s has the flag %q", s.Name, flag)
		}
	}
	if boot.SizeFlag(schemas.StreamBlobBucket) == "" {
		t.Error("the object store has no flag")
	}
	l.MaxStepsBytes = 1
	if err := l.Validate(); err == nil || !strings.Contains(err.Error(), "max_steps_bytes: 1B; must be at least 1MiB") {
		t.Errorf("got %v", err)
	}
}

// A limit that the program would not apply is refused.
func TestLimits_WithoutSetup(t *testing.T) {
	var stdout, stderr bytes.Buffer
	s := boot.Service[struct{}]{Name: "stage", Summary: "does nothing", HealthAddr: ""}
	code := s.Execute(context.Background(), []string{"--max-steps-bytes", "1GiB", "--setup=false"}, nil, &stdout,
		&stderr)
	if code != boot.ExitUsage || !strings.Contains(stderr.String(), "setup: false") {
		t.Errorf("exit %d\n%s", code, stderr.String())
	}
}
