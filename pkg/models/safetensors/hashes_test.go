package safetensors_test

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Digests that share are those of digests that do not. What the system says is the same file is read once, by
// the digest that comes first; what has changed, or comes after other contents, is read again.
func TestDigest_Share(t *testing.T) {
	name := filepath.Join(t.TempDir(), "model.safetensors")
	write := func(x float32, changed time.Time) {
		t.Helper()
		var b bytes.Buffer
		data := tensor.F32.AppendFloats(nil, []float32{x})
		one := safetensors.Tensor{Name: "x", DType: tensor.F32, Shape: []int{1}, Data: data}
		if err := safetensors.Write(&b, []safetensors.Tensor{one}, nil); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, b.Bytes(), 0o600); err != nil { // it stays the same file
			t.Fatal(err)
		}
		if err := os.Chtimes(name, changed, changed); err != nil {
			t.Fatal(err)
		}
	}
	digest := func(h *safetensors.Hashes, config, part string) string {
		a, err := safetensors.Open(name)
		if err != nil {
			t.Error(err)
			return ""
		}
		defer a.Close()
		d, read := safetensors.NewDigest(), 0
		d.Share(h)
		d.File("config.json", []byte(config))
		d.Archive(part, a, func(n int) { read += n })
		if want := len(a.Files()[0].Bytes); read != want {
			t.Errorf("the progress counts %d bytes of %d", read, want)
		}
		return d.Hex()
	}
	now := time.Now().Truncate(time.Second)
	write(1, now)
	want, shared := digest(nil, "a", "."), &safetensors.Hashes{}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if got := digest(shared, "a", "."); got != want {
				t.Errorf("a digest that shares is %s, want %s", got, want)
			}
		})
	}
	all.Wait()

	write(2, now) // no one sees that: the file is not read
	if got := digest(shared, "a", "."); got != want {
		t.Error("a file that was added already is read again")
	}
	if digest(shared, "b", ".") != digest(nil, "b", ".") || digest(shared, "a", "vae") != digest(nil, "a", "vae") {
		t.Error("a digest has contents that came before others")
	}
	write(2, now.Add(time.Second))
	if got := digest(shared, "a", "."); got == want || got != digest(nil, "a", ".") {
		t.Error("a file that has changed is not read again")
	}
}
