package export_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// The time of a file, or what is between files, is held to the archive's digest of itself; one without is not sealed.
func TestCheckSeal(t *testing.T) {
	data := exported(t)
	if err := export.CheckSeal(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	bare := pack(t, unpack(t, data)[:2], true)
	if err := export.CheckSeal(bytes.NewReader(bare)); !errors.Is(err, export.ErrUnsealed) {
		t.Fatalf("without a digest of itself: %v", err)
	}
	rewritten := func(change func(i int, h *tar.Header)) []byte {
		var out bytes.Buffer
		w, r := tar.NewWriter(&out), tar.NewReader(bytes.NewReader(data))
		for i := 0; ; i++ {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			h = &tar.Header{Name: h.Name, Mode: 0o644, Size: h.Size, ModTime: h.ModTime, Format: tar.FormatPAX}
			change(i, h)
			if err := errors.Join(err, w.WriteHeader(h)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(w, r); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	if same := rewritten(func(int, *tar.Header) {}); !bytes.Equal(same, data) {
		t.Fatal("an archive that is written again without a change has other bytes")
	}
	files := len(unpack(t, data))
	for name, changed := range map[string][]byte{
		"a time": rewritten(func(i int, h *tar.Header) {
			if i == 1 {
				h.ModTime = h.ModTime.Add(time.Nanosecond)
			}
		}),
		"the time of the list": rewritten(func(i int, h *tar.Header) {
			if i == files-1 {
				h.ModTime = h.ModTime.Add(time.Second)
			}
		}),
		"a mode": rewritten(func(i int, h *tar.Header) {
			if i == 0 {
				h.Mode = 0o600
			}
		}),
	} {
		if _, err := export.CheckArchive(bytes.NewReader(changed), nil); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := export.CheckSeal(bytes.NewReader(changed)); err == nil || errors.Is(err, export.ErrUnsealed) {
			t.Errorf("%s: %v; must be found", name, err)
		}
	}
}

// A run that a trainer told of has the versions of the weights that it names, and no others; Import stores them only
// where that is asked for. Steps that were freed once all had read them do not make an archive unreadable.
func TestWriteArchive_Trained(t *testing.T) {
	p := bustest.New(t)
	var before *schemas.Policy
	for version, digest := range []string{"base", "one", "two"} {
		next := &schemas.Policy{
			Tenant: schemas.TenantMain, Lane: "tiny", Model: "tiny", Family: "synthetic", LatentChannels: 4,
			PixelsPerToken: 8, Height: 16, Width: 16, NumInferenceSteps: 4, TrueCFGScale: 1, MaxPixels: 1 << 20,
			PolicyVersion: int64(version), WeightsDigest: digest,
		}
		if err := p.SetPolicy(t.Context(), next, before); err != nil {
			t.Fatal(err)
		}
		before = next
	}
	step := stepOf("r1", "u1", 0, 0, make([]byte, 32))
	seq := publish(t, p.Bus, step)
	sample := completed("r1", "u1", 0, refTo(t, step, seq))
	sample.Group.FreeReadSteps = true
	publish(t, p.Bus, sample)
	if err := p.Delete(t.Context(), schemas.StreamSteps, seq); err != nil {
		t.Fatal(err)
	}
	write := func() (data []byte, policies int) {
		var out bytes.Buffer
		if _, err := export.WriteArchive(t.Context(), p.Bus, "r1", &out); err != nil {
			t.Fatal(err)
		}
		s, err := export.CheckArchive(bytes.NewReader(out.Bytes()), nil)
		if err != nil || s.FreedSteps != 1 {
			t.Fatalf("%+v, %v", s, err)
		}
		return out.Bytes(), s.Events[schemas.StreamPolicies]
	}
	if _, n := write(); n != 0 {
		t.Fatalf("%d policies of a run that nobody trained on", n)
	}
	publish(t, p.Bus, &schemas.Update{
		Run: "r1", Lane: "tiny", Tenant: schemas.TenantMain, Trainer: "main", Step: 1, Batches: []string{},
		WeightsBefore: "base", WeightsDigest: "one",
	})
	data, n := write()
	if n != 2 {
		t.Fatalf("%d policies, want those before and after the update", n)
	}
	for _, with := range []bool{false, true} {
		other := bustest.New(t)
		_, err := export.Import(t.Context(), other.Bus, bytes.NewReader(data), export.ImportOptions{Policies: with})
		if err != nil {
			t.Fatal(err)
		}
		history, err := other.PolicyHistory(t.Context(), schemas.Lane("tiny").Of(""))
		if err != nil || len(history) != map[bool]int{true: 2}[with] {
			t.Fatalf("policies %t: %d, %v", with, len(history), err)
		}
	}
}
