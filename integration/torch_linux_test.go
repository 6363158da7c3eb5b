package integration_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/schemas"
)

// Where the disk is full, a whole transformer is refused with what to do, nothing of it is left, and samples go on with
// the weights before.
func TestTorch_FullDisk(t *testing.T) {
	disk := t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=4k"); err != nil {
		t.Skipf("NOT TESTED: a full disk; it takes the right to mount one (%v)", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	dir := remotetest.Folder(t, "StableDiffusion3Pipeline", 1)
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	w := start(t, func(c *config) { c.sampler.Model, c.sampler.Engine = dir, "torch="+address })
	full, err := lora.OpenFull(remotetest.Folder(t, "StableDiffusion3Pipeline", 2))
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	filler := filepath.Join(disk, "filler")
	if err := os.WriteFile(filler, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", disk)
	var bare string
	for _, run := range []schemas.Run{"before", "after"} {
		if run == "after" {
			p, err := w.client.PushWeights(t.Context(), full, client.Push{})
			if err != nil {
				t.Fatal(err)
			}
			answers, err := w.client.AwaitPolicy(limited(t), p)
			if err != nil || len(answers) != 1 || answers[0].Answer == nil ||
				answers[0].Answer.State != schemas.AppliedRefused ||
				answers[0].Answer.PolicyVersion != p.PolicyVersion {
				t.Fatalf("%+v, %v; want version %d refused", answers, err, p.PolicyVersion)
			}
			for _, part := range []string{"no space left on device", "free space there, or name another with TMPDIR"} {
				if said := answers[0].Answer.Error; !strings.Contains(said, part) {
					t.Errorf("%s; want %q", said, part)
				}
			}
		}
		prompt := &schemas.Prompt{UID: "u", Prompt: "red", GroupSize: new(int64(2))}
		if r, err := w.client.Publish(t.Context(), run, prompt); err != nil || !r.Accepted {
			t.Fatalf("%s: receipt %+v, %v", run, r, err)
		}
		if a := w.advantages(t, run, 1)["u"]; a == nil || a.Status != schemas.StatusComplete {
			t.Fatalf("%s: advantage %+v", run, a)
		}
		tr, err := w.client.Trajectory(t.Context(), run, "u", 0)
		if err != nil || bare != "" && tr.WeightsDigest != bare {
			t.Fatalf("%s: weights %s, %v; want those before, %s", run, tr.WeightsDigest, err, bare)
		}
		bare = tr.WeightsDigest
	}
	if left, err := os.ReadDir(disk); err != nil || len(left) != 1 {
		t.Errorf("%v, %v; want nothing but the filler", left, err)
	}
}
