package integration_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/verify"
)

// sharedFolder is a folder under two paths: that of those who push, and that of samplers.
func sharedFolder(t *testing.T) (dir, mount string) {
	t.Helper()
	dir, mount = t.TempDir(), filepath.Join(t.TempDir(), "mount")
	if err := os.Symlink(dir, mount); err != nil {
		t.Skip("no symbolic links here: ", err)
	}
	return dir, mount
}

// weightsIn writes a file of weights to a folder.
func weightsIn(t *testing.T, data []byte, elements ...string) (path string) {
	t.Helper()
	path = filepath.Join(elements...)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, 0o600)); err != nil {
		t.Fatal(err)
	}
	return path
}

// pushByPath pushes the transformer of a file or a folder in a shared folder.
func pushByPath(t *testing.T, peer *client.Client, dir, name string) *schemas.Policy {
	t.Helper()
	full, err := lora.OpenFull(name)
	if err != nil {
		t.Fatal(err)
	}
	p, err := peer.PushWeights(t.Context(), full, client.Push{WeightsDir: dir})
	if err = errors.Join(err, full.Close()); err != nil {
		t.Fatal(err)
	}
	for _, w := range p.Weights {
		if w.Path == "" || w.Bucket != "" {
			t.Fatalf("%+v, want a path", w)
		}
	}
	return p
}

// content publishes one sample of a fixed seed, and returns the digest of what is made of it.
func (f *fullPlane) content(t *testing.T, run schemas.Run, p *schemas.Policy) string {
	t.Helper()
	if _, err := f.peer.Publish(t.Context(), run, &schemas.Prompt{
		UID: "u", Prompt: `a sign that says "FOX"`, GroupSize: new(int64(1)), Seed: new(int64(7)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(3))},
		Routing:       schemas.Routing{MinPolicyVersion: &p.PolicyVersion},
	}); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, f.Bus, 1, schemas.StreamTrajectories, schemas.TrajectoryFilter(run, "*"))
	tr, err := f.peer.Trajectory(t.Context(), run, "u", 0)
	if err != nil || tr.WeightsDigest != p.WeightsDigest {
		t.Fatalf("%s: weights %.12s, %v; want %.12s", run, tr.WeightsDigest, err, p.WeightsDigest)
	}
	return tr.Medium(schemas.KindImage).Digest
}

// verified checks the samples of some runs, with the shared folder.
func (f *fullPlane) verified(t *testing.T, dir string, runs ...schemas.Run) {
	t.Helper()
	for _, run := range runs {
		report, err := verify.Run(t.Context(), f.Bus, run,
			verify.Options{Model: []string{signsFolder}, WeightsDir: dir})
		if err != nil || report.Trajectories != 1 || report.MaxRatio != 0 || len(report.Mismatches) > 0 ||
			report.Unproven != "" {
			t.Errorf("verify %s: %+v, %v", run, report, err)
		}
	}
}

// A transformer is pushed by path: from elsewhere it is copied into the shared folder, in it it is used where it lies.
// Nothing of it is in the server; samples are made with it, and verified. Once the file is changed, or gone, samplers
// and verify say so, and the samplers go on with the weights that they have.
func TestPolicy_ByPath(t *testing.T) {
	sequential(t)
	t.Parallel()
	dir, mount := sharedFolder(t)
	f := newFullPlane(t, func(c *pipeline.Config) { c.Sampler.WeightsDir = mount })
	before := f.content(t, "base", f.base)
	if again := f.content(t, "again", f.base); again != before {
		t.Fatal("a seed gives two images, so this proves nothing")
	}

	elsewhere := weightsIn(t, transformer(t, 1, set(t, weight, 0.25, -0.5, 0.75))[0], t.TempDir(), "model.safetensors")
	copied := pushByPath(t, f.peer, dir, elsewhere)
	store, err := f.StoreID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := "meander-" + store + "/" + copied.Weights[0].Digest + ".safetensors"; copied.Weights[0].Path != want {
		t.Errorf("copied to %q, want %q", copied.Weights[0].Path, want)
	}
	if a := f.taken(t, copied); a.State != schemas.AppliedApplied {
		t.Fatalf("%+v", a)
	}
	if err := f.HasBlob(t.Context(), schemas.Ref{
		Bucket: schemas.BlobBucket, Digest: copied.Weights[0].Digest, Size: copied.Weights[0].Size,
	}); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("the weights are in the server: %v", err)
	}
	first := f.content(t, "copied", copied)

	file := weightsIn(t, transformer(t, 1, set(t, weight, 0.5))[0], dir, "run-7", "transformer", "model.safetensors")
	own := pushByPath(t, f.peer, dir, filepath.Join(dir, "run-7"))
	if own.Weights[0].Path != "run-7/transformer/model.safetensors" || f.taken(t, own).State != schemas.AppliedApplied {
		t.Fatalf("%+v", own)
	}
	second := f.content(t, "own", own)
	if first == before || second == before || second == first {
		t.Error("other weights give the same image")
	}
	f.verified(t, dir, "base", "copied", "own")
	report, err := verify.Run(t.Context(), f.Bus, "own", verify.Options{Model: []string{signsFolder}})
	failed, ok := errors.AsType[*verify.WeightsError](err)
	if report != nil || !ok || failed.Version != own.PolicyVersion || !strings.Contains(err.Error(), "--weights-dir") {
		t.Errorf("verify without the folder: %+v, %v", report, err)
	}

	// A rollback names the file again; by now it is another, then it is gone.
	back, err := f.peer.RollbackPolicy(t.Context(), copied.PolicyVersion, client.Push{})
	if err != nil || f.taken(t, back).State != schemas.AppliedApplied {
		t.Fatalf("%+v, %v", back, err)
	}
	weightsIn(t, transformer(t, 1, set(t, weight, 0.625))[0], file)
	for _, want := range []string{"has another SHA-256", "no such file"} {
		p, err := f.peer.RollbackPolicy(t.Context(), own.PolicyVersion, client.Push{})
		if err != nil {
			t.Fatal(err)
		}
		if a := f.taken(t, p); a.State != schemas.AppliedRefused || a.Serving != back.PolicyVersion ||
			!strings.Contains(a.Error, want) || !strings.Contains(a.Error, "run-7/transformer/model.safetensors") {
			t.Errorf("the sampler says %+v; want %q in it", a, want)
		}
		report, err := verify.Run(t.Context(), f.Bus, "own",
			verify.Options{Model: []string{signsFolder}, WeightsDir: dir})
		gone := want == "no such file" // as a blob that was removed: no proof, and no sign of other weights
		if err != nil || report.OK(0) || gone != (report.WeightsGone == 1 && report.Unproven != "" &&
			len(report.Mismatches) == 0) ||
			!gone && !strings.Contains(report.Mismatches[0].What, want) {
			t.Errorf("verify: %+v, %v; want %q", report, err, want)
		}
		if err := os.Remove(file); err != nil && want != "no such file" {
			t.Fatal(err)
		}
	}
	if third := f.content(t, "back", back); third != first {
		t.Error("the weights gone back to give another image")
	}
}

// A sampler without the folder refuses weights by path by name, and so does one whose folder an event wants to leave;
// the lane goes on with the weights that it has. What no path can be is no policy at all.
func TestPolicy_ByPathRefused(t *testing.T) {
	sequential(t)
	t.Parallel()
	dir, outside := t.TempDir(), t.TempDir()
	data := transformer(t, 1, set(t, weight, 0.5))[0]
	for _, given := range []string{"", dir} {
		f := newFullPlane(t, func(c *pipeline.Config) { c.Sampler.WeightsDir = given })
		if given == "" {
			p := pushByPath(t, f.peer, dir, weightsIn(t, data, dir, "model.safetensors"))
			if a := f.taken(t, p); a.State != schemas.AppliedRefused ||
				!strings.Contains(a.Error, `weights[0]: "model.safetensors" lies in a shared folder`) || !strings.Contains(a.Error, "--weights-dir") {
				t.Errorf("without a folder: %+v", a)
			}
			f.content(t, "on", f.base)
			// A server that is full of weights says so, and that these need not go there.
			if _, err := f.push(t, data); err != nil {
				t.Fatal(err)
			}
			f.Change(t, schemas.StreamBlobBucket, func(c *jetstream.StreamConfig) {
				c.MaxBytes = int64(f.Info(t, schemas.StreamBlobBucket).State.Bytes) + 1<<20
			})
			_, err := f.push(t, transformer(t, 1, set(t, weight, 0.75))...)
			said, want := fmt.Sprint(err), fmt.Sprintf("weights of 1 versions take %d bytes", len(data))
			known := strings.Contains(said, want) && strings.Contains(said, "--weights-dir")
			if !errors.Is(err, bus.ErrStreamFull) || !known {
				t.Errorf("a full server: %s; want %q in it", said, want)
			}
			continue
		}
		secret := weightsIn(t, data, outside, "secret.safetensors")
		link, away := filepath.Join(dir, "link"), filepath.Join(dir, "away")
		if err := errors.Join(os.Symlink(secret, link), os.Symlink(outside, away)); err != nil {
			t.Skip("no symbolic links here: ", err)
		}
		pushed := pushByPath(t, f.peer, dir, weightsIn(t, data, dir, "model.safetensors"))
		if a := f.taken(t, pushed); a.State != schemas.AppliedApplied {
			t.Fatalf("%+v", a)
		}
		forged := func(path string) *schemas.Policy {
			current, err := f.peer.NewestPolicy(t.Context(), schemas.Lineage{})
			if err != nil {
				t.Fatal(err)
			}
			p := *pushed
			p.PolicyVersion, p.Parent = current.PolicyVersion+1, &current.PolicyVersion
			p.WeightsDigest = "forged " + path
			p.Weights = []schemas.WeightsFile{{
				Path: path, Digest: pushed.Weights[0].Digest, Size: pushed.Weights[0].Size,
			}}
			return &p
		}
		for _, path := range []string{"link", "away/secret.safetensors"} {
			p := forged(path)
			current, err := f.peer.NewestPolicy(t.Context(), schemas.Lineage{})
			if err == nil {
				err = f.SetPolicy(t.Context(), p, current)
			}
			if err != nil {
				t.Fatal(err)
			}
			if a := f.taken(t, p); a.State != schemas.AppliedRefused || !strings.Contains(a.Error, "escapes") {
				t.Errorf("%s: the sampler says %+v", path, a)
			}
		}
		for _, path := range []string{secret, "../" + filepath.Base(outside) + "/secret.safetensors", "a/../../x", `..\x`, "."} {
			p := forged(path)
			if err := p.Validate(); err == nil || !strings.Contains(err.Error(), "weights[0].path: ") {
				t.Errorf("%q: %v", path, err)
			}
			if _, err := f.PublishRaw(t.Context(), p.Subject(), bustest.Encode(t, p), nil, ""); err != nil {
				t.Fatal(err)
			}
		}
		f.content(t, "on", pushed)
		other := weightsIn(t, transformer(t, 1, set(t, weight, 0.75))[0], dir, "other.safetensors")
		if a := f.taken(t, pushByPath(t, f.peer, dir, other)); a.State != schemas.AppliedApplied {
			t.Errorf("a push behind forged ones: %+v", a)
		}
	}
}

// The commands of the guide, on programs: the folder is /shared for who pushes, and another path for the pipeline.
func TestPolicy_ByPathCommands(t *testing.T) {
	sequential(t)
	skipShort(t)
	t.Parallel()
	dir, mount := sharedFolder(t)
	folder := t.TempDir()
	model, err := filepath.Abs(signsFolder)
	if err != nil {
		t.Fatal(err)
	}
	launch(t, folder, program(t, "meander"), "up", "--model", model, "--listen", "127.0.0.1:0", "--weights-dir", mount)
	running(t, folder)
	// the sampler is there
	meander(t, folder, "run", "--run", "r0", "-n", "1", "--steps", "3", "--out", "-", "a red sign").must(t, 0)
	weightsIn(t, transformer(t, 1, set(t, weight, 0.5))[0], dir, "run-7", "transformer", "model.safetensors")
	if out := meander(t, folder, "policy", "push", "--full", "--weights-dir", dir, filepath.Join(dir, "run-7")).must(t,
		0); !strings.Contains(
		out.stdout, "in use by 1 of 1 sampler") {
		t.Errorf("push says %q", out.stdout)
	}
	if out := meander(t, folder, "policy", "show").must(t, 0); !strings.Contains(out.stdout,
		"by path: run-7/transformer/model.safetensors") {
		t.Errorf("show says %q", out.stdout)
	}
	meander(t, folder, "run", "--run", "r1", "-n", "1", "--steps", "3", "--out", "-", "a red sign").must(t, 0)
	meander(t, folder, "verify", "r1", "--model", model, "--weights-dir", dir).must(t, 0)
	if out := meander(t, folder, "verify", "r1", "--model", model).must(t, 1); out.stdout != "" ||
		!strings.Contains(out.stderr, "the weights of version 1 cannot be loaded") ||
		!strings.Contains(out.stderr, "start with --weights-dir") {
		t.Errorf("verify without the folder says %q and %q", out.stdout, out.stderr)
	}
	meander(t, folder, "gc", "--weights-dir", dir).must(t, 0)
	if _, err := os.Stat(filepath.Join(dir, "run-7", "transformer", "model.safetensors")); err != nil {
		t.Errorf("gc removed a file of the user: %v", err)
	}
	out := meander(t, folder, "policy", "push", "--weights-dir", dir, filepath.Join(dir, "run-7")).must(t, 2)
	if !strings.Contains(out.stderr, "--full") {
		t.Errorf("an adapter by path: %q", out.stderr)
	}
}
