package schemas_test

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// What is encoded with the digests of its tensors has the payload digest of its bytes, wherever
// they are appended to and however its tensors travel.
func TestAppendStep(t *testing.T) {
	steps := 0
	for _, s := range samples(t) {
		e, ok := s.event.(*schemas.Step)
		if !ok {
			continue
		}
		steps++
		t.Run(s.name, func(t *testing.T) {
			sums, err := schemas.SumTensors(e)
			if s.name == "step-parts-and-refs" {
				if err == nil {
					t.Error("a tensor in the object store has no digest by BLAKE3")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			before := []byte("before")
			data, digest, err := schemas.AppendStep(before, e, sums)
			if err != nil || !bytes.Equal(data, slices.Concat(before, encoded(t, e))) {
				t.Fatalf("%v: other bytes than Encode's", err)
			}
			if want, err := schemas.PayloadDigest(data[len(before):]); err != nil || digest != want {
				t.Errorf("digest %s, of its bytes %s, %v", digest, want, err)
			}
		})
	}
	if steps < 5 {
		t.Fatalf("%d steps among the samples", steps)
	}
}

// No byte changes unseen, in a tensor or out of it.
func TestPayloadDigest(t *testing.T) {
	e := sdeStep()
	data := encoded(t, e)
	digest, err := schemas.PayloadDigest(data)
	if err != nil {
		t.Fatal(err)
	}
	folded := bytes.Clone(data)
	for _, x := range e.Tensors() {
		sum := schemas.BLAKE3.Sum(x.Data)
		folded = bytes.Replace(folded, x.Data, sum[:], 1)
	}
	if want := schemas.BLAKE3.Text(schemas.BLAKE3.Sum(folded)); digest != want {
		t.Errorf("digest %s, by hand %s", digest, want)
	}
	for i := range data {
		for _, flip := range []byte{1, 0x80} {
			data[i] ^= flip
			if got, err := schemas.PayloadDigest(data); got == digest || err != nil &&
				!errors.Is(err, schemas.ErrMalformed) {
				t.Errorf("byte %d: %s, %v", i, got, err)
			}
			data[i] ^= flip
		}
	}
	for _, data := range [][]byte{nil, data[:len(data)-1], append(data, 0xc0)} {
		if _, err := schemas.PayloadDigest(data); !errors.Is(err, schemas.ErrMalformed) {
			t.Errorf("%d bytes: %v", len(data), err)
		}
	}
}
