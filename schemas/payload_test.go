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
			h := schemas.BLAKE3
			if s.name == "step-parts-and-refs" {
				h = schemas.SHA256
			}
			sums, err := e.TensorSums(h)
			if err != nil {
				t.Fatal(err)
			}
			before := []byte("before")
			data, digest, err := schemas.AppendStep(before, e, sums)
			if err != nil || !bytes.Equal(data, slices.Concat(before, encoded(t, e))) {
				t.Fatalf("%v: other bytes than Encode's", err)
			}
			if want, err := schemas.PayloadDigest(h, data[len(before):]); err != nil || digest != want {
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
	for _, h := range []schemas.Hash{schemas.SHA256, schemas.BLAKE3} {
		testPayloadDigest(t, h, e, data)
	}
}

func testPayloadDigest(t *testing.T, h schemas.Hash, e *schemas.Step, data []byte) {
	digest, err := schemas.PayloadDigest(h, data)
	if err != nil {
		t.Fatal(err)
	}
	folded := bytes.Clone(data)
	for _, x := range e.Tensors() {
		sum := h.Sum(x.Data)
		folded = bytes.Replace(folded, x.Data, sum[:], 1)
	}
	if want := h.Text(h.Sum(folded)); digest != want {
		t.Errorf("digest %s, by hand %s", digest, want)
	}
	for i := range data {
		for _, flip := range []byte{1, 0x80} {
			data[i] ^= flip
			if got, err := schemas.PayloadDigest(h, data); got == digest || err != nil && !errors.Is(err, schemas.ErrMalformed) {
				t.Errorf("byte %d: %s, %v", i, got, err)
			}
			data[i] ^= flip
		}
	}
	for _, data := range [][]byte{nil, data[:len(data)-1], append(data, 0xc0)} {
		if _, err := schemas.PayloadDigest(h, data); !errors.Is(err, schemas.ErrMalformed) {
			t.Errorf("%d bytes: %v", len(data), err)
		}
	}
}
