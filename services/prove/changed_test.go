package prove_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/services/prove"
)

// tarred is a file of an archive: where its header begins, its data, its padding, and the next header.
type tarred struct {
	name                    string
	header, begin, pad, end int
}

func filesOf(t *testing.T, archive []byte) (list []tarred) {
	t.Helper()
	in := bytes.NewReader(archive)
	r, at := tar.NewReader(in), 0
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		begin := len(archive) - in.Len()
		x := tarred{h.Name, at, begin, begin + int(h.Size), begin + int(h.Size+511)/512*512}
		list, at = append(list, x), x.end
	}
}

// Bytes at 200 drawn places over all files, in data, headers and padding, are found: prove says which file it is, or
// between which two. An import refuses other data. Headers and padding carry no fact for it: a file has another name or
// length then, or it is the same.
func TestRun_ChangedFiles(t *testing.T) {
	for _, name := range []string{proof + "signs.tar", staged} {
		archive, random := read(t, name), rand.New(rand.NewPCG(7, 200))
		files := filesOf(t, archive)
		plane := bustest.New(t)
		for range 100 {
			i := random.IntN(len(files))
			f, before, after := files[i], files[max(i-1, 0)], files[min(i+1, len(files)-1)]
			at := []int{
				f.header + random.IntN(f.begin-f.header), f.begin + random.IntN(f.end-f.begin),
				f.begin + random.IntN(f.end-f.begin), f.end - 1 - random.IntN(8),
			}[random.IntN(4)]
			changed := slices.Clone(archive)
			changed[at] ^= 1 << random.IntN(8)
			r, err := prove.Run(t.Context(), nil, "", bytes.NewReader(changed), options())
			if err != nil || r.Proved || len(r.Links) != 1 || r.Links[0].Verdict != prove.Broken {
				t.Fatalf("%s, byte %d, of %s: %+v, %v", name, at, f.name, r.Links, err)
			}
			what := r.Links[0].What
			named := func(f tarred) bool { return strings.Contains(what, path.Base(f.name)) }
			data := at >= f.begin && at < f.pad
			if !named(f) && (data || !named(before) && !named(after)) && f.name != "SHA256SUMS" {
				t.Errorf("%s, byte %d (%d after the header of %s): %s", name, at, at-f.header, f.name, what)
			}
			if _, err := export.Import(t.Context(), plane.Bus, bytes.NewReader(changed),
				export.ImportOptions{Policies: true}); err == nil && data {
				t.Errorf("%s, byte %d (%d after the header of %s) is imported", name, at, at-f.header, f.name)
			}
		}
	}
}
