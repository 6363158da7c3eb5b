package janitor_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/weightsdir"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/janitor"
)

// Files that pushes by path have copied go like the blobs of versions, once no stored sample needs them; those of users
// stay.
func TestPass_WeightsByPath(t *testing.T) {
	p := bustest.New(t)
	folder := t.TempDir()
	dir, err := weightsdir.Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	store, err := p.StoreID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-time.Hour)
	var last *schemas.Policy
	var paths []string
	for v := range int64(12) {
		source := weightsdir.Source{Bytes: fmt.Appendf(nil, "transformer %d", v)}
		if v == 3 {
			source.Path = filepath.Join(folder, "mine.safetensors")
			if err := os.WriteFile(source.Path, source.Bytes, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		files, err := dir.Place(t.Context(), store, source)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(folder, files[0].Path)
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
		next := bare(v)
		next.Weights = files
		if err := p.SetPolicy(t.Context(), next, last); err != nil {
			t.Fatal(err)
		}
		last = next
	}
	data, err := schemas.Encode(&schemas.Trajectory{
		Identity:   schemas.Identity{Stage: schemas.StageMain, Run: "r1", UID: "u", Lane: "signs"},
		Provenance: schemas.Provenance{WeightsDigest: digest(1), PolicyVersionMin: 1, PolicyVersionMax: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.PublishRaw(t.Context(), schemas.TrajectorySubject("r1", "u", 0, schemas.StageMain), data, nil,
		""); err != nil {
		t.Fatal(err)
	}
	c := rule()
	c.WeightsDir = folder
	for _, dry := range []bool{true, false} {
		if r, err := janitor.Pass(t.Context(), c, p.Bus, dry); err != nil || r.WeightsFiles != 2 ||
			r.WeightsBytes == 0 {
			t.Errorf("dry %v: %+v, %v; want two files", dry, r, err)
		}
	}
	var left []int
	for v, path := range paths {
		if _, err := os.Stat(path); err == nil {
			left = append(left, v)
		}
	}
	// The sample needs 1, 3 is the user's, and the last eight stay to go back to.
	if want := []int{1, 3, 4, 5, 6, 7, 8, 9, 10, 11}; !slices.Equal(left, want) {
		t.Errorf("versions %v are left, want %v", left, want)
	}
	c.WeightsDir = filepath.Join(folder, "none")
	if _, err := janitor.Pass(t.Context(), c, p.Bus, false); err == nil ||
		!strings.Contains(err.Error(), "shared folder") {
		t.Errorf("a folder that is not there: %v", err)
	}
}
