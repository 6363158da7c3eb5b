package safetensors

import (
	"errors"
	"hash/maphash"
)

// sumBytes is how much of a file one sum is of. A tensor is read with the pieces that it begins and ends in.
const sumBytes = 64 << 10

// ErrChanged says that a file is not what it was when its sums were made.
var ErrChanged = errors.New("the file was changed while it was loaded")

// Sums tell whether what is read of a mapped file is what was read of it before, for its digest: a file on a disk can
// be written to at any time, and its time set back. They are of the bytes that Write is given, the whole file in order.
type Sums struct {
	seed   maphash.Seed
	pieces []uint64
	last   maphash.Hash
	in     int // bytes of the last piece so far
}

// NewSums returns the sums of no bytes.
func NewSums() *Sums {
	s := &Sums{seed: maphash.MakeSeed()}
	s.last.SetSeed(s.seed)
	return s
}

// Write adds bytes of the file. It never fails.
func (s *Sums) Write(b []byte) (n int, err error) {
	n = len(b)
	for len(b) > 0 {
		take := min(len(b), sumBytes-s.in)
		_, _ = s.last.Write(b[:take]) // never fails
		if s.in == 0 {
			s.pieces = append(s.pieces, 0)
		}
		s.in += take
		s.pieces[len(s.pieces)-1] = s.last.Sum64()
		if s.in == sumBytes {
			s.last.Reset()
			s.in = 0
		}
		b = b[take:]
	}
	return n, nil
}

// copy returns a copy of bytes from to to of a mapped file, which cannot change any more. ErrChanged: they have.
func (s *Sums) copy(file []byte, from, to int) ([]byte, error) {
	first, end := from/sumBytes*sumBytes, min(len(file), (to+sumBytes-1)/sumBytes*sumBytes)
	b := make([]byte, end-first)
	for at := first; at < end; at += sumBytes {
		piece := b[at-first : min(at+sumBytes, end)-first]
		copy(piece, file[at:])
		if at/sumBytes >= len(s.pieces) || maphash.Bytes(s.seed, piece) != s.pieces[at/sumBytes] {
			return nil, ErrChanged
		}
	}
	return b[from-first : to-first : to-first], nil
}
