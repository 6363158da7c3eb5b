package safetensors_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// file assembles a file from its parts, without the writer's checks.
func file(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, data)...)
}

func writeFile(t *testing.T, name string, b []byte) {
	t.Helper()
	if err := os.WriteFile(name, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

func floats(t *testing.T, name string, shape []int, x ...float32) safetensors.Tensor {
	t.Helper()
	f, err := safetensors.FloatTensor(name, tensor.F32, shape, x)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func archiveBytes(t *testing.T, meta map[string]string, ts ...safetensors.Tensor) []byte {
	t.Helper()
	var buf bytes.Buffer
	if err := safetensors.Write(&buf, ts, meta); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestOpen_ReadsWhatWasWritten(t *testing.T) {
	name := filepath.Join(t.TempDir(), "m.safetensors")
	meta := map[string]string{"format": "pt", "note": "a <b> & \"c\" ü"}
	bf, err := safetensors.FloatTensor("half", tensor.BF16, []int{3}, []float32{1, -2.5, 3})
	if err != nil {
		t.Fatal(err)
	}
	empty := floats(t, "empty", []int{0, 4})
	ts := []safetensors.Tensor{floats(t, "b.weight", []int{2, 2}, 1, 2, 3, 4), bf, floats(t, "scalar", nil, 7), empty}
	if err := safetensors.WriteFile(name, ts, meta); err != nil {
		t.Fatal(err)
	}
	a, err := safetensors.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if got, want := a.Names(), []string{"b.weight", "empty", "half", "scalar"}; !slices.Equal(got, want) {
		t.Errorf("names %v, want %v", got, want)
	}
	if !maps.Equal(a.Metadata(), meta) {
		t.Errorf("metadata %v, want %v", a.Metadata(), meta)
	}
	for n, x := range map[string][]float32{"b.weight": {1, 2, 3, 4}, "half": {1, -2.5, 3}, "scalar": {7}, "empty": {}} {
		if got, err := a.Floats(n); err != nil || !slices.Equal(got, x) {
			t.Errorf("%s: %v, %v, want %v", n, got, err, x)
		}
	}
	info, ok := a.Info("b.weight")
	if !ok || info.DType != tensor.F32 || !slices.Equal(info.Shape, []int{2, 2}) || info.Elements() != 4 ||
		info.Bytes() != 16 || info.File != "m.safetensors" {
		t.Errorf("info %+v, %v", info, ok)
	}
	if fs := a.Files(); len(fs) != 1 || fs[0].Name != "m.safetensors" ||
		!bytes.Equal(fs[0].Bytes, archiveBytes(t, meta, ts...)) {
		t.Errorf("files %d", len(fs))
	}
	if entries, _ := os.ReadDir(filepath.Dir(name)); len(entries) != 1 {
		t.Errorf("temporary files left: %v", entries)
	}
}

func TestArchive_MissingAndMisshaped(t *testing.T) {
	a, err := safetensors.Parse("x", archiveBytes(t, nil, floats(t, "w", []int{2}, 1, 2)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Floats("v"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), `"v"`) {
		t.Errorf("missing tensor: %v", err)
	}
	if _, err := a.Bytes("v"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing tensor: %v", err)
	}
	if err := a.ReadFloats(make([]float32, 3), "w"); err == nil || !strings.Contains(err.Error(), `tensor "w": 2 elements`) {
		t.Errorf("misshaped: %v", err)
	}
}

// A file that is not there is named once, and without the call of the system that failed.
func TestOpen_Missing(t *testing.T) {
	name := filepath.Join(t.TempDir(), "nofile.safetensors")
	want := fmt.Sprintf("open %q: no such file or directory", name)
	if _, err := safetensors.Open(name); !errors.Is(err, fs.ErrNotExist) || err.Error() != want {
		t.Errorf("%v; want %s", err, want)
	}
}

func TestParse_RefusesBadHeaders(t *testing.T) {
	const w = `"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}`
	long := binary.LittleEndian.AppendUint64(nil, safetensors.MaxHeader+1)
	huge := binary.LittleEndian.AppendUint64(nil, math.MaxUint64)
	cases := []struct {
		name string
		b    []byte
		want string
	}{
		{"empty file", nil, "no header length"},
		{"seven bytes", make([]byte, 7), "no header length"},
		{"pointer", []byte("version https://git-lfs.github.com/spec/v1\noid sha256:0"), "git lfs pull"},
		{"header too long", long, "at most 100000000"},
		{"header length negative as int", huge, "at most 100000000"},
		{"header truncated", file("{"+w+"}", 0)[:20], "truncated"},
		{"no JSON", file("[]", 0), "does not start with '{'"},
		{"leading space", file(" {}", 0), "does not start with '{'"},
		{"no header", file("", 0), "does not start with '{'"},
		{"not UTF-8", file("{\"\xff\":1}", 0), "not UTF-8"},
		{"unfinished", file("{"+w, 8), "header: "},
		{"text after", file("{"+w+"} x", 8), "after the JSON object"},
		{"repeated tensor", file("{"+w+","+w+"}", 8), `"w" appears twice`},
		{"repeated through an escape", file("{"+w+","+strings.Replace(w, `"w"`, `"\u0077"`, 1)+"}", 8), `"w" appears twice`},
		{"repeated field", file(`{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 8), `"dtype" appears twice`},
		{"unknown field", file(`{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}}`, 8), `tensor "w": unknown field "x"`},
		{"missing field", file(`{"w":{"dtype":"F32","shape":[2]}}`, 0), "needs dtype, shape and data_offsets"},
		{"unknown dtype", file(`{"w":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}}`, 8), `unknown dtype "F31"`},
		{"dtype is a number", file(`{"w":{"dtype":4,"shape":[2],"data_offsets":[0,8]}}`, 8), "must be a string"},
		{"negative shape", file(`{"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}`, 8), "-2 is not a size"},
		{"fraction", file(`{"w":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}`, 8), "is not a size"},
		{"shape as text", file(`{"w":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}}`, 8), "is not a size"},
		{"shape overflows", file(`{"w":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}}`, 8), "overflows"},
		{"shape beyond an int", file(`{"w":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,8]}}`, 8), "is not a size"},
		{"many dimensions", file(`{"w":{"dtype":"F32","shape":[`+strings.Repeat("1,", 99)+`1],"data_offsets":[0,4]}}`, 4), "more than 32"},
		{"one offset", file(`{"w":{"dtype":"F32","shape":[2],"data_offsets":[8]}}`, 8), "must be a begin and an end"},
		{"three offsets", file(`{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}}`, 8), "more than 2"},
		{"offsets backwards", file(`{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}`, 8), "must be a begin and an end"},
		{"shape and size differ", file(`{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}`, 8), "is 12 bytes, its data 8"},
		{"data truncated", file("{"+w+"}", 7), `tensor "w" ends at byte 8 of 7: truncated`},
		{"data left over", file("{"+w+"}", 9), "1 bytes of data belong to no tensor"},
		{"gap", file(`{"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2), "gap"},
		{"overlap", file(`{"v":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"w":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3), "overlaps"},
		{"metadata is no object", file(`{"__metadata__":3}`, 0), "__metadata__"},
		{"metadata value is no text", file(`{"__metadata__":{"a":1}}`, 0), "must be a string"},
		{"tensor is no object", file(`{"w":3}`, 0), `tensor "w"`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a, err := safetensors.Parse("bad.safetensors", c.b)
			if err == nil {
				t.Fatalf("accepted: %v", a.Names())
			}
			if !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "bad.safetensors") {
				t.Errorf("error %q, want it to name the file and say %q", err, c.want)
			}
		})
	}
}

func TestParse_AcceptsOddButValid(t *testing.T) {
	for name, b := range map[string][]byte{
		"nothing":         file("{}", 0),
		"trailing spaces": file(`{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   `, 1),
		"empty tensors":   file(`{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"c":{"dtype":"F32","shape":[5,0],"data_offsets":[1,1]}}`, 1),
		"huge but empty":  file(`{"a":{"dtype":"F32","shape":[9223372036854775807,9223372036854775807,0],"data_offsets":[0,0]}}`, 0),
		"unaligned":       file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[],"data_offsets":[1,9]}}`, 9),
	} {
		a, err := safetensors.Parse(name, b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, n := range a.Names() {
			if _, err := a.Floats(n); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func TestArchive_FloatsOfEveryDType(t *testing.T) {
	le := binary.LittleEndian
	cases := []struct {
		dtype tensor.DType
		data  []byte
		want  []float32
		err   string
	}{
		{tensor.F64, le.AppendUint64(nil, math.Float64bits(1.5)), []float32{1.5}, ""},
		{tensor.F32, le.AppendUint32(nil, math.Float32bits(-3)), []float32{-3}, ""},
		{tensor.F16, []byte{0x00, 0x3c, 0x01, 0x00}, []float32{1, 0x1p-24}, ""},
		{tensor.BF16, []byte{0x80, 0x3f}, []float32{1}, ""},
		// E4M3: bias 7, largest 448, smallest 2^-9 (Micikevicius et al. 2022, table 1).
		{tensor.F8E4M3, []byte{0x38, 0x7e, 0x01, 0x08, 0xb8, 0x80}, []float32{1, 448, 0x1p-9, 0x1p-6, -1, 0}, ""},
		// E5M2: bias 15, largest 57344, smallest 2^-16 (same table).
		{tensor.F8E5M2, []byte{0x3c, 0x7b, 0x01, 0x04, 0xbc, 0x7c}, []float32{1, 57344, 0x1p-16, 0x1p-14, -1, float32(math.Inf(1))}, ""},
		{tensor.I8, []byte{0x80, 0x7f}, []float32{-128, 127}, ""},
		{tensor.U8, []byte{0, 255}, []float32{0, 255}, ""},
		{tensor.I16, []byte{0xff, 0xff}, []float32{-1}, ""},
		{tensor.U16, []byte{0xff, 0xff}, []float32{65535}, ""},
		{tensor.I32, le.AppendUint32(nil, 1<<24), []float32{1 << 24}, ""},
		{tensor.I32, le.AppendUint32(nil, 1<<24+1), nil, "I32 16777217 is not exact"},
		{tensor.U32, le.AppendUint32(nil, math.MaxUint32), nil, "U32 4294967295 is not exact"},
		{tensor.I64, le.AppendUint64(nil, math.MaxUint64-4), []float32{-5}, ""},
		{tensor.I64, le.AppendUint64(nil, math.MaxInt64), nil, "not exact"},
		{tensor.I64, le.AppendUint64(nil, 1<<63), []float32{-0x1p63}, ""},
		{tensor.U64, le.AppendUint64(nil, 1<<40), []float32{1 << 40}, ""},
		{tensor.U64, le.AppendUint64(nil, math.MaxUint64), nil, "not exact"},
		{tensor.Bool, []byte{0, 1}, []float32{0, 1}, ""},
		{tensor.Bool, []byte{2}, nil, "BOOL 2"},
	}
	for _, c := range cases {
		w := safetensors.Tensor{Name: "w", DType: c.dtype, Shape: []int{len(c.data) / c.dtype.Size()}, Data: c.data}
		a, err := safetensors.Parse("f", archiveBytes(t, nil, w))
		if err != nil {
			t.Fatal(err)
		}
		got, err := a.Floats("w")
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), `tensor "w"`) {
				t.Errorf("%s % x: error %v, want %q", c.dtype, c.data, err, c.err)
			}
		} else if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s % x: %v, %v, want %v", c.dtype, c.data, got, err, c.want)
		}
	}
	for _, v := range []byte{0x7f, 0xff} { // the only NaN of E4M3
		w := safetensors.Tensor{Name: "w", DType: tensor.F8E4M3, Shape: []int{1}, Data: []byte{v}}
		a, _ := safetensors.Parse("f", archiveBytes(t, nil, w))
		if got, err := a.Floats("w"); err != nil || got[0] == got[0] {
			t.Errorf("E4M3 %#x: %v, %v, want NaN", v, got, err)
		}
	}
}

// openDir opens the checkpoint in a folder.
func openDir(dir string) (*safetensors.Archive, error) {
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	return folder.Archive(".")
}

func TestFolder_Archive(t *testing.T) {
	one := archiveBytes(t, map[string]string{"format": "pt"}, floats(t, "a", []int{1}, 1))
	two := archiveBytes(t, nil, floats(t, "b", []int{1}, 2))
	index := func(m string) []byte {
		return []byte(`{"metadata":{"total_size":8,"deep":[{"x":null}]},"weight_map":{` + m + `}}`)
	}
	const good = `"a":"m-1.safetensors","b":"m-2.safetensors"`
	cases := []struct {
		name  string
		files map[string][]byte
		want  string // of the error
	}{
		{"one file", map[string][]byte{"m.safetensors": one, "config.json": nil}, ""},
		{"shards", map[string][]byte{"m.safetensors.index.json": index(good), "m-1.safetensors": one, "m-2.safetensors": two}, ""},
		{"nothing", map[string][]byte{"config.json": nil}, "no .safetensors file"},
		{"two files, no index", map[string][]byte{"m-1.safetensors": one, "m-2.safetensors": two}, "no index"},
		{"two indexes", map[string][]byte{"a.safetensors.index.json": index(good), "b.safetensors.index.json": index(good)}, "several indexes"},
		{"missing shard", map[string][]byte{"m.safetensors.index.json": index(good), "m-1.safetensors": one}, "m-2.safetensors"},
		{"empty shard", map[string][]byte{"m.safetensors.index.json": index(good), "m-1.safetensors": one, "m-2.safetensors": nil}, "no header length"},
		{"truncated shard", map[string][]byte{"m.safetensors.index.json": index(good), "m-1.safetensors": one, "m-2.safetensors": two[:len(two)-1]}, `m-2.safetensors": tensor "b" ends`},
		{"tensor in the wrong shard", map[string][]byte{"m.safetensors.index.json": index(`"a":"m-2.safetensors","b":"m-1.safetensors"`), "m-1.safetensors": one, "m-2.safetensors": two}, `"a" is in "m-1.safetensors", not in "m-2.safetensors"`},
		{"tensor not in the index", map[string][]byte{"m.safetensors.index.json": index(`"b":"m-2.safetensors"`), "m-2.safetensors": archiveBytes(t, nil, floats(t, "b", nil, 1), floats(t, "c", nil, 1))}, `"c" of "m-2.safetensors" is not in the index`},
		{"tensor in no shard", map[string][]byte{"m.safetensors.index.json": index(good + `,"c":"m-1.safetensors"`), "m-1.safetensors": one, "m-2.safetensors": two}, `"c" is missing in "m-1.safetensors"`},
		{"tensor in two shards", map[string][]byte{"m.safetensors.index.json": index(good), "m-1.safetensors": one, "m-2.safetensors": one}, `tensor "a" is in`},
		{"index names a path", map[string][]byte{"m.safetensors.index.json": index(`"a":"../m.safetensors"`)}, "not the name of a shard"},
		{"index names another kind of file", map[string][]byte{"m.safetensors.index.json": index(`"a":"m.bin"`)}, "not the name of a shard"},
		{"index repeats a tensor", map[string][]byte{"m.safetensors.index.json": index(good + `,"a":"m-1.safetensors"`)}, `"a" appears twice`},
		{"index is empty", map[string][]byte{"m.safetensors.index.json": []byte(`{}`)}, "no weight_map"},
		{"index is no JSON", map[string][]byte{"m.safetensors.index.json": []byte(`nope`)}, "index"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for n, b := range c.files {
				writeFile(t, filepath.Join(dir, n), b)
			}
			a, err := openDir(dir)
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), dir) {
					t.Fatalf("error %v, want it to name the folder and say %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			if got, err := a.Floats("a"); err != nil || got[0] != 1 {
				t.Errorf("a: %v, %v", got, err)
			}
		})
	}
}

func TestFolder_ArchiveStaysInside(t *testing.T) {
	outside, dir := t.TempDir(), t.TempDir()
	writeFile(t, filepath.Join(outside, "m.safetensors"), archiveBytes(t, nil, floats(t, "a", nil, 1)))
	if err := os.Symlink(filepath.Join(outside, "m.safetensors"), filepath.Join(dir, "m.safetensors")); err != nil {
		t.Skip("no symbolic links here, so none was followed: ", err)
	}
	if a, err := openDir(dir); err == nil {
		t.Errorf("followed a link out of the folder: %v", a.Names())
	}
	// Below a common root the same link is fine when it is relative.
	root := t.TempDir()
	for _, d := range []string{"blobs", "snapshot"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, filepath.Join(root, "blobs", "x"), archiveBytes(t, nil, floats(t, "a", nil, 1)))
	if err := os.Symlink("../blobs/x", filepath.Join(root, "snapshot", "m.safetensors")); err != nil {
		t.Fatal(err)
	}
	r, err := safetensors.OpenFolder(root)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	a, err := r.Archive("snapshot")
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

// cache lays a repository of a Hugging Face cache out: a blob, and a snapshot whose file
// is a link to target.
func cache(t *testing.T, target string) (snapshot string) {
	t.Helper()
	repository := filepath.Join(t.TempDir(), "models--meander--tiny")
	snapshot = filepath.Join(repository, "snapshots", "4f2a")
	for _, d := range []string{filepath.Join(repository, "blobs"), filepath.Join(snapshot, "vae")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, filepath.Join(repository, "blobs", "0a1b"), archiveBytes(t, nil, floats(t, "a", nil, 1)))
	writeFile(t, filepath.Join(filepath.Dir(repository), "other"), archiveBytes(t, nil, floats(t, "a", nil, 1)))
	if err := os.Symlink(target, filepath.Join(snapshot, "vae", "m.safetensors")); err != nil {
		t.Skip("no symbolic links here, so none was followed: ", err)
	}
	return snapshot
}

func TestOpen_HuggingFaceCache(t *testing.T) {
	snapshot := cache(t, "../../../blobs/0a1b")
	link := filepath.Join(t.TempDir(), "model")
	if err := os.Symlink(snapshot, link); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{snapshot, link} {
		folder, err := safetensors.OpenFolder(dir)
		if err != nil {
			t.Fatal(err)
		}
		open := map[string]func() (*safetensors.Archive, error){
			"folder":        func() (*safetensors.Archive, error) { return folder.Archive("vae") },
			"folder itself": func() (*safetensors.Archive, error) { return openDir(filepath.Join(dir, "vae")) },
			"file": func() (*safetensors.Archive, error) {
				return safetensors.Open(filepath.Join(dir, "vae", "m.safetensors"))
			},
		}
		for name, open := range open {
			a, err := open()
			if err != nil {
				t.Errorf("%s of %s: %v", name, dir, err)
				continue
			}
			if x, err := a.Floats("a"); err != nil || x[0] != 1 {
				t.Errorf("%s of %s: %v, %v", name, dir, x, err)
			}
			if err := a.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := folder.Close(); err != nil {
			t.Error(err)
		}
	}
	outside := filepath.Join(t.TempDir(), "m.safetensors")
	writeFile(t, outside, archiveBytes(t, nil, floats(t, "a", nil, 1)))
	for _, target := range []string{outside, "../../../../other", "../../../blobs/../../other"} {
		a, err := openDir(filepath.Join(cache(t, target), "vae"))
		if err == nil {
			t.Errorf("followed a link out of the repository, %s: %v", target, a.Names())
		} else if !strings.Contains(err.Error(), "a link that leads out of the folder; copy the file itself there") {
			t.Errorf("a link out of the repository, %s: %v", target, err)
		}
	}
}

// A pipe that no one writes to would hold its reader for ever.
func TestOpen_Pipe(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"m.safetensors", "x.safetensors.index.json"} {
		if err := syscall.Mkfifo(filepath.Join(dir, name), 0o600); err != nil {
			t.Skip("no named pipes here, so none was opened: ", err)
		}
		if _, err := openDir(dir); err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	_, err := safetensors.Open(filepath.Join(dir, "m.safetensors"))
	if err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("error %v", err)
	}
}

// A header may be long, but not of many tensors: each costs memory before any is used.
func TestParse_ManyTensors(t *testing.T) {
	const most = safetensors.MaxTensors
	header := func(n int) []byte {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `,"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}`, i)
		}
		return file("{"+b.String()[1:]+"}", 0)
	}
	a, err := safetensors.Parse("m", header(most))
	if err != nil || len(a.Names()) != most {
		t.Fatalf("%d tensors: %v", most, err)
	}
	million := header(1_000_000)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := safetensors.Parse("m", million); err == nil ||
		!strings.Contains(err.Error(), "more than 131072 tensors") {
		t.Fatalf("a million tensors: %v", err)
	}
	runtime.ReadMemStats(&after)
	if mib := (after.TotalAlloc - before.TotalAlloc) >> 20; mib > 128 {
		t.Errorf("a million tensors allocate %d MiB before they are refused", mib)
	}
}

func TestOpen_Directory(t *testing.T) {
	if _, err := safetensors.Open(t.TempDir()); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("error %v", err)
	}
}

func TestWrite_IsDeterministic(t *testing.T) {
	u8 := safetensors.Tensor{Name: "a", DType: tensor.U8, Shape: []int{3}, Data: []byte{1, 2, 3}}
	ts := []safetensors.Tensor{u8, floats(t, "z", []int{1}, 1), floats(t, "m", []int{1}, 2)}
	meta := map[string]string{"b": "1", "a": "2", "c": "3"}
	want := archiveBytes(t, meta, ts...)
	// Largest elements first, then by name; the header fills a multiple of 8 bytes.
	header := `{"__metadata__":{"a":"2","b":"1","c":"3"},"m":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},` +
		`"z":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"a":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}`
	if got := strings.TrimRight(string(want[8:len(want)-11]), " "); got != header || (len(want)-11)%8 != 0 {
		t.Errorf("header of %d bytes:\n%s\nwant\n%s", len(want)-19, got, header)
	}
	for range 20 {
		slices.Reverse(ts)
		if !bytes.Equal(archiveBytes(t, meta, ts...), want) {
			t.Fatal("bytes depend on the order of tensors")
		}
		ts[0], ts[1] = ts[1], ts[0]
	}
}

func TestWrite_Refuses(t *testing.T) {
	ok := safetensors.Tensor{Name: "w", DType: tensor.U8, Shape: []int{1}, Data: []byte{1}}
	with := func(f func(*safetensors.Tensor)) []safetensors.Tensor {
		x := ok
		f(&x)
		return []safetensors.Tensor{x}
	}
	for name, ts := range map[string][]safetensors.Tensor{
		"repeated name":  {ok, ok},
		"reserved name":  with(func(x *safetensors.Tensor) { x.Name = "__metadata__" }),
		"name not UTF-8": with(func(x *safetensors.Tensor) { x.Name = "\xff" }),
		"dtype":          with(func(x *safetensors.Tensor) { x.DType = "F4" }),
		"size":           with(func(x *safetensors.Tensor) { x.Shape = []int{2} }),
		"negative shape": with(func(x *safetensors.Tensor) { x.Shape = []int{-1} }),
		"rank":           with(func(x *safetensors.Tensor) { x.Shape = slices.Repeat([]int{1}, 33) }),
	} {
		if err := safetensors.Write(&bytes.Buffer{}, ts, nil); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := safetensors.Write(&bytes.Buffer{}, nil, map[string]string{"a": "\xff"}); err == nil {
		t.Error("metadata not UTF-8: accepted")
	}
	if _, err := safetensors.FloatTensor("w", tensor.I8, []int{1}, []float32{1}); err == nil {
		t.Error("floats as I8: accepted")
	}
	name := filepath.Join(t.TempDir(), "m.safetensors")
	if err := safetensors.WriteFile(name, []safetensors.Tensor{ok, ok}, nil); err == nil {
		t.Error("WriteFile: accepted")
	}
	if entries, _ := os.ReadDir(filepath.Dir(name)); len(entries) != 0 {
		t.Errorf("files left after an error: %v", entries)
	}
}

func TestWrite_RoundTrips(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dtypes := []tensor.DType{tensor.F64, tensor.F32, tensor.F16, tensor.BF16, tensor.I64, tensor.U8, tensor.Bool}
		names := rapid.SliceOfNDistinct(rapid.String(), 0, 6, rapid.ID[string]).Draw(t, "names")
		var ts []safetensors.Tensor
		for i, n := range names {
			shape := rapid.SliceOfN(rapid.IntRange(0, 4), 0, 4).Draw(t, "shape")
			d := rapid.SampledFrom(dtypes).Draw(t, "dtype")
			size := d.Size()
			for _, s := range shape {
				size *= s
			}
			data := bytes.Repeat([]byte{byte(i + 1)}, size)
			ts = append(ts, safetensors.Tensor{Name: n, DType: d, Shape: shape, Data: data})
		}
		meta := rapid.MapOfN(rapid.String(), rapid.String(), 0, 3).Draw(t, "metadata")
		var buf bytes.Buffer
		if err := safetensors.Write(&buf, ts, meta); err != nil {
			t.Fatal(err)
		}
		a, err := safetensors.Parse("r", buf.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if len(a.Names()) != len(ts) || !maps.Equal(a.Metadata(), meta) {
			t.Fatalf("names %q of %d, metadata %q, want %q", a.Names(), len(ts), a.Metadata(), meta)
		}
		for _, want := range ts {
			info, ok := a.Info(want.Name)
			b, err := a.Bytes(want.Name)
			if !ok || err != nil || info.DType != want.DType || fmt.Sprint(info.Shape) != fmt.Sprint(want.Shape) ||
				!bytes.Equal(b, want.Data) {
				t.Fatalf("%q: %+v, %v, % x, want %+v", want.Name, info, err, b, want)
			}
		}
	})
}

// FuzzParse: no panic, and what is accepted can be read and written again.
func FuzzParse(f *testing.F) {
	f.Add(file("{}", 0))
	f.Add(file(`{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 8))
	f.Add(file(`{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[1,3],"data_offsets":[0,6]},"b":{"dtype":"BOOL","shape":[],"data_offsets":[6,7]}}`, 7))
	f.Add(file(`{"a":{"dtype":"F32","shape":[9223372036854775807,2,0],"data_offsets":[0,0]}}`, 0))
	f.Add(file(`{"a":{"dtype":"F64","shape":[4611686018427387904,4],"data_offsets":[0,0]}}`, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := safetensors.Parse("fuzz", b)
		if err != nil {
			return
		}
		var ts []safetensors.Tensor
		total := 0
		for _, n := range a.Names() {
			info, ok := a.Info(n)
			data, err := a.Bytes(n)
			if !ok || err != nil || len(data) != info.Bytes() || info.Elements()*info.DType.Size() != len(data) {
				t.Fatalf("%q: %+v, %v", n, info, err)
			}
			total += len(data)
			_, _ = a.Floats(n) // may refuse inexact integers, must not panic
			ts = append(ts, safetensors.Tensor{Name: n, DType: info.DType, Shape: info.Shape, Data: data})
		}
		if total > len(b) {
			t.Fatalf("%d bytes of tensors in a file of %d", total, len(b))
		}
		var buf bytes.Buffer
		if err := safetensors.Write(&buf, ts, a.Metadata()); err != nil {
			t.Fatal(err)
		}
		if _, err := safetensors.Parse("again", buf.Bytes()); err != nil {
			t.Fatal(err)
		}
	})
}
