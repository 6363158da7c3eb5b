package weightsdir_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/weightsdir"
	"github.com/meander-rl/meander/schemas"
)

const store = "20261126"

// opened opens a folder until the test ends.
func opened(t *testing.T, dir string) *weightsdir.Dir {
	t.Helper()
	d, err := weightsdir.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// written writes a file and returns its path.
func written(t *testing.T, data string, elements ...string) string {
	t.Helper()
	name := filepath.Join(elements...)
	if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(data), 0o600)); err != nil {
		t.Fatal(err)
	}
	return name
}

func digest(data string) string {
	sum := sha256.Sum256([]byte(data))
	return hex.EncodeToString(sum[:])
}

func linked(t *testing.T, to, name string) {
	t.Helper()
	if err := os.Symlink(to, name); err != nil {
		t.Skip("no symbolic links here: ", err)
	}
}

// Files in the folder stay where they are, wherever the folder is mounted; others are copied once, under their digest,
// also those that are only linked from it. All are found again from another mount.
func TestDir_Place(t *testing.T) {
	dir, mount, outside := t.TempDir(), filepath.Join(t.TempDir(), "mount"), t.TempDir()
	linked(t, dir, mount)
	large := strings.Repeat("large", 1<<20)
	own := written(t, "inside", dir, "run-7", "transformer", "model.safetensors")
	other := written(t, large, outside, "model.safetensors")
	linked(t, other, filepath.Join(dir, "link.safetensors"))
	d := opened(t, mount)
	files, err := d.Place(t.Context(), store, weightsdir.Source{Path: own}, weightsdir.Source{Path: other},
		weightsdir.Source{Path: filepath.Join(dir, "link.safetensors")}, weightsdir.Source{Bytes: []byte("in memory")})
	if err != nil {
		t.Fatal(err)
	}
	copied := "meander-" + store + "/" + digest(large) + ".safetensors"
	for i, want := range []schemas.WeightsFile{
		{Path: "run-7/transformer/model.safetensors", Digest: digest("inside"), Size: 6},
		{Path: copied, Digest: digest(large), Size: int64(len(large))},
		{Path: copied, Digest: digest(large), Size: int64(len(large))},
		{Path: "meander-" + store + "/" + digest("in memory") + ".safetensors", Digest: digest("in memory"), Size: 9},
	} {
		if files[i] != want {
			t.Errorf("file %d: %+v, want %+v", i, files[i], want)
		}
		f, err := opened(t, dir).File(t.Context(), files[i])
		if err != nil || digest(string(f.Bytes)) != want.Digest || f.Unchanged() != nil {
			t.Errorf("file %d from the other mount: %v", i, err)
			continue
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "meander-"+store, "*")); err != nil || len(left) != 2 {
		t.Errorf("%q in the folder of the copies, %v; want two", left, err)
	}

	// A copy that is not whole any more is made again.
	written(t, strings.Repeat("wrong", 1<<20), dir, copied)
	if _, err := d.Place(t.Context(), store, weightsdir.Source{Path: other}); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, copied)); err != nil || string(data) != large {
		t.Errorf("the copy was not mended: %v", err)
	}
	ended, stop := context.WithCancel(t.Context())
	stop()
	if _, err := d.Place(ended, store, weightsdir.Source{Path: other}); !errors.Is(err, context.Canceled) {
		t.Errorf("a push that ends: %v", err)
	}
}

// What is not the file that was pushed is refused with what is wrong, and nothing outside the folder is opened.
func TestDir_File(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	secret := written(t, "secret", outside, "secret")
	written(t, "weights", dir, "a", "b.safetensors")
	linked(t, secret, filepath.Join(dir, "link"))
	linked(t, outside, filepath.Join(dir, "away"))
	d := opened(t, dir)
	right := schemas.WeightsFile{Path: "a/b.safetensors", Digest: digest("weights"), Size: 7}
	of := func(path string) schemas.WeightsFile {
		return schemas.WeightsFile{Path: path, Digest: digest("secret"), Size: 6}
	}
	short, other := right, right
	short.Size, other.Digest = 8, digest("Weights")
	for name, c := range map[string]struct {
		file schemas.WeightsFile
		want string
	}{
		"size":       {short, "7 bytes; must be 8"},
		"digest":     {other, "another SHA-256"},
		"missing":    {of("a/none"), "no such file"},
		"folder":     {of("a"), "not a regular file"},
		"dots":       {of("../" + filepath.Base(outside) + "/secret"), "escapes"},
		"absolute":   {of(secret), "escapes"},
		"link":       {of("link"), "escapes"},
		"linked dir": {of("away/secret"), "escapes"},
	} {
		f, err := d.File(t.Context(), c.file)
		if f != nil || !errors.Is(err, weightsdir.ErrUnfit) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q in it", name, err, c.want)
		}
	}

	f, err := d.File(t.Context(), right)
	if err != nil || !bytes.Equal(f.Bytes, []byte("weights")) {
		t.Fatal(err)
	}
	written(t, "changed", dir, "a", "b.safetensors")
	later := time.Now().Add(time.Second) // two writes may have one time
	if err := os.Chtimes(filepath.Join(dir, "a", "b.safetensors"), later, later); err != nil {
		t.Fatal(err)
	}
	if err := f.Unchanged(); !errors.Is(err, weightsdir.ErrUnfit) {
		t.Errorf("written to while it is open: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if _, err := weightsdir.Open(filepath.Join(dir, "none")); err == nil {
		t.Error("a folder that is not there was opened")
	}
}

// Only copies of pushes to the store go, when nothing needs them and they are old; nothing of users.
func TestDir_Sweep(t *testing.T) {
	dir := t.TempDir()
	folder := filepath.Join(dir, "meander-"+store)
	name := func(data string) string { return digest(data) + ".safetensors" }
	old, now := time.Now().Add(-time.Hour), time.Now()
	for _, f := range []struct {
		path string
		at   time.Time
	}{
		{filepath.Join(folder, name("unneeded")), old},
		{filepath.Join(folder, name("needed")), old},
		{filepath.Join(folder, name("fresh")), now},
		{filepath.Join(folder, ".part-of-a-killed-push"), old},
		{filepath.Join(folder, ".part-of-a-push"), now},
		{filepath.Join(folder, "notes.safetensors"), old},
		{filepath.Join(dir, name("unneeded")), old},
		{filepath.Join(dir, "meander-other", name("unneeded")), old},
	} {
		written(t, "12345", f.path)
		if err := os.Chtimes(f.path, f.at, f.at); err != nil {
			t.Fatal(err)
		}
	}
	d := opened(t, dir)
	needed := func(of string) bool { return of == digest("needed") }
	count := func() (n int) {
		if err := filepath.WalkDir(dir, func(_ string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				n++
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, dry := range []bool{true, false} {
		n, size, err := d.Sweep(store, now.Add(-time.Minute), needed, dry)
		if err != nil || n != 2 || size != 10 {
			t.Errorf("dry %v: %d files of %d bytes, %v; want 2 of 10", dry, n, size, err)
		}
		if dry && count() != 8 {
			t.Error("a dry sweep removed something")
		}
	}
	for _, gone := range []string{name("unneeded"), ".part-of-a-killed-push"} {
		if _, err := os.Stat(filepath.Join(folder, gone)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s stays: %v", gone, err)
		}
	}
	if n := count(); n != 6 {
		t.Errorf("%d files are left, want 6", n)
	}
	if n, _, err := d.Sweep("none", now, needed, false); n != 0 || err != nil {
		t.Errorf("a store without copies: %d, %v", n, err)
	}
}

// What is read of a file is what its digest is of, whatever is written to it meanwhile, at whatever time: tensors,
// headers and copies are checked.
func TestFile_RewrittenInPlace(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "a.safetensors")
	var tensors []safetensors.Tensor
	for _, tensor := range []string{"first", "large", "last"} {
		x := make([]float32, 40_000)
		made, err := safetensors.FloatTensor(tensor, "F32", []int{len(x)}, x)
		if err != nil {
			t.Fatal(err)
		}
		tensors = append(tensors, made)
	}
	var good bytes.Buffer
	if err := safetensors.Write(&good, tensors, nil); err != nil {
		t.Fatal(err)
	}
	w := schemas.WeightsFile{Path: "a.safetensors", Digest: digest(good.String()), Size: int64(good.Len())}
	past := time.Now().Add(-time.Hour)
	for at, fails := range map[int]string{-1: "", 20: "header", good.Len() / 2: "large", good.Len() - 1: "last"} {
		written(t, good.String(), name)
		if err := os.Chtimes(name, past, past); err != nil {
			t.Fatal(err)
		}
		f, err := opened(t, dir).File(t.Context(), w)
		if err != nil {
			t.Fatal(err)
		}
		if at >= 0 {
			changed := bytes.Clone(good.Bytes())
			changed[at] ^= 1
			written(t, string(changed), name)
			if err := os.Chtimes(name, past, past); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.Unchanged(); err != nil {
			t.Errorf("byte %d: %v; the test is of a change that times do not show", at, err)
		}
		archive, err := safetensors.ParseAll(f.Contents)
		if (fails == "header") != errors.Is(err, safetensors.ErrChanged) {
			t.Errorf("byte %d: %v", at, err)
		}
		if err == nil {
			for _, tensor := range archive.Names() {
				_, err := archive.Floats(tensor)
				if (tensor == fails) != errors.Is(err, safetensors.ErrChanged) {
					t.Errorf("byte %d: %s: %v", at, tensor, err)
				}
			}
			err = archive.CopyTo(io.Discard, 0)
			if (fails != "") != errors.Is(err, safetensors.ErrChanged) {
				t.Errorf("byte %d: copied: %v", at, err)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}
