package command

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

func TestRuns(t *testing.T) {
	inStore(t)
	runs := linesOf(t, expect(t, exitOK, "", "runs", "ls", "--json"))
	if len(runs) != 1 || runs[0]["run"] != "r1" || runs[0]["groups"] != 1.0 || runs[0]["open_groups"] != 0.0 ||
		runs[0]["samples"] != 2.0 {
		t.Fatalf("runs %v", runs)
	}
	expect(t, exitOK, "r1", "runs", "ls")
	expect(t, exitOK, "MDR_TRAJECTORIES  2", "runs", "show", "r1")
	file := filepath.Join(t.TempDir(), "r1.tar")
	expect(t, exitOK, "2 blobs", "runs", "export", "r1", "--out", file)
	expect(t, exitUsage, "exists already; name another file", "runs", "export", "r1", "--out", file)
	missing := filepath.Join(t.TempDir(), "missing", "r1.tar")
	expect(t, exitUsage, "folder that does not exist; make the folder first", "runs", "export", "r1", "--out", missing)
	empty := filepath.Join(t.TempDir(), "empty.tar")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, exitFailed, "it was cut off", "runs", "read", empty)
	expect(t, exitFailed, "must be the folder of a dataset that is whole, or the file of an archive", "runs", "read",
		t.TempDir())
	expect(t, exitUsage, "is a folder; must be the file of an archive", "runs", "import", t.TempDir())
	expect(t, exitOK, "2 blobs", "runs", "read", file)
	// Two images, the embeddings of the prompt and its mask, of samples of which another is the parent.
	expect(t, exitOK, "", append([]string{"run", "--run", "r2", "--branch-from", "r1/p/0@1", "--return-conditioning"},
		small...)...)
	expect(t, exitOK, "4 blobs", "runs", "export", "r2", "--out", filepath.Join(t.TempDir(), "r2.tar"))
	expect(t, exitOK, "", "runs", "rm", "r2")
	steps := 0
	for _, e := range linesOf(t, expect(t, exitOK, "", "runs", "read", file, "--json")) {
		if e["stream"] == "MDR_STEPS" {
			steps++
			if event := e["event"].(map[string]any); event["run"] != "r1" || event["uid"] != "p" {
				t.Errorf("an exported step: %v", event)
			}
		}
	}
	if steps != 6 {
		t.Errorf("%d steps exported, want 6", steps)
	}
	expect(t, exitUsage, "", "gc")
	expect(t, exitOK, "would free 0 groups", "gc", "--gc-age", "1ms", "--dry-run")
	expect(t, exitOK, "freed 0 groups", "gc", "--blobs")
	expect(t, exitFailed, `run "nowhere": nothing is stored of it`, "gc", "--gc-age", "1ms", "--run", "nowhere")
	expect(t, exitFailed, "", "runs", "rm", "nobody")
	expect(t, exitOK, "run r1: ", "runs", "rm", "r1")
	if left := linesOf(t, expect(t, exitOK, "", "runs", "ls", "--json")); len(left) != 0 {
		t.Errorf("left are %v", left)
	}
}

// A dash is stdout for a page and an archive, and no place for a dataset; what was written is told on stderr.
func TestOut_Stdout(t *testing.T) {
	inStore(t)
	expect(t, exitOK, "", "runs", "export", "r1", "--out", "r1.tar")
	expect(t, exitOK, "", "report", "r1", "--out", "r1.html")
	for file, args := range map[string][]string{"r1.tar": {"runs", "export", "r1"}, "r1.html": {"report", "r1"}} {
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		stdout, stderr, err := command(t.Context(), append(args, "--out", "-")...)
		if err != nil || len(stdout) != len(want) || !strings.HasPrefix(stdout, string(want[:100])) ||
			!strings.HasPrefix(stderr, "stdout: ") {
			t.Errorf("%s: %d bytes on stdout, want %d; %v, %s", file, len(stdout), len(want), err, stderr)
		}
	}
	expect(t, exitUsage, "--out: -; must be a folder", "runs", "export", "r1", "--format", "webdataset", "--out", "-")
	if _, err := os.Lstat("-"); err == nil {
		t.Error("there is a file of that name")
	}
}

// contentOf are the content digests of all events of an export that have one, by subject.
func contentOf(t *testing.T, file string) map[string]any {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string]any{}
	for e, err := range export.ReadArchive(f) {
		if err != nil {
			t.Fatal(err)
		}
		event := schemas.Event(&schemas.Trajectory{})
		switch e.Stream {
		case schemas.StreamTrajectories:
		case schemas.StreamSteps:
			event = &schemas.Step{}
		case schemas.StreamRewards:
			event = &schemas.Reward{}
		case schemas.StreamAdvantages:
			event = &schemas.Advantage{}
		default:
			continue
		}
		if schemas.Decode(e.Data, event) != nil {
			continue // an opening, a batch
		}
		sum, err := schemas.ContentDigest(event)
		if err != nil {
			t.Fatal(err)
		}
		out[e.Subject] = sum
	}
	return out
}

// An export goes into another store, with all digests, and from there out again; done twice, or after it was cut off,
// it ends the same. The run cannot be mixed with another of its name, and verify finds what it found.
func TestRuns_Import(t *testing.T) {
	inStore(t)
	dir := t.TempDir()
	first, second := filepath.Join(dir, "first.tar"), filepath.Join(dir, "second.tar")
	expect(t, exitOK, "", "runs", "export", "r1", "--out", first)
	expect(t, exitOK, " 0 events stored", "runs", "import", first) // into where it is from
	other := []string{"--store", filepath.Join(dir, "other")}
	in := func(args ...string) []string { return append(args, other...) }
	expect(t, exitOK, "", in(append([]string{"run", "--run", "fill"}, small...)...)...) // so that sequences differ
	expect(t, exitOK, " 0 events there already, 2 blobs", in("runs", "import", first)...)
	expect(t, exitOK, " 0 events stored", in("runs", "import", first)...)
	expect(t, exitOK, "", in("verify", "--run", "r1", "--model", "synthetic")...)
	expect(t, exitOK, "", in("runs", "export", "r1", "--out", second)...)
	want, got := contentOf(t, first), contentOf(t, second)
	if len(want) < 11 || len(got) != len(want) {
		t.Errorf("%d events with a digest, exported were %d", len(got), len(want))
	}
	for subject, digest := range want {
		if got[subject] != digest {
			t.Errorf("%s has the digest %x, exported was %x", subject, got[subject], digest)
		}
	}
}

// No run goes into a store on which services run.
func TestRuns_ImportBesideServices(t *testing.T) {
	inStore(t)
	file := filepath.Join(t.TempDir(), "r1.tar")
	expect(t, exitOK, "", "runs", "export", "r1", "--out", file)
	serving(t, "--model", "synthetic")
	bustest.Until(t, "a refusal", func() error {
		out, errs, err := command(t.Context(), "runs", "import", file)
		if err == nil || !strings.Contains(err.Error(), "runs on this store") {
			return fmt.Errorf("%s%s: %w", out, errs, err)
		}
		return nil
	})
}

// A file of an export that was changed, cut off, or taken out is named.
func TestRuns_ReadChanged(t *testing.T) {
	inStore(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "r1.tar")
	expect(t, exitOK, "", "runs", "export", "r1", "--out", file)
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	step := bytes.Index(whole, []byte("latents"))
	for name, change := range map[string]struct {
		says string
		with func(data []byte) []byte
	}{
		"behind":    {"bytes follow after its end", func(d []byte) []byte { return append(d, "more"...) }},
		"a step":    {"MDR_STEPS/", func(d []byte) []byte { d[step+200] ^= 1; return d }},
		"cut off":   {"it was cut off", func(d []byte) []byte { return d[:len(d)/2/512*512] }},
		"of a list": {"SHA256SUMS", func(d []byte) []byte { d[bytes.LastIndex(d, []byte("MDR_GROUPS"))] = 'X'; return d }},
	} {
		changed := filepath.Join(dir, strings.ReplaceAll(name, " ", "_"))
		if err := os.WriteFile(changed, change.with(slices.Clone(whole)), 0o600); err != nil {
			t.Fatal(err)
		}
		expect(t, exitFailed, change.says, "runs", "read", changed)
		expect(t, exitFailed, change.says, "runs", "import", changed)
	}
}
