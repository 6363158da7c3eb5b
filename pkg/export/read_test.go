package export_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// file is one of an export.
type file struct {
	name string
	data []byte
}

// pack makes an archive of files; without sums it ends too soon.
func pack(t *testing.T, files []file, sums bool) []byte {
	t.Helper()
	if sums {
		list := ""
		for _, f := range files {
			list += fmt.Sprintf("%x  %s\n", sha256.Sum256(f.data), f.name)
		}
		files = append(slices.Clone(files), file{"SHA256SUMS", []byte(list)})
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range files {
		err := w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.data))})
		if err == nil {
			_, err = w.Write(f.data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func unpack(t *testing.T, data []byte) (files []file) {
	t.Helper()
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file{h.Name, text})
	}
}

func read(data []byte) (n int, err error) {
	for _, err := range export.ReadArchive(bytes.NewReader(data)) {
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// sample is a step in two parts and the trajectory that names it. The parts come in any order, before the step or
// after.
func sample(t *testing.T) (step file, parts []file, trajectory file) {
	t.Helper()
	e := stepOf("r", "u", 0, 0, make([]byte, 8000))
	subject := e.Subject()
	tensors, err := schemas.SumTensors(e)
	if err != nil {
		t.Fatal(err)
	}
	for k, data := range bus.SplitParts(e, tensors, 5000) {
		name := fmt.Sprintf("MDR_STEPS/%010d-%s.msgpack", k+2, schemas.PartSubject(subject, int64(k)))
		parts = append(parts, file{name, slices.Clone(data)})
	}
	data := bustest.Encode(t, e)
	digest, err := schemas.PayloadDigest(data)
	if err != nil {
		t.Fatal(err)
	}
	made := completed("r", "u", 0, schemas.StepRef{Seq: 1, Digest: digest})
	return file{"MDR_STEPS/0000000001-" + subject + ".msgpack", data}, parts,
		file{"MDR_TRAJECTORIES/0000000001-" + made.Subject() + ".msgpack", bustest.Encode(t, made)}
}

func TestRead(t *testing.T) {
	t.Parallel()
	blob := file{fmt.Sprintf("blobs/%x", sha256.Sum256([]byte("x"))), []byte("x")}
	step, parts, trajectory := sample(t)
	for _, files := range [][]file{
		{step, parts[0], parts[1], trajectory, blob}, {parts[1], parts[0], step, trajectory, blob}, {parts[0], step, parts[1], blob, trajectory},
	} {
		if n, err := read(pack(t, files, true)); n != 5 || err != nil {
			t.Errorf("read %d files, %v; want 5", n, err)
		}
	}
}

// What is not as it was written is an error that names it.
func TestRead_changed(t *testing.T) {
	t.Parallel()
	step, parts, trajectory := sample(t)
	whole := []file{step, parts[0], parts[1], trajectory}
	sums := unpack(t, pack(t, whole, true))[4]
	otherPart := file{parts[1].name, []byte("0000")}
	for name, c := range map[string]struct {
		files []file
		sums  bool
		want  string
	}{
		"cut off":             {whole, false, "ends without SHA256SUMS"},
		"twice":               {[]file{step, step}, true, "is in it twice"},
		"behind the sums":     {[]file{step, parts[0], parts[1], trajectory, sums, {"blobs/x", nil}}, false, "blobs/x"},
		"taken out":           {[]file{step, parts[0], parts[1], sums}, false, "missing from the archive"},
		"added":               {append(slices.Clone(whole), file{fmt.Sprintf("blobs/%x", sha256.Sum256(nil)), nil}, sums), false, "not listed in"},
		"other bytes":         {[]file{{"MDR_PROMPTS/0000000001-mdr.v1.prompt.r.msgpack", []byte("a")}, {"SHA256SUMS", []byte(strings.Repeat("0", 64) + "  MDR_PROMPTS/0000000001-mdr.v1.prompt.r.msgpack\n")}}, false, "digest mismatch"},
		"blob of other bytes": {[]file{{"blobs/" + strings.Repeat("0", 64), []byte("x")}}, true, "digest mismatch"},
		"no event":            {[]file{{"MDR_STEPS/x.msgpack", nil}}, true, "must be STREAM/NUMBER-SUBJECT"},
		"no subject":          {[]file{{"MDR_STEPS/0000000001-other.subject.msgpack", nil}}, true, "not a valid subject"},
		"no step":             {[]file{trajectory}, true, "is not in the export"},
		"lacks parts":         {[]file{step, parts[0], trajectory}, true, "lacks parts"},
		"another part":        {[]file{step, parts[0], otherPart}, true, "digest mismatch"},
		"broken step":         {[]file{{step.name, []byte("x")}}, true, step.name},
	} {
		_, err := read(pack(t, c.files, c.sums))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
	if _, err := read(pack(t, whole, true)[:2000]); err == nil || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("half a file: %v", err)
	}
}

// Blobs come in the order of their digests, each once; those that are gone are counted.
func TestWrite_Blobs(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	for i := range int64(13) {
		ref := *imageOf(nil)[0].Ref
		if i < 12 {
			var err error
			if ref, err = p.PutBlob(t.Context(), fmt.Appendf(nil, "image %d", i/2)); err != nil {
				t.Fatal(err)
			}
		}
		step := stepOf("r", "u", i, 0, make([]byte, 32))
		publish(t, p.Bus, withImage(completed("r", "u", i, refTo(t, step, publish(t, p.Bus, step))), &ref))
	}
	var out bytes.Buffer
	s, err := export.WriteArchive(t.Context(), p.Bus, "r", &out)
	if err != nil || s.Blobs != 6 || s.Missing != 1 || s.Events[schemas.StreamTrajectories] != 13 {
		t.Fatalf("%+v, %v", s, err)
	}
	var blobs []string
	for e, err := range export.ReadArchive(bytes.NewReader(out.Bytes())) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Blob != "" {
			blobs = append(blobs, e.Blob)
		} else if e.Stream == schemas.StreamTrajectories && len(e.Refs()) != 1 {
			t.Errorf("%s names %v", e.Subject, e.Refs())
		}
	}
	if !slices.IsSorted(blobs) {
		t.Errorf("blobs are in the order %v", blobs)
	}
}
